"""Sweeps: what is asked (`space`, `question`, `checks`), what is known (`study`), and the runs (`tuning`, `child`)."""
