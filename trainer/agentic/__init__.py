"""Driver of agentic runs, in which agents act in environments."""
