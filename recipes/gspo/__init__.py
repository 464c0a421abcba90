"""GSPO (2507.18071) on the common task."""
