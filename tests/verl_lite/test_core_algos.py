"""core_algos against hand-worked numbers, naive loops and exact enumeration.

The one property that matters most, independence of how a batch is cut, is in test_split_invariance.py.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_lite import core_algos
from verl_lite.core_algos import (
    AdaptiveKLController,
    FixedKLController,
    agg_loss,
    apply_kl_penalty,
    compute_grpo_outcome_advantage,
    compute_policy_loss,
    compute_policy_loss_vanilla,
    entropy_from_logits,
    get_adv_estimator_fn,
    get_kl_controller,
    get_policy_loss_fn,
    kl_penalty,
    masked_mean,
    masked_sum,
    masked_whiten,
    register_adv_est,
    register_policy_loss,
)

CONFIG = SimpleNamespace(
    clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=3.0, loss_scale_factor=None
)


def random_mask(rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    return (torch.arange(width) < lengths[:, None]).long()


# ---------------------------------------------------------------------------------------------------- registries


def test_unknown_estimator_text_of_verl():
    with pytest.raises(ValueError, match="Unknown advantage estimator simply: nothing_like_it"):
        get_adv_estimator_fn("nothing_like_it")
    with pytest.raises(ValueError, match="Unknown policy loss: vanila. Did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")


def test_registered_functions_are_found_and_collisions_raise(monkeypatch):
    # a plain dict in place of the registry, as users' tests do with verl
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", {})
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", core_algos.POLICY_LOSS_REGISTRY.copy())

    @register_adv_est("mine")
    def mine(**_):
        return None

    assert get_adv_estimator_fn("mine") is mine
    assert register_adv_est("mine")(mine) is mine
    with pytest.raises(ValueError, match="already registered"):
        register_adv_est("mine")(lambda **_: None)
    assert register_policy_loss("mine")(mine) is mine and get_policy_loss_fn("mine") is mine


# ---------------------------------------------------------------------------------------------------- masked arithmetic


def test_masked_functions_ignore_nan_under_mask_0():
    values = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.nan, math.inf]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_sum(values, mask) == 9.0
    assert masked_mean(values, mask).item() == pytest.approx(3.0)
    assert masked_mean(values, mask, axis=-1).tolist() == pytest.approx([2.0, 5.0])
    whitened = masked_whiten(values, mask)
    expected = (np.array([1.0, 3.0, 5.0]) - 3.0) / np.std([1.0, 3.0, 5.0], ddof=1)
    assert whitened[mask != 0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    kept_mean = masked_whiten(values, mask, shift_mean=False)
    assert kept_mean[mask != 0].mean().item() == pytest.approx(3.0)
    masked_sum(values, mask).backward()
    assert torch.equal(values.grad, mask.float())


@pytest.mark.parametrize("kept", [0, 1])
def test_whitening_of_fewer_than_two_values_raises(kept):
    with pytest.raises(ValueError, match=f"keeps {kept} values"):
        masked_whiten(torch.ones(3), torch.tensor([kept, 0, 0]))


# ---------------------------------------------------------------------------------------------------- GRPO


def naive_grpo(scores, mask, index, by_std):
    mask = mask.double()
    advantages = torch.zeros_like(mask)
    for row in range(len(scores)):
        if mask[row].sum() == 0:
            continue
        group = [scores[i] for i in range(len(scores)) if index[i] == index[row] and mask[i].sum() > 0]
        mean, std = (0.0, 1.0) if len(group) == 1 else (np.mean(group), np.std(group, ddof=1))
        value = scores[row] - mean
        advantages[row] = (value / (std + 1e-6) if by_std else value) * mask[row]
    return advantages


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_equals_a_naive_loop(by_std):
    generator = torch.Generator().manual_seed(3)
    mask = random_mask(40, 6, generator)
    rewards = torch.randn(40, 6, generator=generator, dtype=torch.float64) * mask
    index = np.array([f"prompt-{i % 7 if i < 39 else 'alone'}" for i in range(40)], dtype=object)
    mask[39] = 1
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=by_std)
    expected = naive_grpo(rewards.sum(-1).tolist(), mask, index, by_std)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(returns, advantages)


def test_grpo_by_hand():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 5.0], [0.0, 2.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(["a", "a", "b", "c"], dtype=object))
    half = 0.5 / (math.sqrt(0.5) + 1e-6)  # mean 0.5, unbiased std sqrt(0.5)
    expected = [[half, half], [-half, -half], [5 / 1.000001] * 2, [2 / 1.000001, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_grpo_leaves_rows_without_tokens_out_of_the_statistics():
    rewards = torch.tensor([[1.0, 0.0], [3.0, 0.0], [99.0, math.nan], [math.nan, math.nan]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0], [0, 0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a"] * 4, norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def test_grpo_counts_a_score_that_sits_on_an_observation_token():
    rewards, mask = torch.tensor([[0.0, 4.0], [0.0, 0.0]]), torch.tensor([[1, 0], [1, 0]])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, [7, 7], norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[2.0, 0.0], [-2.0, 0.0]]


def test_grpo_keeps_the_variance_of_rewards_that_differ_late():
    rewards = torch.tensor([[1000.0], [1000.0001], [1000.0002]], dtype=torch.float64)
    advantages, _ = compute_grpo_outcome_advantage(rewards, torch.ones(3, 1), ["a"] * 3, epsilon=0.0)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))


def test_grpo_ignores_row_order_and_refuses_a_short_index():
    generator = torch.Generator().manual_seed(5)
    rewards, mask = torch.randn(12, 3, generator=generator), random_mask(12, 3, generator)
    index = np.arange(12) % 4
    order = torch.randperm(12, generator=generator)
    straight, _ = compute_grpo_outcome_advantage(rewards, mask, index)
    shuffled, _ = compute_grpo_outcome_advantage(rewards[order], mask[order], index[order.numpy()])
    torch.testing.assert_close(shuffled, straight[order])
    with pytest.raises(ValueError, match=r"grpo: index has shape \[11\], expected one label for each of 12 rows"):
        compute_grpo_outcome_advantage(rewards, mask, index[:11])


# ---------------------------------------------------------------------------------------------------- aggregation

LOSSES = torch.tensor([[1.0, 2.0, 3.0, math.nan], [4.0, math.nan, math.nan, math.nan], [math.nan] * 4])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 4),
        ("token-sum", 10.0),
        ("seq-mean-token-sum", (6 + 4) / 2),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", (6 + 4) / 2 / 4),
    ],
)
def test_agg_loss_by_hand(mode, expected):
    assert agg_loss(LOSSES, MASK, mode).item() == pytest.approx(expected)
    given = agg_loss(LOSSES, MASK, mode, dp_size=3, batch_num_tokens=4, global_batch_size=torch.tensor(2))
    assert given.item() == pytest.approx(3 * expected)


def test_agg_loss_scale_factor_and_explicit_denominators():
    norm = agg_loss(LOSSES, MASK, "seq-mean-token-sum-norm", global_batch_size=5, loss_scale_factor=10.0)
    assert norm.item() == pytest.approx(10 / 5 / 10)
    assert agg_loss(LOSSES, MASK, "token-mean", batch_num_tokens=100).item() == pytest.approx(0.1)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_agg_loss_over_ranks_without_global_denominators_raises(mode):
    with pytest.raises(ValueError, match=r"dp_size=2 needs (batch_num_tokens|global_batch_size)"):
        agg_loss(LOSSES, MASK, mode, dp_size=2)


def test_agg_loss_unknown_mode_raises():
    with pytest.raises(ValueError, match=r"Invalid loss_agg_mode: 'mean'.*token-mean"):
        agg_loss(LOSSES, MASK, "mean")


@pytest.mark.parametrize("mode", core_algos.LOSS_AGG_MODES)
def test_a_part_without_tokens_has_loss_0_and_gradient_0(mode):
    losses = torch.full((2, 3), math.nan, requires_grad=True)
    for whole in (0, 7):
        loss = agg_loss(losses, torch.zeros(2, 3), mode, batch_num_tokens=whole, global_batch_size=whole)
        loss.backward()
        assert loss.item() == 0.0 and torch.equal(losses.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("mode", [mode for mode in core_algos.LOSS_AGG_MODES if mode != "token-sum"])
def test_a_whole_mini_batch_without_tokens_has_no_mean(mode):
    with pytest.raises(ValueError, match="loss_mask keeps no token and (batch_num_tokens|global_batch_size) is not"):
        agg_loss(torch.ones(2, 3), torch.zeros(2, 3), mode)


def test_agg_loss_names_what_is_wrong():
    with pytest.raises(ValueError, match=r"agg_loss: loss_mask has shape \(3, 3\), expected .* loss_mat, \(3, 4\)"):
        agg_loss(LOSSES, MASK[:, :3], "token-mean")
    with pytest.raises(ValueError, match="loss_scale_factor=0"):
        agg_loss(LOSSES, MASK, "seq-mean-token-sum-norm", loss_scale_factor=0)


# ---------------------------------------------------------------------------------------------------- vanilla PPO


def naive_ppo(ratio, advantage, low, high, c):
    clipped = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * clipped)
    return min(loss, -advantage * c) if advantage < 0 else loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.0 * 1.28),  # clipped above
        (0.5, 2.0, -1.0),  # pessimistic: not clipped below
        (0.5, -2.0, 2.0 * 0.8),  # clipped below
        (1.5, -2.0, 3.0),  # pessimistic: not clipped above
        (9.0, -2.0, 6.0),  # dual clip at 3
    ],
)
def test_clip_by_hand(ratio, advantage, expected):
    tensors = [torch.tensor([[x]]) for x in (0.0, math.log(ratio), advantage, 1.0)]
    loss, *_ = compute_policy_loss(*tensors, cliprange=0.2, cliprange_high=0.28)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert naive_ppo(ratio, advantage, 0.2, 0.28, 3.0) == pytest.approx(expected)


def test_vanilla_equals_a_naive_loop_with_metrics():
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(16, 5, generator=generator), torch.randn(16, 5, generator=generator)
    new, mask = old + 2 * torch.randn(16, 5, generator=generator), random_mask(16, 5, generator)
    config = SimpleNamespace(**{**vars(CONFIG), "clip_ratio_low": 0.1, "clip_ratio_high": 0.3})
    loss, metrics = compute_policy_loss_vanilla(old, new, advantages, mask, "token-mean", config)
    total = clipped = bounded = divergence = 0.0
    for o, n, a, m in zip(old.flatten(), new.flatten(), advantages.flatten(), mask.flatten(), strict=True):
        if m:
            ratio, a = math.exp(n - o), a.item()
            total += naive_ppo(ratio, a, 0.1, 0.3, 3.0)
            clipped += -a * min(max(ratio, 0.9), 1.3) > -a * ratio
            bounded += a < 0 and max(ratio, 0.9) > 3.0
            divergence += (o - n).item()
    count = int(mask.sum())
    assert clipped and bounded  # the case is not empty
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    reported = {name: (metric.value, metric.count) for name, metric in metrics.items()}
    assert reported["pg_clipfrac"] == (pytest.approx(clipped / count), count)
    assert reported["pg_clipfrac_lower"] == (pytest.approx(bounded / count), count)
    assert reported["ppo_kl"] == (pytest.approx(divergence / count, rel=1e-5), count)


def test_seed_signature_agrees_with_the_registered_loss():
    generator = torch.Generator().manual_seed(1)
    old, new, advantages = (torch.randn(4, 7, generator=generator) for _ in range(3))
    mask = random_mask(4, 7, generator)
    loss, clipfrac, kl, lower = compute_policy_loss(old, new, advantages, mask, 0.2)
    expected, metrics = compute_policy_loss_vanilla(old, new, advantages, mask, "token-mean", CONFIG)
    assert loss.item() == expected.item()
    for value, name in ((clipfrac, "pg_clipfrac"), (kl, "ppo_kl"), (lower, "pg_clipfrac_lower")):
        assert value.item() == pytest.approx(metrics[name].value, abs=1e-6)


def test_nan_under_mask_0_reaches_neither_loss_nor_gradient():
    mask = torch.tensor([[1, 0], [0, 0]])
    poison = torch.where(mask != 0, torch.zeros(2, 2), math.nan)
    new = poison.clone().requires_grad_()
    loss, metrics = compute_policy_loss_vanilla(
        poison, new, poison + 1.0, mask, "seq-mean-token-mean", CONFIG, rollout_is_weights=poison + 0.5
    )
    loss.backward()
    assert loss.item() == -0.5 and new.grad.tolist() == [[-0.5, 0.0], [0.0, 0.0]]
    assert all(math.isfinite(metric.value) for metric in metrics.values())


def test_huge_log_ratios_stay_finite():
    old, mask = torch.zeros(1, 2), torch.ones(1, 2)
    new = torch.tensor([[500.0, -500.0]], requires_grad=True)
    loss, _ = compute_policy_loss_vanilla(old, new, torch.tensor([[-1.0, 1.0]]), mask, "token-sum", CONFIG)
    loss.backward()
    assert math.isfinite(loss.item()) and bool(torch.isfinite(new.grad).all())


def test_clip_settings_are_checked():
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="clip_ratio_c=1.0"):
        compute_policy_loss(one, one, one, one, 0.2, clip_ratio_c=1.0)
    with pytest.raises(ValueError, match="give cliprange"):
        compute_policy_loss(one, one, one, one, cliprange_low=0.2)
    with pytest.raises(ValueError, match="cliprange_low=0.2, cliprange_high=-0.1 .* at least 0"):
        compute_policy_loss(one, one, one, one, 0.2, cliprange_high=-0.1)
    with pytest.raises(ValueError, match=r"compute_policy_loss: advantages has shape \(1, 2\)"):
        compute_policy_loss(one, one, torch.zeros(1, 2), one, 0.2)
    with pytest.raises(ValueError, match="loss_mask keeps no token"):
        compute_policy_loss(one, one, one, one, 0.2)


# ---------------------------------------------------------------------------------------------------- KL and entropy

POLICY = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64)


@pytest.mark.parametrize("name", ["kl", "k1", "low_var_kl", "k3", "k1+", "kl+", "low_var_kl+", "k3+"])
def test_unbiased_estimators_have_the_exact_expectation(name):
    exact = (POLICY * (POLICY / REFERENCE).log()).sum()
    estimate = (POLICY * kl_penalty(POLICY.log(), REFERENCE.log(), name)).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [("k1", "zero"), ("abs", "other"), ("k3", "other"), ("k2", "exact"), ("mse+", "exact"), ("k1+", "exact")]
    + [("abs+", "exact"), ("k3+", "exact"), ("low_var_kl+", "exact")],
)
def test_expected_gradient_by_enumeration(name, gradient):
    logits = POLICY.log().requires_grad_()
    exact = (torch.softmax(logits, 0) * (torch.log_softmax(logits, 0) - REFERENCE.log())).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    log_probs = torch.log_softmax(logits, 0)
    # as in training: the average over samples of the gradient of the estimate at each sample
    (found,) = torch.autograd.grad((POLICY * kl_penalty(log_probs, REFERENCE.log(), name)).sum(), logits)
    if gradient == "zero":
        wanted = torch.zeros(5, dtype=torch.float64)
    assert torch.allclose(found, wanted, atol=1e-12) == (gradient != "other")


def test_kl_values_by_hand():
    new, reference = torch.tensor([0.5, -1.0]), torch.tensor([0.0, 0.0])
    expected = {
        "abs": [0.5, 1.0],
        "mse": [0.125, 0.5],
        "k2": [0.125, 0.5],
        "k3": [math.exp(-0.5) + 0.5 - 1, math.e - 1 - 1],
    }
    for name, values in expected.items():
        assert kl_penalty(new, reference, name).tolist() == pytest.approx(values, rel=1e-5)
        assert kl_penalty(new, reference, name + "+").tolist() == pytest.approx(values, rel=1e-5)
    assert kl_penalty(torch.tensor([-50.0]), torch.tensor([0.0]), "k3").item() == 10.0


def test_kl_names_are_checked():
    with pytest.raises(NotImplementedError, match="full"):
        kl_penalty(POLICY, REFERENCE, "full")
    with pytest.raises(ValueError, match="Unknown kl_penalty: 'k4'"):
        kl_penalty(POLICY, REFERENCE, "k4")


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k3+"])
def test_kl_with_mask_keeps_nan_out_of_the_gradient(name):
    new = torch.tensor([0.5, 0.5], requires_grad=True)
    mask = torch.tensor([1, 0])
    kl = kl_penalty(new, torch.tensor([0.0, math.nan]), name, mask)
    masked_sum(kl, mask).backward()
    assert bool(torch.isfinite(new.grad).all()) and new.grad[1] == 0


def test_kl_in_reward_by_hand():
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    scores = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    new = torch.tensor([[0.1, 0.3], [0.4, math.nan], [math.nan, math.nan]])
    rewards, mean_kl = apply_kl_penalty(scores, new, torch.zeros(3, 2), mask, kl_coef=0.5)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 0.85], [1.8, 0.0], [0.0, 0.0]]))
    assert mean_kl == pytest.approx((0.2 + 0.4) / 2)


def test_controllers():
    fixed = FixedKLController(0.1)
    fixed.update(current_kl=9.0, n_steps=100)
    assert fixed.value == 0.1
    adaptive = AdaptiveKLController(0.1, target_kl=0.5, horizon=1000)
    adaptive.update(current_kl=5.0, n_steps=100)
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.2 * 0.1))  # error clipped at 0.2
    adaptive.update(current_kl=0.45, n_steps=100)
    assert adaptive.value == pytest.approx(0.1 * 1.02 * (1 - 0.1 * 0.1))
    restored = AdaptiveKLController(1.0, 0.5, 1000)
    restored.load_state_dict(adaptive.state_dict())
    assert restored.value == adaptive.value
    with pytest.raises(ValueError, match="target_kl=0"):
        AdaptiveKLController(0.1, target_kl=0.0, horizon=10)


def test_controller_by_config():
    kl_ctrl = SimpleNamespace(type="adaptive", kl_coef=0.3, target_kl=0.5, horizon=7)
    adaptive = get_kl_controller(kl_ctrl)
    assert isinstance(adaptive, AdaptiveKLController) and (adaptive.value, adaptive.target, adaptive.horizon) == (
        0.3,
        0.5,
        7,
    )
    kl_ctrl.type = "fixed"
    assert type(get_kl_controller(kl_ctrl)) is FixedKLController
    kl_ctrl.type = "adaptiv"
    with pytest.raises(ValueError, match="algorithm.kl_ctrl.type='adaptiv'"):
        get_kl_controller(kl_ctrl)


def test_entropy():
    assert entropy_from_logits(torch.zeros(2, 8)).tolist() == pytest.approx([math.log(8)] * 2)
    exact = -(POLICY * POLICY.log()).sum().item()
    assert entropy_from_logits(POLICY.log() + 3.0).item() == pytest.approx(exact)
