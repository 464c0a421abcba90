"""Samples tokens from logits. Each draw depends only on its seed and position.

There is no generator state: the uniform number of a draw is a hash of (seed, position), and the token is the inverse of
the cumulative distribution at that number. A request therefore samples the same tokens alone or in a batch, in any
order, and when it is resumed from its partial output.
"""

from typing import NamedTuple

import torch

# constants of splitmix64 (Steele, Lea, Flood 2014) as signed 64-bit integers
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns one number in [0, 1) per pair of `seeds` and `positions`, both (B,) int64: (B,) fp64, 53 random bits."""
    # the seed is mixed alone first; without that, neighbouring seeds would give shifted copies of the same sequence
    state = _mix(seeds) + (positions + 1) * _GOLDEN
    # fp64 holds 53 bits
    bits = _shift_right(_mix(state), 11)
    return bits.double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Returns splitmix64's hash of each number."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts right logically (filling with zeros); torch's own shift of signed integers extends the sign."""
    remaining_bits = (1 << (64 - bits)) - 1
    return (x >> bits) & remaining_bits


class Truncation(NamedTuple):
    """Truncation of each row's distribution.

    Attributes:
        top_k: (B,); -1 = all tokens.
        top_p: (B,); 1 = all tokens.
        min_p: (B,); 0 = all tokens.
        limit: Largest top_k of the rows that are not greedy; None if one of them has no top_k, which takes more time.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    limit: int | None = None


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    truncation: Truncation | None = None,
    num_candidates: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Samples one token per row and computes its log-prob.

    Args:
        logits: (B, V).
        temperature: (B,); 0 selects the most likely token (greedy).
        seeds: (B,) int64, see `uniform`.
        positions: (B,) int64, see `uniform`.
        truncation: None if no row truncates its distribution; greedy rows ignore it.
        num_candidates: The top_k of the rows whose candidates are returned; 0 = none.

    Returns:
        Tokens (B,) int64, log_probs (B,) fp32 and candidates. A log-prob is log-softmax(logits / temperature) of the
        token over the tokens that the truncation keeps; greedy rows use temperature 1. Candidates are
        (B, num_candidates) int32: the kept tokens of the rows with this top_k, most probable first, followed by -1;
        -1 in other rows; None if num_candidates is 0.
    """
    is_greedy = temperature == 0
    # greedy rows divide by 1 and not by 0
    divisor = torch.where(is_greedy, 1.0, temperature)[:, None]
    log_probs = torch.log_softmax(logits.float() / divisor, dim=-1)
    probs = log_probs.exp()
    if truncation is not None:
        is_kept = _kept_tokens(probs, truncation)
        probs = probs * is_kept
        is_removed = ~(is_kept | is_greedy[:, None])
        # one name for all of them, because each needs the memory of the logits
        log_probs = log_probs.masked_fill(is_removed, -torch.inf)
        log_probs = log_probs.log_softmax(dim=-1)

    # in fp64, because the sum over a vocabulary would lose the probabilities of rare tokens in fp32
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    # times the last entry, because the kept probabilities sum to less than 1
    total = cumulative[:, -1:]
    threshold = uniform(seeds, positions)[:, None] * total
    # the first entry above the threshold has a probability above 0, so a token of probability 0 is never drawn
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    vocab_size = logits.shape[1]
    drawn = drawn.clamp_(max=vocab_size - 1)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1), drawn)

    candidates = None
    if num_candidates and truncation is not None:
        best = log_probs.topk(num_candidates, dim=-1)
        has_candidates = (truncation.top_k == num_candidates) & ~is_greedy
        # removed tokens have -inf
        is_returned = has_candidates[:, None] & best.values.isfinite()
        candidates = best.indices.where(is_returned, -1).int()
    elif num_candidates:
        candidates = tokens.new_full((len(tokens), num_candidates), -1, dtype=torch.int32)

    token_log_probs = log_probs.gather(1, tokens[:, None])
    return tokens, token_log_probs.squeeze(1), candidates


def _kept_tokens(probs: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Returns (B, V) bool: the tokens that can be sampled, as vLLM selects them after the temperature.

    First min_p removes the tokens whose probability is below min_p times the largest one. Then top_k keeps the most
    probable of the others. Last, top_p keeps the smallest set of the most probable tokens whose mass, relative to that
    of the tokens kept so far, reaches top_p. Of tokens with equal logits at the border of top_k, vLLM keeps all, this
    function no more than top_k.
    """
    top_k = truncation.top_k[:, None]
    top_p = truncation.top_p[:, None]
    min_p = truncation.min_p[:, None]
    vocab_size = probs.shape[1]
    limit = truncation.limit
    if limit is None or limit >= vocab_size:
        # stable, so that equal probabilities keep the order of the vocabulary
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    else:
        ordered, order = probs.topk(limit, dim=-1)

    rank = torch.arange(ordered.shape[1], device=probs.device)
    largest = ordered[:, :1]
    in_min_p = ordered >= min_p * largest
    in_top_k = (top_k < 0) | (rank < top_k)
    in_both = in_min_p & in_top_k

    ordered = ordered * in_both
    mass_before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    wanted_mass = top_p * ordered.sum(dim=-1, keepdim=True)
    # rounding must not cut the tail of a row with top_p = 1
    in_top_p = (top_p >= 1) | (mass_before < wanted_mass)

    is_kept = torch.zeros_like(probs, dtype=torch.bool)
    return is_kept.scatter_(1, order, in_both & in_top_p)
