"""Training without a rollout: supervised fine-tuning and reward models."""
