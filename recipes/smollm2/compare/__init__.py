"""The comparison of this library with TRL on the addition task; `__main__` describes the command."""
