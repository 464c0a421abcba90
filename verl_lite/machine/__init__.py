"""The resources of this machine and their users: cores, memory, GPUs."""
