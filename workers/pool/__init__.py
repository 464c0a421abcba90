"""One supervised pool of processes, for rewards, environments and whatever else runs code of others."""
