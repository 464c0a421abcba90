"""Drawing tokens from logits such that a draw depends on its own seed and position and on nothing else.

There is no generator state. The uniform number of a draw is a hash of (seed, position), and the token is the inverse of
the cumulative distribution at that number, so a request samples the same tokens alone or in a batch, in any order, and
when it is resumed from its own partial output.
"""

import torch

# splitmix64 (Steele, Lea, Flood 2014), its constants as signed 64-bit integers
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), one for each (seed, position), both (B,) int64. Returns (B,) fp64 with 53 random bits."""
    # the seed is mixed by itself first: neighbouring seeds must not give shifted copies of one sequence
    bits = _mix(_mix(seeds) + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch shifts signed integers with their sign."""
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
    """One token for each row, and its log-prob.

    logits: (B, V). temperature: (B,), 0 = the most likely token. seeds, positions: (B,) int64, see `uniform`.
    top_k (-1 = all), top_p: (B,), or both None if no row truncates.
    Returns tokens (B,) int64 and log_probs (B,) fp32 = log-softmax(logits / temperature) of the token over the full
    vocabulary (temperature 1 for greedy rows), whatever is truncated.
    """
    greedy = temperature == 0
    log_probs = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    probs = log_probs.exp()
    if top_k is not None and top_p is not None:
        probs = probs * _kept(probs, top_k, top_p)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform(seeds, positions)[:, None] * cumulative[:, -1:]
    # the first entry above the threshold has mass of its own, so a token of probability 0 is never drawn
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), tokens)
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)


def _kept(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """(B, V) bool: the top_k likeliest tokens, and of those the fewest whose renormalised probability reaches top_p."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    in_top_k = (top_k[:, None] < 0) | (rank < top_k[:, None])
    ordered = ordered * in_top_k
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    # a row that keeps all mass must not lose its tail to rounding
    in_top_p = (top_p[:, None] >= 1) | (before < top_p[:, None] * ordered.sum(dim=-1, keepdim=True))
    return torch.zeros_like(in_top_k).expand_as(probs).scatter(1, order, in_top_k & in_top_p)
