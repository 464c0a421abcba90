"""Computes advantages from scores on the driver, with ROLL's three functions, which the trainer calls in this order:

    reward_postprocess     normalised and clipped reward of each response            response_level_rewards (B,)
    compute_token_reward   that reward on the response's tokens, less the KL penalty token_level_rewards (B, R)
    compute_advantage      the registered estimator, whitening, clipping             advantages, returns (B, R)

Columns are verl's; (B, R) columns cover the R response tokens. Batches in ROLL's layout are accepted as well, with
response_level_rewards instead of token scores, ref_log_probs instead of ref_log_prob, and a response_mask that is one
column wider than the predictions. `pipeline_config` is any object with the options as attributes, under our names or
ROLL's; a missing option is off. The functions change no argument except the two controllers.

Estimators have verl's meaning: grpo normalises within the group itself. ROLL normalises rewards first, and its
estimators except gae are REINFORCE; outside of a run, a batch without group columns is treated in that way. With KL in
the reward, ROLL subtracts it after the normalisation, verl before. recipes/COMPARISON.md lists ROLL's recipes.
"""

from collections.abc import MutableMapping
from typing import Any

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

Controllers = MutableMapping[Any, RunningMoments] | RunningMoments
ScalarMetrics = dict[str, float]

_SAME_NAMES = "values reward_baselines old_log_probs sum_pi_squared rollout_is_weights traj_id step state_hash"
ESTIMATOR_COLUMNS = {"index": "uid"} | {name: name for name in _SAME_NAMES.split()}
"""Estimator argument -> column. An estimator requires each column it takes; only rollout_is_weights is optional."""

RETURNS_IN_ROLL = ("grpo", "gigpo", "step_reinforce")
"""Estimators that compare rows with each other here; in ROLL they receive rewards that are already normalised."""

_LABELS = ("uid", "traj_id", "step", "state_hash")


@torch.no_grad()
def reward_postprocess(
    data: DataProto, pipeline_config: AlgorithmConfig | Any, running_ctrl: Controllers | None = None
) -> tuple[DataProto, ScalarMetrics]:
    """Normalises and clips the reward of each response: response_level_rewards (B,), from these if present, else
    from the sums of token_level_scores. Rows without a valid token (padding, a failed reward) count nowhere and get 0.

    Args:
        pipeline_config: norm_mean_type and norm_std_type (see `normalise_scores`), reward_clip. Rows that share a uid
            form a group. Without that column groups are ROLL's: actor_infer.generating_args.num_return_sequences
            adjacent rows, and adv_estimator=grpo sets both types to group.
        running_ctrl: `RunningMoments` by domain, or by data_source without a domain column (new keys are added), or one
            object for all rows. It is updated with this batch before it is used.

    Returns:
        The batch, and critic/reward_clip_frac over valid rows (0 without a clip; ROLL counts all rows).

    Raises:
        ValueError: a type is unknown, or a column or controller is missing.
    """
    stage = "reward_postprocess"
    scores, valid = response_scores(data, stage)

    mean_type = getattr(pipeline_config, "norm_mean_type", None)
    std_type = getattr(pipeline_config, "norm_std_type", None)
    groups = _groups_of_roll(data, pipeline_config, stage)
    if groups is not None and getattr(pipeline_config, "adv_estimator", None) == "grpo":
        mean_type = std_type = "group"
    elif groups is None and "group" in (mean_type, std_type):
        groups = column_of(data, "uid", f"{stage}: normalisation by group")

    domains: list[Any] | None = None
    running: MutableMapping[Any, RunningMoments] | None = None
    if "running" in (mean_type, std_type):
        running, domains = _running_moments(data, running_ctrl, stage)
        update_running(running, scores, valid, domains)
    rewards = normalise_scores(scores, valid, mean_type, std_type, groups=groups, domains=domains, running=running)
    rewards, clipped = _clip(rewards, getattr(pipeline_config, "reward_clip", None), valid)

    result = data.select()
    result.batch["response_level_rewards"] = rewards
    return result, {"critic/reward_clip_frac": clipped}


def _running_moments(
    data: DataProto, running_ctrl: Controllers | None, stage: str
) -> tuple[MutableMapping[Any, RunningMoments], list[Any]]:
    """Returns the moments by domain, and the domain of each row. Raises ValueError if one of them is missing."""
    if running_ctrl is None:
        raise ValueError(f"{stage}: running_ctrl is None; running statistics need RunningMoments to stand in.")
    if isinstance(running_ctrl, RunningMoments):
        return {"all": running_ctrl}, ["all"] * len(data)

    name = "domain" if "domain" in data else "data_source"
    if name not in data and len(running_ctrl) == 1:
        return running_ctrl, [*running_ctrl] * len(data)
    return running_ctrl, column_of(data, name, f"{stage}: running statistics").tolist()


