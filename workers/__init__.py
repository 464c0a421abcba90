"""Code that runs in worker processes: training engines, rollout engines, reward and environment pools, and workers."""
