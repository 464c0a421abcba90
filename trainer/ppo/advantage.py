"""Computes advantages from scores on the driver. The trainer calls three functions in this order:

    reward_postprocess     normalised and clipped reward of each response            response_level_rewards (B,)
    compute_token_reward   that reward on the response's tokens, less the KL penalty token_level_rewards (B, R)
    estimate_advantages    the registered estimator, whitening, clipping             advantages, returns (B, R)

Columns are verl's; (B, R) columns cover the R response tokens. The functions change no argument except the two
controllers. `trainer.agentic.roll` has the functions of ROLL, which take its options and its layout of a batch.

Estimators have verl's meaning: grpo normalises within the group itself. With KL in the reward, the penalty is
subtracted after the normalisation of the rewards (verl: before). recipes/COMPARISON.md lists ROLL's recipes.
"""

from collections.abc import MutableMapping

import numpy as np
import torch

from verl_lite.algos.advantages import outcome_scores
from verl_lite.algos.agentic_advantages import at_last_token
from verl_lite.algos.masked import group_ids, group_sum, whiten_or_keep
from verl_lite.algos.reward_norm import normalise_scores, update_running
from verl_lite.config import AlgorithmConfig
from verl_lite.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    FixedKLController,
    RunningMoments,
    apply_kl_penalty,
    get_adv_estimator_fn,
)
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from verl_lite.registry import accepts, takes
from verl_lite.schema import check

Controllers = MutableMapping[str, RunningMoments] | RunningMoments
ScalarMetrics = dict[str, float]

_SAME_NAMES = "values reward_baselines old_log_probs sum_pi_squared rollout_is_weights traj_id step state_hash"
ESTIMATOR_COLUMNS = {"index": "uid"} | {name: name for name in _SAME_NAMES.split()}
"""Estimator argument -> column. An estimator requires each column it takes; only rollout_is_weights is optional."""


@torch.no_grad()
def reward_postprocess(
    data: DataProto, algorithm: AlgorithmConfig, running_ctrl: Controllers | None = None
) -> tuple[DataProto, ScalarMetrics]:
    """Normalises and clips the reward of each response: response_level_rewards (B,), from these if present, else
    from the sums of token_level_scores. Rows without a valid token (padding, a failed reward) count nowhere and get 0.

    Args:
        algorithm: norm_mean_type and norm_std_type (see `normalise_scores`), reward_clip. Rows that share a uid form a
            group.
        running_ctrl: `RunningMoments` by data_source (new keys are added), or one object for all rows. It is updated
            with this batch before it is used.

    Returns:
        The batch, and critic/reward_clip_frac over valid rows (0 without a clip).

    Raises:
        ValueError: a type is unknown, or a column or controller is missing.
    """
    stage = "reward_postprocess"
    scores, valid = response_scores(data, stage)
    mean_type = algorithm.norm_mean_type
    std_type = algorithm.norm_std_type

    groups = None
    if "group" in (mean_type, std_type):
        groups = column_of(data, "uid", f"{stage}: normalisation by group")

    domains: list[str] | None = None
    running: MutableMapping[str, RunningMoments] | None = None
    if "running" in (mean_type, std_type):
        running, domains = _running_moments(data, running_ctrl, stage)
        # before they are used, so that the first batch has statistics, too
        update_running(running, scores, valid, domains)

    rewards = normalise_scores(scores, valid, mean_type, std_type, groups=groups, domains=domains, running=running)
    # after the normalisation, so that the bound is one of normalised rewards
    rewards, clipped = _clip(rewards, algorithm.reward_clip, valid)

    result = data.select()
    result.batch["response_level_rewards"] = rewards
    return result, {"critic/reward_clip_frac": clipped}


def _running_moments(
    data: DataProto, running_ctrl: Controllers | None, stage: str
) -> tuple[MutableMapping[str, RunningMoments], list[str]]:
    """Returns the moments by domain, and the domain of each row. Raises ValueError if one of them is missing."""
    if running_ctrl is None:
        raise ValueError(f"{stage}: running_ctrl is None; running statistics need RunningMoments to stand in.")
    if isinstance(running_ctrl, RunningMoments):
        return {"all": running_ctrl}, ["all"] * len(data)
    domains = column_of(data, "data_source", f"{stage}: running statistics").tolist()
    return running_ctrl, domains


