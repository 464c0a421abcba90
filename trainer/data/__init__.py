"""The rows of a run: where they come from, what they mean, in which order."""
