"""Run harnesses: tasks in, sandboxes around them, one row for every attempt out."""
