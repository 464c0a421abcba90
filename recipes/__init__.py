"""Recipes: one folder is one reproducible result."""
