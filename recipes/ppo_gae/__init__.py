"""PPO with a critic on the task of the quickstart."""
