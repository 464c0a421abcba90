"""The contract over every registered estimator and loss; and that it catches each way of breaking a promise."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.verl_lite.naive_losses import RATIO_LOSSES
from verl_lite import core_algos
from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS
from verl_lite.config import ActorConfig, PolicyLossConfig
from verl_lite.contracts import (
    ROWS,
    WIDTH,
    BrokenPromise,
    check_adv_estimator,
    check_policy_loss,
    estimator_batch,
    loss_batch,
)
from verl_lite.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    compute_value_loss,
    get_policy_loss_fn,
    group_ids,
    masked_mean,
)

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = {"selected": torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 3 == 0}
AGES = {"staleness": torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 5}
OPTIONS = PolicyLossConfig(dro_beta=0.5)


def test_the_names_of_verl_and_roll_are_there() -> None:
    assert set(ADV_ESTIMATOR_REGISTRY) >= {
        *("gae", "grpo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        *("rloo", "rloo_vectorized", "remax", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline"),
        *("gdpo", "maxrl", "reinforce", "step_reinforce", "gigpo", "agentic_reinforce"),
    }
    assert set(POLICY_LOSS_REGISTRY) >= {
        *("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dppo_tv", "dppo_kl", "dro", "cispo"),
        *("tis", "topr", "kimi15", "a3po"),
    }


def test_verls_smaller_names_give_what_verl_defines() -> None:
    scores, old, ref = (torch.tensor([[value, value]]) for value in (1.0, -1.0, -2.0))
    assert core_algos.compute_rewards(scores, old, ref, 0.5).tolist() == [[0.5, 0.5]]
    assert core_algos.kl_penalty_forward(old, ref, "k1+").tolist() == [[1.0, 1.0]]
    logits = torch.tensor([[[0.0, 0.0], [0.0, -torch.inf]]])  # entropies ln 2 and 0
    assert core_algos.compute_entropy_loss(logits, torch.tensor([[1, 0]])).item() == pytest.approx(math.log(2))
    assert core_algos.compute_entropy_loss(logits, torch.ones(1, 2)).item() == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_every_estimator_keeps_its_promises(name: str) -> None:
    # the groups of the check have negative means, which maxrl takes as no success
    positive = {"token_level_rewards": estimator_batch()["token_level_rewards"].abs()} if name == "maxrl" else {}
    check_adv_estimator(ADV_ESTIMATOR_REGISTRY[name], groups_of_one=name != "grpo_passk", **positive)


@pytest.mark.parametrize(
    ("name", "ratio_type"),
    [
        *((name, "token") for name in sorted(POLICY_LOSS_REGISTRY)),
        *((name, "segment") for name in sorted(RATIO_LOSSES)),
    ],
)
def test_every_loss_keeps_its_promises(name: str, ratio_type: str) -> None:
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, ratio_type=ratio_type, policy_loss=OPTIONS)
    check_policy_loss(
        POLICY_LOSS_REGISTRY[name], config, **(CHOSEN if name in TOKEN_SELECTIONS else AGES if name == "a3po" else {})
    )


def test_the_value_loss_keeps_the_promises_of_a_policy_loss() -> None:
    def value_loss(old: Any, new: Any, returns: Any, mask: Any, mode: str, config: Any, weights: Any, **counts: Any):
        loss, clipfrac = compute_value_loss(new, returns, old, mask, 0.3, mode, **counts)
        return loss, {"vf_clipfrac": float(clipfrac)}

    check_policy_loss(value_loss)


# ---------------------------------------------------------------------------------------------------- what is wrong

Loss = tuple[torch.Tensor, dict[str, Any]]


def sound_estimator(token_level_rewards: Any, response_mask: Any, index: Any, **_: Any) -> Any:
    """Score less the mean of the group: keeps every promise. The wrong ones below differ in one point each."""
    valid = (response_mask != 0).any(dim=1)
    scores = scores_of(token_level_rewards, response_mask)
    groups, number = group_ids(index, scores.device)
    totals = scores.new_zeros(number, 2).index_add(0, groups, torch.stack([scores, valid.to(scores.dtype)], dim=1))
    return spread(scores - (totals[:, 0] / totals[:, 1].clamp(min=1))[groups], response_mask)


def scores_of(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask != 0, rewards, 0).sum(dim=1)


def spread(numbers: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's number at its valid tokens, as advantages and returns."""
    advantages = torch.where(mask != 0, numbers[:, None], 0)
    return advantages, advantages


def nan_on_an_empty_row(rewards: Any, mask: Any, _index: Any) -> Any:
    advantages = (scores_of(rewards, mask) / mask.sum(1))[:, None] * mask
    return advantages, advantages