@torch.no_grad()
def compute_token_reward(
    data: DataProto, algorithm: AlgorithmConfig, kl_ctrl: FixedKLController | None = None
) -> tuple[DataProto, ScalarMetrics]:
    """Assigns rewards to tokens and subtracts the KL penalty to the reference model.

    Reads response_mask; response_level_rewards or token_level_scores or both; with the penalty also old_log_probs and
    ref_log_prob. Writes token_level_rewards (B, R): each reward at the last valid token of its response, or the
    token_level_scores unchanged if their sum equals the reward.

    Args:
        algorithm: use_kl_in_reward, kl_penalty, reward_clip (applied to tokens too).
        kl_ctrl: controller of the KL coefficient. The coefficient is read before this batch updates it. The update
            counts rows with a valid token (verl and ROLL: all rows; ROLL updates it without the penalty too).

    Returns:
        The batch and its metrics: critic/kl and critic/kl_coef if the log-prob columns are present; with the penalty
        also verl's actor/reward_kl_penalty and actor/reward_kl_penalty_coeff; with reward_clip
        critic/token_reward_clip_frac over valid tokens (ROLL: over all tokens).
    """
    stage = "compute_token_reward"
    check(data, ["response_mask"], stage)
    penalty_ctrl: FixedKLController | None = None
    if algorithm.use_kl_in_reward:
        check(data, ["old_log_probs", "ref_log_prob"], stage)
        if kl_ctrl is None:
            raise ValueError(f"{stage}: kl_ctrl is None; the KL in the reward needs the controller of its coefficient.")
        penalty_ctrl = kl_ctrl

    mask = data.batch["response_mask"]
    rewards = _place_rewards(data, mask)
    metrics: ScalarMetrics = {}
    # the KL is reported without a penalty, too, as soon as a reference model was evaluated
    if "old_log_probs" in data and "ref_log_prob" in data:
        rewards, metrics = _penalised_rewards(data, rewards, algorithm.kl_penalty, penalty_ctrl)

    # the KL penalty can leave the bound again that the clip of the responses has set
    if algorithm.reward_clip is not None:
        rewards, clipped = _clip(rewards, algorithm.reward_clip, mask != 0)
        metrics["critic/token_reward_clip_frac"] = clipped

    result = data.select()
    result.batch["token_level_rewards"] = rewards
    return result, metrics


def _penalised_rewards(
    data: DataProto, rewards: torch.Tensor, kl_penalty: str, penalty_ctrl: FixedKLController | None
) -> tuple[torch.Tensor, ScalarMetrics]:
    """Subtracts the KL penalty, and updates the controller.

    Args:
        data: response_mask, old_log_probs and ref_log_prob.
        rewards: (B, R) rewards of the tokens.
        kl_penalty: estimator of the KL.
        penalty_ctrl: controller of the coefficient; None = no penalty, only metrics.
    """
    mask = data.batch["response_mask"]
    coefficient = 0.0
    if penalty_ctrl is not None:
        coefficient = penalty_ctrl.value
    penalised_rewards, mean_kl = apply_kl_penalty(
        rewards,
        data.batch["old_log_probs"],
        data.batch["ref_log_prob"],
        mask,
        coefficient,
        kl_penalty,
    )
    metrics = {"critic/kl": mean_kl, "critic/kl_coef": coefficient}
    if penalty_ctrl is None:
        return rewards, metrics

    num_valid = int((mask != 0).any(-1).sum())
    # last, as in verl: the KL of this batch decides the coefficient of the next one
    penalty_ctrl.update(mean_kl, num_valid)
    metrics |= {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}
    return penalised_rewards, metrics


