"""Dr.GRPO (2503.20783) on the common task."""
