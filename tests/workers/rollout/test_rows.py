"""The token columns of sampled rows."""

from __future__ import annotations

import math

import pytest
import torch

from verl_lite.errors import UserError
from workers.rollout.rows import Response, write_rows


def response(*log_probs: float) -> Response:
    tokens = [5] * len(log_probs)
    return Response(tokens, [1] * len(tokens), log_probs, [0] * len(tokens), "stop", {})


def test_a_log_prob_that_is_no_number_is_refused() -> None:
    prompts = torch.tensor([[3], [3]])
    finite = [response(-0.5, -1.0), response(-math.inf)]
    rows = write_rows(prompts, torch.ones_like(prompts), finite, 4, 0, {})
    assert rows.batch["rollout_log_probs"].tolist() == [[-0.5, -1.0, 0.0, 0.0], [-math.inf, 0.0, 0.0, 0.0]]
    broken = [finite[0], response(-0.5, math.nan, math.nan)]
    with pytest.raises(UserError, match="log-prob nan in 1 of 2 responses, first at token 1, .* rollout.dtype=fp32"):
        write_rows(prompts, torch.ones_like(prompts), broken, 4, 0, {})
