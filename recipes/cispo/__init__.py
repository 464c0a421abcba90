"""CISPO (2506.13585) on the common task."""
