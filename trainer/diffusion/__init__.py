"""Training of diffusion models: the driver's training loop, and reward flow."""
