"""Computes options from several keys of ROLL or verl. Each function receives all keys that are set.

roll_keys.yaml and verl_keys.yaml name those functions as `computed` that return the options to set.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from verl_lite.config.rollout_correction import WEIGHT_LEVELS
from verl_lite.errors import UserError


def trains_on_prompts(given: Mapping[str, Any]) -> bool:
    """Returns True if the keys are those of ROLL's RLVR pipeline, whose batches count prompts."""
    sections = {name.partition(".")[0] for name in given}
    is_agentic = "train_env_manager" in sections
    return bool(sections & {"validation", "rewards", "num_return_sequences_in_group"}) and not is_agentic


def async_generation_ratio(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns async_training for ROLL's number of steps by which a batch is started ahead."""
    ratio = given.get("agentic.async_generation_ratio", given.get("async_generation_ratio"))
    return {"async_training.max_off_policy_threshold": ratio, "async_training.batches_ahead": ratio}


def colocate_async(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns async_training for verl's trainer.v1.trainer_mode=colocate_async; None in other modes. Raises UserError
    if the threshold is no whole number."""
    if given.get("trainer.v1.trainer_mode") != "colocate_async":
        return None
    key = "trainer.v1.sampler.max_off_policy_threshold"
    versions = given.get(key, 8)
    if not isinstance(versions, int):
        raise UserError(f"{key}={versions}: expected a whole number; or set async_training.max_off_policy_threshold")
    options = {"async_training.max_off_policy_threshold": versions - 1}  # verl counts 1 for an on-policy sample
    ahead = given.get("trainer.v1.colocate_async.num_warmup_batches")
    return options if ahead is None else options | {"async_training.batches_ahead": ahead}


def dual_clip_loss(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the bound of the dual clip, 1 + 2 pg_clip; None if pg_clip is no number."""
    if not given.get("dual_clip_loss"):
        return {"actor.clip_ratio_c": None}
    clip = given.get("actor.clip_ratio", given.get("pg_clip", 0.2))
    return {"actor.clip_ratio_c": 1 + 2 * clip} if isinstance(clip, int | float) else None


def train_infer_correction(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns algorithm.rollout_correction for ROLL's weights and filters of train_infer_correction. Raises UserError
    if the filters are no list of dicts."""
    if given.get("infer_correction"):
        return {}
    filters = given.get("train_infer_correction.filters") or []
    if not isinstance(filters, list) or not all(isinstance(one, dict) for one in filters):
        raise UserError(
            f"train_infer_correction.filters={filters}: expected a list of filters, such as "
            "[{enabled: true, agg_type: token, ratio_low: 0.5, ratio_high: 2.0}]"
        )
    weight = {"enabled": False, "weight_type": "token", "upper_bound": 1.2}
    is_on, level, bound = (given.get(f"train_infer_correction.is_weight.{name}", one) for name, one in weight.items())
    return _correction(level if is_on else None, bound, filters)


def infer_correction(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns algorithm.rollout_correction for ROLL's older keys infer_* and enable_*_reject."""
    if not given.get("infer_correction"):
        return {}
    by_token = "token" if given.get("enable_token_reject") else None
    level = given.get("infer_is_mode", "token")
    filters = [
        {
            "enabled": aggregation not in (None, False, "None"),
            "agg_type": aggregation,
            "ratio_low": given.get(f"infer_{name}_mask_threshold_min", low),
            "ratio_high": given.get(f"infer_{name}_mask_threshold_max", high),
        }
        for name, aggregation, low, high in (
            ("token", by_token, 0.0, 2.0),
            ("seq", given.get("enable_seq_reject"), 0.1, 10.0),
        )
    ]
    return _correction(None if level == "none" else level, given.get("infer_is_threshold_max", 2.0), filters)


def _correction(level: str | None, bound: float | None, filters: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """level, bound: of the importance weights; None = no weights, no bound. filters: as in ROLL's configuration."""
    bounds: dict[str, str] = {}
    for one in (one for one in filters if one.get("enabled")):
        of_filter = WEIGHT_LEVELS.get(one.get("agg_type", "token"), one.get("agg_type"))
        for measure, default, low, high in (("ratio", True, 0.8, 1.2), ("diff", False, -0.2, 0.2)):
            if one.get(f"{measure}_enabled", default):
                ends = one.get(f"{measure}_low", low), one.get(f"{measure}_high", high)
                bounds[f"{of_filter}_{measure}"] = "_".join(map(str, ends))
    weights = {"rollout_is": level, "rollout_is_threshold": str(math.inf if bound is None else bound)}
    rejection = {"rollout_rs": ",".join(bounds), "rollout_rs_threshold": ",".join(bounds.values())}
    settings = (weights if level is not None else {}) | (rejection if bounds else {})
    return {f"algorithm.rollout_correction.{name}": value for name, value in settings.items()}
