"""ReMax (2310.10505) on the common task."""
