"""`python -m tests.soak --steps 300`: whether a run holds more memory, files, threads or disk the longer it runs."""