@torch.no_grad()
def compute_token_reward(
    data: DataProto, pipeline_config: Any, kl_ctrl: FixedKLController | None = None
) -> tuple[DataProto, ScalarMetrics]:
    """Assigns rewards to tokens and subtracts the KL penalty to the reference model.

    Reads response_mask; response_level_rewards or token_level_scores or both; with the penalty also old_log_probs and
    ref_log_prob (or ref_log_probs). Writes token_level_rewards (B, R): each reward at the last valid token of its
    response, or the token_level_scores unchanged if their sum equals the reward.

    Args:
        pipeline_config: use_kl_in_reward (ROLL: add_token_level_kl), kl_penalty, reward_clip (applied to tokens too).
        kl_ctrl: controller of the KL coefficient. The coefficient is read before this batch updates it. The update
            counts rows with a valid token (verl and ROLL: all rows; ROLL updates it without the penalty too).

    Returns:
        The batch and its metrics: critic/kl and critic/kl_coef if the log-prob columns are present; with the penalty
        also verl's actor/reward_kl_penalty and actor/reward_kl_penalty_coeff; with reward_clip
        critic/token_reward_clip_frac over valid tokens (ROLL: over all tokens).
    """
    stage = "compute_token_reward"
    switch = "use_kl_in_reward" if hasattr(pipeline_config, "use_kl_in_reward") else "add_token_level_kl"
    is_penalised = bool(getattr(pipeline_config, switch, False))
    reference = "ref_log_probs" if "ref_log_probs" in data else "ref_log_prob"
    check(data, ["response_mask"], stage)
    if is_penalised:
        check(data, ["old_log_probs"] if "ref_log_probs" in data else ["old_log_probs", "ref_log_prob"], stage)
        if kl_ctrl is None:
            raise ValueError(f"{stage}: kl_ctrl is None; the KL in the reward needs the controller of its coefficient.")

    mask = _response_mask(data)
    rewards = _place_rewards(data, mask)
    metrics: ScalarMetrics = {}
    if "old_log_probs" in data and reference in data:
        coefficient = kl_ctrl.value if is_penalised and kl_ctrl is not None else 0.0
        penalised_rewards, mean_kl = apply_kl_penalty(
            rewards,
            data.batch["old_log_probs"],
            data.batch[reference],
            mask,
            coefficient,
            getattr(pipeline_config, "kl_penalty", "kl"),
        )
        metrics |= {"critic/kl": mean_kl, "critic/kl_coef": coefficient}
        if is_penalised and kl_ctrl is not None:
            rewards = penalised_rewards
            num_valid = int((mask != 0).any(-1).sum())
            kl_ctrl.update(mean_kl, num_valid)
            metrics |= {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}

    bound = getattr(pipeline_config, "reward_clip", None)
    if bound is not None:
        rewards, clipped = _clip(rewards, bound, mask != 0)
        metrics["critic/token_reward_clip_frac"] = clipped

    result = data.select()
    if "token_level_rewards" in data and "token_level_scores" not in data:
        result.rename("token_level_rewards", "token_level_scores")
    result.batch["token_level_rewards"] = rewards
    return result, metrics


