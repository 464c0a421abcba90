"""The embedded default: a tiny model learns to sort and to add."""
