"""From scores to advantages, on the driver: ROLL's three functions, which the trainer calls in turn.

    reward_postprocess     one number for each answer, normalised and clipped        response_level_rewards (B,)
    compute_token_reward   that number on the answer's tokens, less the KL penalty   token_level_rewards (B, R)
    compute_advantage      the registered estimator, whitening, clipping             advantages, returns (B, R)

Columns are verl's: (B, R) belongs to the R response tokens. A batch in ROLL's layout works too: response_level_rewards
instead of token scores, ref_log_probs instead of ref_log_prob, and a response_mask one column wider than what belongs
to predictions. `pipeline_config` is any object that has the options as attributes, under our names or ROLL's; one that
it lacks is off. Nothing that is given is changed, but for the two controllers.

Estimators have verl's meaning: grpo normalises within the group itself. In ROLL rewards are normalised first, and
every estimator but gae is REINFORCE; that is what a batch without a column of groups gets here too, outside of a run.
recipes/COMPARISON.md has its recipes under these options. With KL in the reward ROLL takes it off the normalised score
and verl off the score that is normalised after.
"""

from collections.abc import MutableMapping
from typing import Any

import torch

from verl_lite.algos.advantages import outcome_scores
from verl_lite.algos.agentic_advantages import at_last_token
from verl_lite.algos.masked import whiten_or_keep
from verl_lite.algos.reward_norm import normalise_scores, update_running
from verl_lite.config import AlgorithmConfig
from verl_lite.core_algos import FixedKLController, RunningMoments, apply_kl_penalty, get_adv_estimator_fn
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from verl_lite.registry import accepts, takes
from verl_lite.schema import check

Controllers = MutableMapping[Any, RunningMoments] | RunningMoments
ScalarMetrics = dict[str, float]

_SAME_NAMES = "values reward_baselines old_log_probs sum_pi_squared rollout_is_weights traj_id step state_hash"
ESTIMATOR_COLUMNS = {"index": "uid"} | {name: name for name in _SAME_NAMES.split()}
"""The column that each argument of an estimator is. One that names it needs it; rollout_is_weights alone may lack."""

RETURNS_IN_ROLL = ("grpo", "gigpo", "step_reinforce")
"""Estimators that compare rows with each other here, and in ROLL take rewards that were compared before."""

_LABELS = ("uid", "traj_id", "step", "state_hash")


@torch.no_grad()
def reward_postprocess(
    data: DataProto, pipeline_config: AlgorithmConfig | Any, running_ctrl: Controllers | None = None
) -> tuple[DataProto, ScalarMetrics]:
    """Normalises and clips the reward of each answer: response_level_rewards, from these (B,) if they are there, else
    from the sums of token_level_scores. Rows without a valid token (padding, a failed reward) count nowhere and get 0.

    Args:
        pipeline_config: norm_mean_type and norm_std_type (see `normalise_scores`), reward_clip. Groups are rows that
            share a uid; without that column ROLL's, each actor_infer.generating_args.num_return_sequences
            neighbours, and both types are group if adv_estimator=grpo.
        running_ctrl: `RunningMoments` by domain, else data_source (one is added for a new one), or one for all; it
            takes in this batch before it is read.

    Returns:
        The batch, and critic/reward_clip_frac, over rows that count (0 without a clip; ROLL counts all rows).

    Raises:
        ValueError: an unknown type, or a column or controller that is missing.
    """
    stage = "reward_postprocess"
    scores, valid = response_scores(data, stage)
    types = getattr(pipeline_config, "norm_mean_type", None), getattr(pipeline_config, "norm_std_type", None)
    groups = _groups_of_roll(data, pipeline_config, stage)
    if groups is not None and getattr(pipeline_config, "adv_estimator", None) == "grpo":
        types = ("group", "group")
    elif groups is None and "group" in types:
        groups = column_of(data, "uid", f"{stage}: normalisation by group")
    domains: list[Any] | None = None
    running: MutableMapping[Any, RunningMoments] | None
    running = {"all": running_ctrl} if isinstance(running_ctrl, RunningMoments) else running_ctrl
    if "running" in types:
        if running is None:
            raise ValueError(f"{stage}: running_ctrl is None; running statistics need RunningMoments to stand in.")
        name = "domain" if "domain" in data else "data_source"
        if running_ctrl is not running or (len(running) == 1 and name not in data):
            domains = [*running] * len(data)
        else:
            domains = column_of(data, name, f"{stage}: running statistics").tolist()
        update_running(running, scores, valid, domains)
    rewards = normalise_scores(scores, valid, *types, groups=groups, domains=domains, running=running)
    rewards, clipped = _clip(rewards, getattr(pipeline_config, "reward_clip", None), valid)
    result = data.select()
    result.batch["response_level_rewards"] = rewards
    return result, {"critic/reward_clip_frac": clipped}