@torch.no_grad()
def compute_advantage(
    data: DataProto,
    gamma: float,
    lambd: float,
    adv_estimator: str,
    advantage_clip: float | None = None,
    whiten_advantages: bool = False,
    whiten_rewards: bool = False,
    response_mask: torch.Tensor | None = None,
    pipeline_config: Any = None,
) -> DataProto:
    """Computes advantages with the registered estimator `adv_estimator` (a name, or pkg.module:function).

    Reads token_level_rewards (B, R), response_mask unless it is an argument, and the columns that the estimator takes
    (`ESTIMATOR_COLUMNS`). Writes raw_advantages (B, R), the estimator's output; advantages, whitened and clipped; and
    returns, unchanged. A clip adds critic/advantage_clip_frac over valid tokens to meta_info["metrics"].

    Estimators that compare the rows of a group (`compares_groups`) do not see the groups that `incomparable_rows`
    finds: these have advantage and return 0 and do not count in whitening. Their tokens remain in response_mask. A run
    adds their number, groups/incomparable, to meta_info["metrics"].

    Args:
        gamma, lambd: discount factor, lambda of GAE.
        pipeline_config: passed to the estimator as `config`; set in a run. None selects ROLL's behavior: gae whitens
            only with whiten_advantages, and without group columns the estimators in `RETURNS_IN_ROLL` become
            reinforce over the rewards that `reward_postprocess` normalised.
        whiten_rewards: whiten the rewards of all valid tokens before the estimator, so that a longer response loses
            more. The batch keeps its own rewards (ROLL replaces them).
        whiten_advantages: whiten all valid tokens after the estimator. Fewer than two valid tokens are not whitened.

    Raises:
        ValueError: the estimator is unknown, or a column is missing (the message names the stage that writes it).
    """
    stage = f"compute_advantage with adv_estimator={adv_estimator}"
    is_rolls = pipeline_config is None
    if is_rolls and adv_estimator in RETURNS_IN_ROLL and not any(name in data for name in _LABELS):
        adv_estimator = "reinforce"
    rewards, mask = _rewards_and_mask(data, response_mask, stage)
    if whiten_rewards:
        rewards = whiten_or_keep(rewards, mask)

    metrics: ScalarMetrics = {}
    compared_mask = mask
    if compares_groups(adv_estimator):
        incomparable, num_incomparable = incomparable_rows(data, mask, stage)
        compared_mask = torch.where(incomparable[:, None], 0, mask)
        if not is_rolls:
            metrics["groups/incomparable"] = float(num_incomparable)

    arguments = {
        "token_level_rewards": rewards,
        "response_mask": compared_mask,
        "gamma": gamma,
        "lam": lambd,
        "config": pipeline_config,
        "norm_adv_by_std_in_grpo": getattr(pipeline_config, "norm_adv_by_std_in_grpo", True),
    }
    if is_rolls:
        arguments["whiten"] = False
    raw_advantages, returns = _call_estimator(adv_estimator, data, arguments, stage)
    if compared_mask is not mask:
        # an estimator of a user may leave values under mask 0, where the loss would read those of incomparable rows
        is_unseen = (mask != 0) & (compared_mask == 0)
        raw_advantages = raw_advantages.masked_fill(is_unseen, 0)
        returns = returns.masked_fill(is_unseen, 0)

    advantages = raw_advantages
    if whiten_advantages:
        advantages = whiten_or_keep(advantages, compared_mask)
    if advantage_clip is not None:
        advantages, clipped = _clip(advantages, advantage_clip, mask != 0)
        metrics["critic/advantage_clip_frac"] = clipped

    result = data.select()
    if metrics:
        result.meta_info["metrics"] = {**data.meta_info.get("metrics", {}), **metrics}
    result.batch.update({"raw_advantages": raw_advantages, "advantages": advantages, "returns": returns})
    return result


