"""What this machine has and who uses it: cores and memory of control groups, GPUs."""
