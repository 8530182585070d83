"""Where tasks come from: our own folders, Harbor's, rows of SWE-bench and SWE-Gym. One module for each format."""
