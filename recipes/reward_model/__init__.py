"""A reward model is trained from pairs of answers, and a policy by it."""
