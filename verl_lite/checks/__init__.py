"""Whether options fit each other, the machine and the files."""
