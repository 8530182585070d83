"""Tables to tables: calls to trajectories, rewards, advantages and batches, and what people see of them."""
