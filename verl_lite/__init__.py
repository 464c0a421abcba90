"""The kernel of verl_lite: pure data, mathematics and contracts. Importing it needs no GPU, no Ray and no vLLM."""

__version__ = "0.2.0"
