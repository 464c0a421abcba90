"""Shaping of scores that looks at the answer's form and not at whether it is right: pure functions of tensors."""

from __future__ import annotations

import torch


def overlong_penalty(
    lengths: torch.Tensor, max_response_length: int, buffer_len: int, penalty_factor: float
) -> torch.Tensor:
    """Soft punishment of long answers (DAPO, arXiv:2503.14476, eq. 13), (B,) fp32, at most 0.

    lengths: (B,) tokens of each answer. With L = max_response_length and b = buffer_len an answer of up to L - b tokens
    has none; then it grows linearly, to -penalty_factor at L tokens. As in verl, where the paper's factor is 1.
    Raises ValueError unless 1 <= buffer_len <= max_response_length.
    """
    if not 1 <= buffer_len <= max_response_length:
        raise ValueError(
            f"overlong_penalty: buffer_len={buffer_len}; expected 1 to max_response_length={max_response_length}."
        )
    exceeding = lengths.float() - (max_response_length - buffer_len)
    return (-exceeding / buffer_len * penalty_factor).clamp(max=0.0)
