"""Scores of a batch from reward functions and reward models, failed rewards, and adjustments of scores."""
