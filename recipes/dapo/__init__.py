"""DAPO on the task of the quickstart."""
