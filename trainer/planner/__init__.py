"""Plans of a run before it starts: batch sizes, memory, time, and options to change."""