@torch.no_grad()
def estimate_advantages(
    data: DataProto, algorithm: AlgorithmConfig, estimator: str, **estimator_options: object
) -> tuple[DataProto, ScalarMetrics]:
    """Computes advantages with a registered estimator.

    Reads token_level_rewards and response_mask (B, R), and the columns that the estimator takes (`ESTIMATOR_COLUMNS`).
    Writes raw_advantages (B, R), the estimator's output; advantages, whitened and clipped; and returns, unchanged.

    Estimators that compare the rows of a group (`compares_groups`) do not see the groups that `incomparable_rows`
    finds: these have advantage and return 0 and do not count in whitening. Their tokens remain in response_mask.

    Args:
        algorithm: gamma and lam; whiten_rewards whitens the rewards of all valid tokens before the estimator, so that a
            longer response loses more (the batch keeps its own rewards); whiten_advantages whitens all valid tokens
            after it, unless they are fewer than two; advantage_clip. The estimator receives it as `config`.
        estimator: registered name, or pkg.module:function. In an agentic run it can differ from
            `algorithm.adv_estimator`.
        estimator_options: further arguments for estimators that accept them.

    Returns:
        The batch and its metrics: groups/incomparable, the number of these groups; with a clip
        critic/advantage_clip_frac over valid tokens.

    Raises:
        ValueError: the estimator is unknown, or a column is missing (the message names the stage that writes it).
    """
    stage = f"compute_advantage with adv_estimator={estimator}"
    rewards, mask = _rewards_and_mask(data, stage)
    if algorithm.whiten_rewards:
        rewards = whiten_or_keep(rewards, mask)

    metrics: ScalarMetrics = {}
    # the estimator sees only rows that can be compared; the loss still reads all rows of `mask`
    compared_mask = mask
    if compares_groups(estimator):
        incomparable, num_incomparable = incomparable_rows(data, mask, stage)
        compared_mask = torch.where(incomparable[:, None], 0, mask)
        metrics["groups/incomparable"] = float(num_incomparable)

    arguments: dict[str, object] = {
        "token_level_rewards": rewards,
        "response_mask": compared_mask,
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "config": algorithm,
        "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        # last, so that they replace the options of `algorithm`
        **estimator_options,
    }
    raw_advantages, returns = _call_estimator(estimator, data, arguments, compared_mask != 0, stage)
    if compared_mask is not mask:
        # an estimator of a user may leave values under mask 0, where the loss would read those of incomparable rows
        is_unseen = (mask != 0) & (compared_mask == 0)
        raw_advantages = raw_advantages.masked_fill(is_unseen, 0)
        returns = returns.masked_fill(is_unseen, 0)

    advantages = raw_advantages
    if algorithm.whiten_advantages:
        advantages = whiten_or_keep(advantages, compared_mask)
    if algorithm.advantage_clip is not None:
        advantages, clipped = _clip(advantages, algorithm.advantage_clip, mask != 0)
        metrics["critic/advantage_clip_frac"] = clipped

    result = data.select()
    result.batch.update({"raw_advantages": raw_advantages, "advantages": advantages, "returns": returns})
    return result, metrics


