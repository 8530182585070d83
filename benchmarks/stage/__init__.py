"""What the benchmarks stand on: an engine that costs next to nothing, the processes that are measured, and the load."""
