"""What a run needs before it starts: memory, time, and what to change."""
