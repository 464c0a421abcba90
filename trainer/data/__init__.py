"""Datasets: sources of rows, row formats, tokenization, and the order of training prompts."""
