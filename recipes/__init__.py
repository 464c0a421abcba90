"""Recipes: each folder reproduces one result."""
