"""The parts of `protocol`: the columns of a batch, what is done with them, and how they travel."""
