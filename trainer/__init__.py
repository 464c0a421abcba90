"""The driver process: data, training loop, validation, tracking and commands."""
