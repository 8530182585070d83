"""Training and the embedded engine. Torch lives here and nowhere else."""
