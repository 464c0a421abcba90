"""An HTTP endpoint with the APIs of OpenAI and Anthropic, whose answers a rollout engine samples and training uses."""