def _rewards_and_mask(data: DataProto, stage: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token_level_rewards and response_mask, both (B, R). Raises ValueError if the shapes differ."""
    check(data, ["token_level_rewards"], stage)
    rewards = data.batch["token_level_rewards"].float()
    mask = data.batch["response_mask"]
    if mask.shape != rewards.shape:
        raise ValueError(
            f"{stage}: response_mask has shape {tuple(mask.shape)}, expected that of token_level_rewards, "
            f"{tuple(rewards.shape)}."
        )
    return rewards, mask


def compares_groups(adv_estimator: str) -> bool:
    """Returns True if an estimator compares the rows of a group: as its registration declares (`groups`), or, without a
    declaration, if it has the parameter `index`."""
    function = get_adv_estimator_fn(adv_estimator)
    facts = ADV_ESTIMATOR_REGISTRY.facts.get(adv_estimator, {})
    declared = facts.get("groups")
    if declared is None:
        return takes(function, "index")
    return bool(declared)


def incomparable_rows(data: DataProto, mask: torch.Tensor, stage: str) -> tuple[torch.Tensor, int]:
    """Finds groups of several rows of which fewer than two have a valid token, because rewards failed or answers were
    rejected. The score of the remaining row cannot be compared with another, and as an advantage it would be raw.

    A group that consists of one row (`rollout.n=1`) is not among them: there the estimator's formula for a group of one
    applies, as in verl.

    Args:
        mask: (B, R) response_mask of the batch.
        stage: name of the stage, for the error if the column uid is missing.

    Returns:
        (B,) bool, True for the rows of these groups; and the number of the groups.
    """
    uids = column_of(data, "uid", stage)
    groups, num_groups = group_ids(uids, mask.device)
    is_valid = (mask != 0).any(dim=-1)
    # a padding row repeats a row of the batch, so it does not make its group larger
    is_sampled = torch.ones_like(is_valid)
    if "is_padding" in data:
        is_sampled = ~data.batch["is_padding"].bool()

    sizes = group_sum(is_sampled.long(), groups, num_groups)
    num_valid = group_sum(is_valid.long(), groups, num_groups)
    is_incomparable = (sizes > 1) & (num_valid < 2)
    num_incomparable = int(is_incomparable.sum())
    return is_incomparable[groups], num_incomparable


def _call_estimator(
    name: str, data: DataProto, arguments: dict[str, object], is_valid: torch.Tensor, stage: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls a registered estimator with the entries of `arguments` and the columns that its signature accepts.

    Args:
        name: name of the estimator.
        data: the batch with the columns.
        arguments: arguments besides the columns.
        is_valid: (B, R) bool, the tokens at which the result must be finite.
        stage: name of the stage, for the error if a column is missing.
    """
    function = get_adv_estimator_fn(name)
    arguments = dict(arguments)
    for argument, column in ESTIMATOR_COLUMNS.items():
        # without a rollout correction there are no importance weights, and estimators work without them
        is_required = takes(function, argument) and argument != "rollout_is_weights"
        if is_required or column in data:
            arguments[argument] = column_of(data, column, stage)
    # extra values of the reward function are passed under their own names, as in verl
    extras = {key.removeprefix("reward/"): column for key, column in data.non_tensor_batch.items()}
    arguments["batch"] = data.batch
    # a value of the reward function does not replace a column of the same name
    arguments["non_tensor_batch"] = {**extras, **data.non_tensor_batch}

    accepted = {key: value for key, value in arguments.items() if accepts(function, key)}
    result = function(**accepted)
    _require_estimates(name, result, is_valid)
    return result


def _require_estimates(name: str, result: object, is_valid: torch.Tensor) -> None:
    """Raises UserError unless an estimator returned two tensors (B, R) that are finite at the valid tokens.

    A user's function may return anything, and the loss would train on a NaN without a message.
    """
    values = result if isinstance(result, tuple) else ()
    shapes: list[object] = []  # of other values the name of the type
    num_usable = 0
    for value in values:
        if not isinstance(value, torch.Tensor):
            shapes.append(type(value).__name__)
            continue
        shapes.append(tuple(value.shape))
        if value.shape == is_valid.shape and bool(value[is_valid].isfinite().all()):
            num_usable += 1
    if len(values) == num_usable == 2:
        return
    raise UserError(
        f"algorithm.adv_estimator={name}: expected a tuple (advantages, returns) of shape "
        f"{tuple(is_valid.shape)}, finite where response_mask is 1; found {shapes or type(result).__name__}. Test "
        "the function with verl_lite.contracts.check_adv_estimator, which names the promise that it breaks"
    )


def column_of(data: DataProto, name: str, stage: str) -> np.ndarray | torch.Tensor:
    """Returns a tensor or non-tensor column. Raises ValueError if it is missing."""
    if name not in data:
        check(data, [name], stage)
    if name in data.batch.keys():
        return data.batch[name]
    return data.non_tensor_batch[name]


def response_scores(data: DataProto, stage: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the reward of each response (B,) and a bool mask of the rows with a valid token (B,)."""
    check(data, ["response_mask"], stage)
    mask = data.batch["response_mask"]
    valid = (mask != 0).any(dim=-1)
    if "response_level_rewards" in data:
        rewards = data.batch["response_level_rewards"].float()
        return torch.where(valid, rewards, 0), valid
    token_scores = _token_scores(data, stage)
    return outcome_scores(token_scores, mask), valid


def _token_scores(data: DataProto, stage: str) -> torch.Tensor:
    """Returns token_level_scores (B, R). Raises ValueError if they are missing."""
    check(data, ["token_level_scores"], stage)
    return data.batch["token_level_scores"]


def _place_rewards(data: DataProto, mask: torch.Tensor) -> torch.Tensor:
    """Returns token rewards (B, R): token_level_scores of rows whose sum equals the reward, else the reward at the last
    valid token."""
    if "response_level_rewards" not in data:
        return _token_scores(data, "compute_token_reward")
    rewards = data.batch["response_level_rewards"].float()
    rewards_at_end = at_last_token(rewards, mask)
    if "token_level_scores" not in data:
        return rewards_at_end

    # a reward that normalisation and clip have not changed keeps its distribution over the tokens
    scores = data.batch["token_level_scores"]
    is_unchanged = outcome_scores(scores, mask) == rewards
    return torch.where(is_unchanged[:, None], scores, rewards_at_end)


def _clip(values: torch.Tensor, bound: float | None, counted: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Returns the values clipped to +-bound, and the fraction of `counted` values outside of it."""
    if bound is None:
        return values, 0.0
    is_beyond = (values.abs() > bound) & counted
    num_counted = max(1, int(counted.sum()))
    fraction = float(is_beyond.sum()) / num_counted
    return values.clamp(-bound, bound), fraction