@torch.no_grad()
def compute_token_reward(
    data: DataProto, pipeline_config: Any, kl_ctrl: FixedKLController | None = None
) -> tuple[DataProto, ScalarMetrics]:
    """Puts rewards on tokens and takes the KL to the reference model off them.

    Reads response_mask, response_level_rewards and token_level_scores, one of which suffices; old_log_probs and
    ref_log_prob (or ref_log_probs), where the penalty is on. Writes token_level_rewards (B, R): the reward of an answer
    at its last valid token; the scores where they stood, if all that was done leaves their sum as it was.

    Args:
        pipeline_config: use_kl_in_reward (ROLL: add_token_level_kl), kl_penalty, reward_clip, for tokens too.
        kl_ctrl: of the coefficient, read before this batch moves it; it counts rows that have a valid token (verl and
            ROLL: all rows; ROLL moves it without the penalty too).

    Returns:
        The batch; critic/kl and critic/kl_coef where its columns are there, with the penalty also under verl's names
        actor/reward_kl_penalty and actor/reward_kl_penalty_coeff; with reward_clip critic/token_reward_clip_frac, over
        valid tokens (ROLL: over all).
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
        kind = getattr(pipeline_config, "kl_penalty", "kl")
        old, ref = data.batch["old_log_probs"], data.batch[reference]
        penalised, mean_kl = apply_kl_penalty(rewards, old, ref, mask, coefficient, kind)
        metrics |= {"critic/kl": mean_kl, "critic/kl_coef": coefficient}
        if is_penalised and kl_ctrl is not None:
            rewards = penalised
            kl_ctrl.update(mean_kl, int((mask != 0).any(-1).sum()))
            metrics |= {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coefficient}
    bound = getattr(pipeline_config, "reward_clip", None)
    if bound is not None:
        rewards, metrics["critic/token_reward_clip_frac"] = _clip(rewards, bound, mask != 0)
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
    """Advantages by the registered estimator `adv_estimator` (a name, or pkg.module:function).

    Reads token_level_rewards (B, R), response_mask unless another is given, and the columns that the estimator names
    (`ESTIMATOR_COLUMNS`). Writes raw_advantages (B, R), as the estimator gives them; advantages, these whitened and
    clipped; and returns, neither. With a clip meta_info["metrics"] gains critic/advantage_clip_frac, over valid tokens.

    Args:
        gamma, lambd: discount, lambda of gae.
        pipeline_config: handed to the estimator as `config`; a run gives it. Without it the function is ROLL's: gae is
            whitened only where whiten_advantages asks for it, and where no column says which rows belong together
            the estimators `RETURNS_IN_ROLL` are reinforce, of rewards that `reward_postprocess` normalised.
        whiten_rewards: of all valid tokens before the estimator, so that a longer answer loses more; those of the batch
            stay as they are (ROLL: replaced).
        whiten_advantages: of all valid tokens after it. Fewer than two valid tokens are not whitened.

    Raises:
        ValueError: an unknown estimator, or a missing column: which, for whom, and who writes it.
    """
    stage = f"compute_advantage with adv_estimator={adv_estimator}"
    is_rolls = pipeline_config is None
    if is_rolls and adv_estimator in RETURNS_IN_ROLL and not any(name in data for name in _LABELS):
        adv_estimator = "reinforce"
    check(data, ["token_level_rewards"], stage)
    rewards = data.batch["token_level_rewards"].float()
    mask = _response_mask(data, rewards.shape[-1]) if response_mask is None else response_mask
    if mask.shape != rewards.shape:
        raise ValueError(
            f"{stage}: response_mask has shape {tuple(mask.shape)}, expected that of token_level_rewards, "
            f"{tuple(rewards.shape)}."
        )
    if whiten_rewards:
        rewards = whiten_or_keep(rewards, mask)
    given = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "gamma": gamma,
        "lam": lambd,
        "config": pipeline_config,
        "norm_adv_by_std_in_grpo": getattr(pipeline_config, "norm_adv_by_std_in_grpo", True),
    }
    given |= {"whiten": False} if is_rolls else {}
    raw_advantages, returns = _call_estimator(adv_estimator, data, given, stage)
    result = data.select()
    advantages = whiten_or_keep(raw_advantages, mask) if whiten_advantages else raw_advantages
    if advantage_clip is not None:
        advantages, clipped = _clip(advantages, advantage_clip, mask != 0)
        result.meta_info["metrics"] = {**data.meta_info.get("metrics", {}), "critic/advantage_clip_frac": clipped}
    result.batch.update({"raw_advantages": raw_advantages, "advantages": advantages, "returns": returns})
    return result


def _call_estimator(name: str, data: DataProto, given: dict[str, Any], stage: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls a registered estimator with what is given, the columns of the batch that it may read, and no other."""
    function = get_adv_estimator_fn(name)
    for argument, column in ESTIMATOR_COLUMNS.items():
        if column in data or (takes(function, argument) and argument != "rollout_is_weights"):
            given[argument] = column_of(data, column, stage)
    # what a reward function returned beside its score goes by its own name, as in verl
    extras = {key.removeprefix("reward/"): column for key, column in data.non_tensor_batch.items()}
    given |= {"batch": data.batch, "non_tensor_batch": {**extras, **data.non_tensor_batch}}
    result = function(**{key: value for key, value in given.items() if accepts(function, key)})
    valid, found = given["response_mask"] != 0, result if isinstance(result, tuple) else ()
    is_sound = len(found) == 2 and all(x.shape == valid.shape and bool(x[valid].isfinite().all()) for x in found)
    if not is_sound:
        raise UserError(
            f"algorithm.adv_estimator={name}: expected a tuple (advantages, returns) of shape {tuple(valid.shape)}, "
            f"finite where response_mask is 1; found {[tuple(x.shape) for x in found] or type(result).__name__}. Test "
            "the function with verl_lite.contracts.check_adv_estimator, which names the promise that it breaks"
        )
    return result


