"""Reward flow: the driver of diffusion training."""
