"""Supervised processes, whatever they are for: the side of the owner, the inside, and the socket between."""
