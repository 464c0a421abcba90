"""GRPO (2402.03300) on the common task."""
