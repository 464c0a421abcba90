"""Workers of diffusion models: pipeline loading, differentiable sampling, policies and their workers."""