def column_of(data: DataProto, name: str, stage: str) -> Any:
    """A column, wherever it is kept. Raises ValueError where it is missing."""
    if name not in data:
        check(data, [name], stage)
    return data.batch[name] if name in data.batch.keys() else data.non_tensor_batch[name]


def _groups_of_roll(data: DataProto, pipeline_config: Any, stage: str) -> list[int] | None:
    """The group of each row where no uid says it: num_return_sequences neighbours. None where that is not said."""
    arguments = getattr(getattr(pipeline_config, "actor_infer", None), "generating_args", None)
    size = getattr(arguments, "num_return_sequences", None)
    if not size or "uid" in data:
        return None
    if len(data) % size:
        raise ValueError(f"{stage}: num_return_sequences={size} does not divide the batch of {len(data)} rows.")
    return [row // size for row in range(len(data))]


def _response_mask(data: DataProto, width: int | None = None) -> torch.Tensor:
    """response_mask of the response tokens, as wide as the other columns (`width`; None = as one of the batch); ROLL's
    lacks its first column there."""
    mask = data.batch["response_mask"]
    if width is None:
        others = [name for name in ("old_log_probs", "token_level_scores") if name in data]
        width = data.batch[others[0]].shape[-1] if others else mask.shape[-1]
    return mask[:, 1:] if mask.shape[-1] == width + 1 else mask


def response_scores(data: DataProto, stage: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The reward of each answer (B,), and which rows count (B,)."""
    check(data, ["response_mask"], stage)
    mask = _response_mask(data)
    valid = (mask != 0).any(dim=-1)
    if "response_level_rewards" in data:
        return torch.where(valid, data.batch["response_level_rewards"].float(), 0), valid
    return outcome_scores(column_of(data, "token_level_scores", stage), mask), valid


def _place_rewards(data: DataProto, mask: torch.Tensor) -> torch.Tensor:
    """(B, R): the reward of each answer on its tokens; scores of several tokens stay where their sum is as it was."""
    if "response_level_rewards" not in data:
        return column_of(data, "token_level_scores", "compute_token_reward")
    rewards = data.batch["response_level_rewards"].float()
    placed = at_last_token(rewards, mask)
    if "token_level_scores" not in data:
        return placed
    scores = data.batch["token_level_scores"]
    return torch.where((outcome_scores(scores, mask) == rewards)[:, None], scores, placed)


def _clip(values: torch.Tensor, bound: float | None, counted: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Values within +-bound, and the share of the counted ones that lay beyond it."""
    if bound is None:
        return values, 0.0
    beyond = (values.abs() > bound) & counted
    return values.clamp(-bound, bound), float(beyond.sum()) / max(1, int(counted.sum()))
