"""From the bytes of a model call to a row: intercept, answer from the user's engine, record exact tokens."""
