"""What this machine has and who uses it: control groups, GPUs, and the leases that keep runs apart."""
