"""The driver: data, the training loop, validation, tracking, commands."""
