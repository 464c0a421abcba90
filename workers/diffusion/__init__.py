"""Diffusion models: loading a pipeline, sampling with gradient, the policy and its worker."""
