"""Sweeps: what is asked (`space`, `options`, `target`), what is known (`study`), and the runs (`tuning`, `child`)."""
