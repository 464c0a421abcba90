"""`python -m tests.fuzz --configs 500 --datasets 200`: wrong input runs, or stops with our error."""
