"""Policy, value and reward networks: log-probs, entropy, values and scores from hidden states."""
