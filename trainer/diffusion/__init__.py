"""Training of diffusion models: the loop of their drivers, and reward flow."""
