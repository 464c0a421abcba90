"""Video clips: reads, checks, writes and draws them."""