def looks_at_the_row_before(rewards: Any, mask: Any, _index: Any) -> Any:
    valid, scores = (mask != 0).any(dim=1), scores_of(rewards, mask)
    before = torch.zeros_like(scores)
    before[valid] = scores[valid].roll(1)
    return spread(scores - before, mask)


def divides_by_a_deviation_of_one_value(rewards: Any, mask: Any, _index: Any) -> Any:
    kept = rewards[mask != 0]
    scale = ((kept - kept.mean()).square().sum() / (len(kept) - 1)).sqrt()
    advantages = torch.where(mask != 0, (rewards - kept.mean()) / scale, 0)
    return advantages, advantages


WRONG_ESTIMATORS: list[tuple[str, Any]] = [
    ("values under mask 0 do not affect the result", lambda r, m, i: spread(r.sum(1), m)),
    ("the result is 0 under mask 0", lambda r, m, i: [scores_of(r, m)[:, None].expand_as(r)] * 2),
    (r"tensors \(B, T\)", lambda r, m, i: (scores_of(r, m), spread(scores_of(r, m), m)[1])),
    ("not all zero", lambda r, m, i: (torch.zeros_like(r), torch.zeros_like(r))),
    ("advantages are finite", nan_on_an_empty_row),
    ("rows without a valid token have no weight", lambda r, m, i: spread(scores_of(r, m) - scores_of(r, m).mean(), m)),
    ("the order of the rows does not matter", looks_at_the_row_before),
    ("the result is finite for a batch with . tokens", divides_by_a_deviation_of_one_value),
    ("does not modify its arguments", lambda r, m, i: sound_estimator(r.mul_(m).mul_(2), m, i)),
    ("created on the arguments' device", lambda r, m, i: [x * torch.ones(WIDTH) for x in sound_estimator(r, m, i)]),
]


@pytest.mark.parametrize(("promise", "wrong"), WRONG_ESTIMATORS, ids=[promise for promise, _ in WRONG_ESTIMATORS])
def test_a_wrong_estimator_is_caught(promise: str, wrong: Any) -> None:
    def estimator(token_level_rewards: Any, response_mask: Any, index: Any, **_: Any) -> Any:
        return tuple(wrong(token_level_rewards, response_mask, index))

    with pytest.raises(BrokenPromise, match=promise):
        check_adv_estimator(estimator)


def sound_loss(
    old: Any, new: Any, advantages: Any, mask: Any, mode: str, config: Any, weights: Any = None, **counts: Any
) -> Loss:
    """-A times the ratio, bounded: keeps every promise. The wrong ones below differ in one point each."""
    loss = agg_loss(losses_of(old, new, advantages, mask), mask, mode, **counts)
    return loss, {"kl": float(masked_mean((old - new).detach(), mask))}


def losses_of(old: Any, new: Any, advantages: Any, mask: Any) -> torch.Tensor:
    return -torch.where(mask != 0, advantages, 0) * torch.where(mask != 0, new - old, 0).clamp(-20, 20).exp()


def unbounded(old: Any, new: Any, advantages: Any, mask: Any) -> torch.Tensor:
    ratio = torch.where(mask != 0, new - old, 0).square().exp()
    return -torch.where(mask != 0, advantages, 0) * ratio


