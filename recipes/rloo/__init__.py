"""RLOO (2402.14740) on the common task."""
