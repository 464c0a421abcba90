"""What runs beside a device: training engines, rollout engines, rewards, and the roles made of them."""