WRONG_LOSSES: dict[str, tuple[Any, str]] = {
    "divides by its own tokens": (
        lambda o, n, a, m, mode, counts: masked_mean(losses_of(o, n, a, m), m),
        "sum to the whole.*do not divide by counts of the micro-batch.*as agg_loss does",
    ),
    "divides by its own rows": (
        lambda o, n, a, m, mode, counts: agg_loss(
            losses_of(o, n, a, m), m, mode, **counts | {"global_batch_size": len(m)}
        ),
        "the parts of a mini-batch sum to the whole",
    ),
    "takes a mean over nothing": (
        lambda o, n, a, m, mode, counts: (
            (losses_of(o, n, a, m).sum(1) / m.sum(1)).sum() / max(1, counts["global_batch_size"])
        ),
        "the loss is finite",
    ),
    "divides by no tokens": (
        lambda o, n, a, m, mode, counts: losses_of(o, n, a, m).sum() / torch.tensor(counts["batch_num_tokens"]),
        "sum to the whole|the loss is finite|a part without a token has loss 0",
    ),
    "has no gradient": (
        lambda o, n, a, m, mode, counts: agg_loss(losses_of(o, n.detach(), a, m), m, mode, **counts),
        "a loss is a scalar that depends on log_prob",
    ),
    "overflows": (
        lambda o, n, a, m, mode, counts: agg_loss(unbounded(o, n, a, m), m, mode, **counts),
        "the loss is finite.*clamp",
    ),
    "does not bound the ratio": (
        lambda o, n, a, m, mode, counts: agg_loss(
            -torch.where(m != 0, a, 0) * torch.where(m != 0, n - o, 0).exp(), m, mode, **counts
        ),
        "the loss is finite.*clamp",
    ),
    "clips in place": (
        lambda o, n, a, m, mode, counts: agg_loss(losses_of(o, n, a.clamp_(-0.5, 0.5), m), m, mode, **counts),
        "does not modify its arguments",
    ),
    "mixes devices": (
        lambda o, n, a, m, mode, counts: agg_loss(losses_of(o, n, a, m), m, mode, **counts) * torch.ones(()),
        "new tensors are created on the arguments' device",
    ),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_a_wrong_loss_is_caught(name: str) -> None:
    wrong, promise = WRONG_LOSSES[name]

    def loss(old: Any, new: Any, a: Any, mask: Any, mode: str, config: Any, weights: Any = None, **counts: Any) -> Loss:
        return wrong(old, new, a, mask, mode, counts), {}

    with pytest.raises(BrokenPromise, match=promise):
        check_policy_loss(loss)


def test_metrics_that_count_padding_are_caught() -> None:
    def loss(old: Any, new: Any, *rest: Any, **counts: Any) -> Loss:
        return sound_loss(old, new, *rest, **counts)[0], {"kl": float((old - new).detach().mean())}

    with pytest.raises(BrokenPromise, match="metrics do not count tokens under mask 0: kl changes with padding"):
        check_policy_loss(loss)


def test_what_is_sound_passes() -> None:
    check_adv_estimator(sound_estimator)
    check_policy_loss(sound_loss)


def code_that_users_copy() -> dict[str, str]:
    """Every block and template of the guides that registers a loss or an estimator, by file and place."""
    found: dict[str, str] = {}
    for path in ("verl_lite/README.md", "recipes/README.md", "trainer/recipe_template/estimator.py.txt"):
        text = (ROOT / path).read_text()
        blocks = [text] if path.endswith(".txt") else re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        for place, block in enumerate(blocks):
            if "@register_policy_loss" in block or "@register_adv_est" in block:
                found[f"{path} {place}"] = block
    return found


@pytest.mark.parametrize("code", code_that_users_copy().items(), ids=lambda item: item[0])
def test_what_guides_and_templates_show_keeps_the_promises(code: tuple[str, str]) -> None:
    """A loss of a guide once broke the contract."""
    kept = [(registry, dict(registry)) for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY)]
    try:
        exec(code[1].replace("NAME", "named_here"), {"__name__": "copied"})
        for (registry, before), check in zip(kept, (check_adv_estimator, check_policy_loss), strict=True):
            for name in set(registry) - set(before):
                check(registry[name])
        assert any(set(registry) - set(before) for registry, before in kept)
    finally:
        for registry, before in kept:
            registry.clear()
            registry.update(before)


def as_type(columns: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else value
        for name, value in columns.items()
    }


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_estimators_compute_in_fp32_at_least(name: str) -> None:
    """bf16 columns give what the same numbers give as fp32, in fp32; integers are numbers too."""
    estimator = ADV_ESTIMATOR_REGISTRY[name]
    columns = as_type(estimator_batch(groups_of_one=name != "grpo_passk"), torch.bfloat16)
    for found, expected in zip(estimator(**columns), estimator(**as_type(columns, torch.float32)), strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, expected)
    whole = columns | {"token_level_rewards": (columns["token_level_rewards"] * 4).round()}
    integers = whole | {"token_level_rewards": whole["token_level_rewards"].long()}
    for found, expected in zip(estimator(**integers), estimator(**whole), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", sorted(POLICY_LOSS_REGISTRY))
def test_losses_compute_in_fp32_at_least(name: str) -> None:
    columns = as_type(loss_batch(), torch.bfloat16)
    config, results = ActorConfig(policy_loss=OPTIONS, ratio_type="segment" if name in RATIO_LOSSES else "token"), []
    for dtype in (torch.bfloat16, torch.float32):
        given = as_type(columns, dtype)
        log_prob = given.pop("log_prob").clone().requires_grad_()
        weights = given.pop("rollout_is_weights")
        order = (given["old_log_prob"], log_prob, given["advantages"], given["response_mask"])
        extras = CHOSEN if name in TOKEN_SELECTIONS else {}
        loss, _ = get_policy_loss_fn(name)(*order, "token-mean", config, weights, **extras)
        loss.backward()
        assert loss.dtype == torch.float32 and log_prob.grad is not None and log_prob.grad.dtype == dtype
        results.append((loss.detach(), log_prob.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1].bfloat16()), "the gradient is rounded once, at the end"
