"""Networks as policies: log-probs, entropy and values from hidden states."""
