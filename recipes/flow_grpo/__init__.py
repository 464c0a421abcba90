"""Policy gradients for a flow-matching model: its denoising steps are the actions."""
