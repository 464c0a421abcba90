"""The embedded default of reward flow: drawn people, whom a small video model learns to keep apart."""
