"""Several tasks of reasoning-gym, mixed by weight, with a curriculum."""
