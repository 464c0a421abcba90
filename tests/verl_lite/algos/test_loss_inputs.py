"""What a policy loss reads, and the registration of losses with either signature; values by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from verl_lite import core_algos
from verl_lite.algos.policy_loss_registry import has_verl_signature, policy_loss_of
from verl_lite.config import ActorConfig
from verl_lite.core_algos import (
    POLICY_LOSS_REGISTRY,
    Aggregation,
    LossInputs,
    LossResult,
    get_policy_loss,
    get_policy_loss_fn,
    register_policy_loss,
)
from verl_lite.metrics import values

Verl = tuple[torch.Tensor, dict[str, Any]]


def inputs_of(**changes: Any) -> LossInputs:
    """Two rows with log-ratios ln 2, 0 and -30, and NaN under mask 0; a mini-batch of 6 tokens and 4 sequences."""
    nan = math.nan
    columns = {
        "log_prob": torch.tensor([[math.log(2) - 3, -3.0], [-33.0, nan]], dtype=torch.float64),
        "old_log_prob": torch.tensor([[-3.0, -3.0], [-3.0, nan]], dtype=torch.float64),
        "advantages": torch.tensor([[1.0, 2.0], [3.0, nan]], dtype=torch.bfloat16),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "config": ActorConfig(),
        "aggregation": Aggregation("token-mean", batch_num_tokens=6, global_batch_size=4),
    }
    return LossInputs(**columns | changes)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(POLICY_LOSS_REGISTRY)
    yield
    POLICY_LOSS_REGISTRY.clear()
    POLICY_LOSS_REGISTRY.update(before)


# ---------------------------------------------------------------------------------------------------- LossInputs


def test_columns_are_0_under_the_mask_and_at_least_fp32() -> None:
    inputs = inputs_of(rollout_is_weights=torch.full((2, 2), math.nan))
    assert inputs.advantages.dtype == torch.float32 and inputs.advantages.tolist() == [[1, 2], [3, 0]]
    assert inputs.log_prob.dtype == torch.float64
    for column in (inputs.log_prob, inputs.old_log_prob, inputs.rollout_is_weights):
        assert column[1, 1] == 0


def test_nan_under_the_mask_has_no_gradient() -> None:
    log_prob = inputs_of().log_prob.clone()
    log_prob[1, 1] = math.nan
    inputs = inputs_of(log_prob=log_prob.requires_grad_())
    inputs.aggregate(inputs.log_ratio).backward()
    # the log-ratio of the second row is clamped, and each token is one of 6
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[pytest.approx(1 / 6), pytest.approx(1 / 6)], [0, 0]]


def test_log_ratios_are_clamped_and_averaged_over_segments_on_request() -> None:
    assert inputs_of().log_ratio.tolist() == [[pytest.approx(math.log(2)), 0], [-20, 0]]
    by_token, by_segment = (inputs_of(config=ActorConfig(ratio_type=kind)) for kind in ("token", "segment"))
    assert torch.equal(by_token.importance_log_ratio, by_token.log_ratio)
    half = pytest.approx(math.log(2) / 2)
    assert by_segment.importance_log_ratio.tolist() == [[half, half], [-20, 0]]


def test_aggregate_weighs_and_divides_by_the_counts_of_the_mini_batch() -> None:
    losses = torch.tensor([[1.0, 3.0], [5.0, math.nan]])
    weights = torch.tensor([[2.0, 1.0], [4.0, math.nan]])
    assert inputs_of().aggregate(losses).item() == pytest.approx((1 + 3 + 5) / 6)
    weighted = inputs_of(rollout_is_weights=weights)
    assert weighted.aggregate(losses).item() == pytest.approx((2 + 3 + 20) / 6)
    by_row = torch.tensor([[10.0], [100.0]])
    assert weighted.aggregate(losses, weights=by_row).item() == pytest.approx((10 + 30 + 500) / 6)
    mean_of_rows = weighted.aggregate(losses, loss_agg_mode="seq-mean-token-mean")
    assert mean_of_rows.item() == pytest.approx(((2 + 3) / 2 + 20) / 4)


def test_token_means_are_over_the_valid_tokens() -> None:
    metrics = inputs_of().token_means(share=torch.tensor([[True, False], [True, True]]))
    assert values(metrics) == pytest.approx({"ppo_kl": (-math.log(2) - 0 + 20) / 3, "share": 2 / 3})
    own = inputs_of().token_means(ppo_kl=torch.tensor([[1.0, 2.0], [6.0, math.nan]]))
    assert values(own) == {"ppo_kl": pytest.approx(3.0)}


@pytest.mark.parametrize("column", ["log_prob", "advantages", "rollout_is_weights", "selected", "staleness"])
def test_a_column_of_another_shape_is_named(column: str) -> None:
    with pytest.raises(ValueError, match=rf"policy loss: {column} has shape \(2, 1\), expected .* \(2, 2\)"):
        inputs_of(**{column: torch.ones(2, 1)})


# ---------------------------------------------------------------------------------------------------- registration


def of_inputs(inputs: LossInputs) -> LossResult:
    return inputs.aggregate(inputs.log_prob), {}


def with_counts(
    old: Any, new: Any, a: Any, mask: Any, mode: str, config: Any, weights: Any = None, **counts: Any
) -> Verl:
    return new.sum(), {"tokens": float(counts["batch_num_tokens"]), "sequences": float(counts["global_batch_size"])}


def as_in_verl(
    old: Any, new: Any, a: Any, mask: Any, mode: str, config: Any, weights: Any = None, scores: Any = None
) -> Verl:
    counts = config.global_batch_info
    assert config.clip_ratio == 0.2 and mode == "token-mean" and weights is None
    return new.sum() * counts["dp_size"], {"tokens": counts["batch_num_tokens"], "scores@sum": float(scores.sum())}


def with_required_counts(
    old: Any, new: Any, a: Any, mask: Any, mode: str, config: Any, weights: Any, *, batch_num_tokens: int
) -> Verl:
    return new.sum() / batch_num_tokens, {}


def test_either_signature_is_recognized() -> None:
    assert not has_verl_signature(of_inputs) and not has_verl_signature(lambda inputs, bound=2.0: None)
    for function in (with_counts, as_in_verl, with_required_counts, lambda *columns, **counts: None):
        assert has_verl_signature(function)
    assert has_verl_signature(core_algos.compute_policy_loss_vanilla)


def test_a_registration_declares_columns_which_a_verl_loss_may_name() -> None:
    assert register_policy_loss("a", columns=("scores", "staleness"))(of_inputs) is of_inputs
    assert get_policy_loss("a").columns == ("scores", "staleness")
    register_policy_loss("b")(as_in_verl)
    assert get_policy_loss("b").columns == ("scores",)
    assert get_policy_loss("vanilla").columns == () and get_policy_loss("clip_cov").columns == ("selected",)
    with pytest.raises(ValueError, match="found the column 'score', expected some of selected, scores, staleness"):
        register_policy_loss("c", columns=("score",))


def test_a_path_has_the_columns_of_the_registration() -> None:
    assert get_policy_loss("verl_lite.algos.reinforce_losses:topr").columns == ("scores",)
    assert get_policy_loss("verl_lite.core_algos:compute_policy_loss_topr").columns == ("scores",)
    assert get_policy_loss(f"{__name__}:as_in_verl").columns == ("scores",)
    assert get_policy_loss(f"{__name__}:of_inputs").columns == ()


def test_a_loss_with_verls_signature_gets_counts_columns_and_no_value_under_the_mask() -> None:
    inputs = inputs_of(scores=torch.tensor([1.0, 2.0]))
    loss, metrics = policy_loss_of(as_in_verl)(inputs)
    assert loss.item() == pytest.approx(math.log(2) - 3 - 3 - 33)
    # tokens is a mean over the 3 tokens; the sum is a part of the mini-batch's, of which these tokens are a half
    assert values(metrics) == pytest.approx({"tokens": 6.0, "scores": 3.0 / (3 / 6)})
    _, metrics = policy_loss_of(with_counts)(inputs)
    assert values(metrics) == {"tokens": 6.0, "sequences": 4.0}
    loss, _ = policy_loss_of(with_required_counts)(inputs)
    assert loss.item() == pytest.approx((math.log(2) - 39) / 6)


def test_a_loss_of_inputs_can_be_called_with_verls_arguments() -> None:
    register_policy_loss("a")(of_inputs)
    columns = torch.tensor([[-1.0, -2.0]])
    arguments = (columns, columns, columns, torch.ones(1, 2), "token-sum", ActorConfig())
    assert get_policy_loss_fn("a")(*arguments)[0].item() == -3.0
    register_policy_loss("b")(with_counts)
    assert get_policy_loss_fn("b") is with_counts
