"""Samples tokens from logits. Each draw depends only on its seed and position.

There is no generator state: the uniform number of a draw is a hash of (seed, position), and the token is the inverse of
the cumulative distribution at that number. A request therefore samples the same tokens alone or in a batch, in any
order, and when it is resumed from its partial output.
"""

import torch

# constants of splitmix64 (Steele, Lea, Flood 2014) as signed 64-bit integers
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns one number in [0, 1) per pair of `seeds` and `positions`, both (B,) int64: (B,) fp64, 53 random bits."""
    # the seed is mixed alone first; without that, neighbouring seeds would give shifted copies of the same sequence
    bits = _mix(_mix(seeds) + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts right logically (filling with zeros); torch's own shift of signed integers extends the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token per row and computes its log-prob.

    Args:
        logits: (B, V).
        temperature: (B,); 0 selects the most likely token (greedy).
        seeds, positions: (B,) int64, see `uniform`.
        top_k, top_p: (B,), or both None if no row truncates its distribution; top_k = -1 keeps all tokens.

    Returns:
        Tokens (B,) int64 and log_probs (B,) fp32. A log-prob is log-softmax(logits / temperature) of the token over
        the full vocabulary, also with truncation; greedy rows use temperature 1.
    """
    greedy = temperature == 0
    log_probs = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    probs = log_probs.exp()
    if top_k is not None and top_p is not None:
        probs = probs * _truncation_mask(probs, top_k, top_p)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform(seeds, positions)[:, None] * cumulative[:, -1:]
    # the first entry above the threshold has a probability above 0, so a token of probability 0 is never drawn
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)


def _truncation_mask(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Returns (B, V) bool: the smallest set of the top_k likeliest tokens whose renormalised mass reaches top_p."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    in_top_k = (top_k[:, None] < 0) | (rank < top_k[:, None])
    ordered = ordered * in_top_k
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    # rounding must not cut the tail of a row with top_p = 1
    in_top_p = (top_p[:, None] >= 1) | (before < top_p[:, None] * ordered.sum(dim=-1, keepdim=True))
    return torch.zeros_like(in_top_k).expand_as(probs).scatter(1, order, in_top_k & in_top_p)