def _rewards_and_mask(
    data: DataProto, response_mask: torch.Tensor | None, stage: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token_level_rewards and the mask of the response, both (B, R). response_mask: None = the batch's own.
    Raises ValueError if the shapes differ."""
    check(data, ["token_level_rewards"], stage)
    rewards = data.batch["token_level_rewards"].float()
    mask = response_mask
    if mask is None:
        mask = _response_mask(data, rewards.shape[-1])
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
    declared = ADV_ESTIMATOR_REGISTRY.facts.get(adv_estimator, {}).get("groups")
    return takes(function, "index") if declared is None else bool(declared)


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
    groups, num_groups = group_ids(column_of(data, "uid", stage), mask.device)
    is_valid = (mask != 0).any(dim=-1)
    is_sampled = torch.ones_like(is_valid)
    if "is_padding" in data:
        is_sampled = ~data.batch["is_padding"].bool()

    sizes = group_sum(is_sampled.long(), groups, num_groups)
    num_valid = group_sum(is_valid.long(), groups, num_groups)
    is_incomparable = (sizes > 1) & (num_valid < 2)
    return is_incomparable[groups], int(is_incomparable.sum())


def estimate_advantages(
    batch: DataProto, algorithm: AlgorithmConfig, estimator: str
) -> tuple[DataProto, ScalarMetrics]:
    """Calls `compute_advantage` with the options of a run. Returns the batch and the metrics.

    Args:
        estimator: name of the estimator for token-level rewards.
    """
    batch = compute_advantage(
        batch,
        algorithm.gamma,
        algorithm.lam,
        estimator,
        advantage_clip=algorithm.advantage_clip,
        whiten_advantages=algorithm.whiten_advantages,
        whiten_rewards=algorithm.whiten_rewards,
        pipeline_config=algorithm,
    )
    return batch, batch.meta_info.pop("metrics", {})


def _call_estimator(
    name: str, data: DataProto, arguments: dict[str, Any], stage: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls a registered estimator with the entries of `arguments` and the columns that its signature accepts."""
    function = get_adv_estimator_fn(name)
    arguments = dict(arguments)
    for argument, column in ESTIMATOR_COLUMNS.items():
        if column in data or (takes(function, argument) and argument != "rollout_is_weights"):
            arguments[argument] = column_of(data, column, stage)
    # extra values of the reward function are passed under their own names, as in verl
    extras = {key.removeprefix("reward/"): column for key, column in data.non_tensor_batch.items()}
    arguments["batch"] = data.batch
    arguments["non_tensor_batch"] = {**extras, **data.non_tensor_batch}

    accepted = {key: value for key, value in arguments.items() if accepts(function, key)}
    result = function(**accepted)

    valid = arguments["response_mask"] != 0
    tensors = result if isinstance(result, tuple) else ()
    is_valid = [tensor.shape == valid.shape and bool(tensor[valid].isfinite().all()) for tensor in tensors]
    if is_valid != [True, True]:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise UserError(
            f"algorithm.adv_estimator={name}: expected a tuple (advantages, returns) of shape {tuple(valid.shape)}, "
            f"finite where response_mask is 1; found {shapes or type(result).__name__}. Test "
            "the function with verl_lite.contracts.check_adv_estimator, which names the promise that it breaks"
        )
    return result


def column_of(data: DataProto, name: str, stage: str) -> Any:
    """Returns a tensor or non-tensor column. Raises ValueError if it is missing."""
    if name not in data:
        check(data, [name], stage)
    return data.batch[name] if name in data.batch.keys() else data.non_tensor_batch[name]


def _groups_of_roll(data: DataProto, pipeline_config: Any, stage: str) -> list[int] | None:
    """Returns the group of each row as in ROLL: num_return_sequences adjacent rows form a group. None if that option is
    unset or the batch has a uid column."""
    arguments = getattr(getattr(pipeline_config, "actor_infer", None), "generating_args", None)
    size = getattr(arguments, "num_return_sequences", None)
    if not size or "uid" in data:
        return None
    if len(data) % size:
        raise ValueError(f"{stage}: num_return_sequences={size} does not divide the batch of {len(data)} rows.")
    return [row // size for row in range(len(data))]


def _response_mask(data: DataProto, width: int | None = None) -> torch.Tensor:
    """Returns response_mask (B, width), without the first column of ROLL's wider mask. width: None = the width of the
    batch's other response columns."""
    mask = data.batch["response_mask"]
    if width is None:
        others = [name for name in ("old_log_probs", "token_level_scores") if name in data]
        width = data.batch[others[0]].shape[-1] if others else mask.shape[-1]
    return mask[:, 1:] if mask.shape[-1] == width + 1 else mask


def response_scores(data: DataProto, stage: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the reward of each response (B,) and a bool mask of the rows with a valid token (B,)."""
    check(data, ["response_mask"], stage)
    mask = _response_mask(data)
    valid = (mask != 0).any(dim=-1)
    if "response_level_rewards" in data:
        return torch.where(valid, data.batch["response_level_rewards"].float(), 0), valid
    return outcome_scores(column_of(data, "token_level_scores", stage), mask), valid


def _place_rewards(data: DataProto, mask: torch.Tensor) -> torch.Tensor:
    """Returns token rewards (B, R): token_level_scores of rows whose sum equals the reward, else the reward at the last
    valid token."""
    if "response_level_rewards" not in data:
        return column_of(data, "token_level_scores", "compute_token_reward")
    rewards = data.batch["response_level_rewards"].float()
    placed = at_last_token(rewards, mask)
    if "token_level_scores" not in data:
        return placed
    scores = data.batch["token_level_scores"]
    return torch.where((outcome_scores(scores, mask) == rewards)[:, None], scores, placed)


def _clip(values: torch.Tensor, bound: float | None, counted: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Returns the values clipped to +-bound, and the fraction of `counted` values outside of it."""
    if bound is None:
        return values, 0.0
    beyond = (values.abs() > bound) & counted
    return values.clamp(-bound, bound), float(beyond.sum()) / max(1, int(counted.sum()))
