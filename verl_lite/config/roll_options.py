"""Computes options from several keys of ROLL or verl. Each function receives all keys that are set.

roll_keys.yaml and verl_keys.yaml name those functions as `computed` that return the options to set.
"""

import math
from collections.abc import Iterable

from verl_lite.config.option_table import Settings
from verl_lite.config.rollout_correction import WEIGHT_LEVELS
from verl_lite.errors import UserError


def trains_on_prompts(keys: Settings) -> bool:
    """Returns True if the keys are those of ROLL's RLVR pipeline, whose batches count prompts."""
    sections = {name.partition(".")[0] for name in keys}
    # files of ROLL's agentic pipeline can have the other keys as well
    if "train_env_manager" in sections:
        return False
    return bool(sections & {"validation", "rewards", "num_return_sequences_in_group"})


def async_generation_ratio(keys: Settings) -> Settings:
    """Returns async_training for ROLL's number of steps by which a batch is started ahead."""
    ratio = keys.get("agentic.async_generation_ratio", keys.get("async_generation_ratio"))
    return {
        "async_training.max_off_policy_threshold": ratio,
        "async_training.batches_ahead": ratio,
    }


def colocate_async(keys: Settings) -> Settings | None:
    """Returns async_training for verl's trainer.v1.trainer_mode=colocate_async; None in other modes.

    Raises:
        UserError: if the threshold is no whole number.
    """
    if keys.get("trainer.v1.trainer_mode") != "colocate_async":
        return None
    key = "trainer.v1.sampler.max_off_policy_threshold"
    versions = keys.get(key, 8)
    if not isinstance(versions, int):
        raise UserError(f"{key}={versions}: expected a whole number; or set async_training.max_off_policy_threshold")
    # verl counts 1 for an on-policy sample
    options: dict[str, object] = {"async_training.max_off_policy_threshold": versions - 1}
    batches_ahead = keys.get("trainer.v1.colocate_async.num_warmup_batches")
    if batches_ahead is not None:
        options["async_training.batches_ahead"] = batches_ahead
    return options


def dual_clip_loss(keys: Settings) -> Settings | None:
    """Returns the bound of the dual clip, 1 + 2 pg_clip; None if pg_clip is no number."""
    if not keys.get("dual_clip_loss"):
        return {"actor.clip_ratio_c": None}
    # ROLL's bound depends on the clip range
    clip = keys.get("actor.clip_ratio", keys.get("pg_clip", 0.2))
    if not isinstance(clip, int | float):
        return None
    return {"actor.clip_ratio_c": 1 + 2 * clip}


def train_infer_correction(keys: Settings) -> Settings:
    """Returns algorithm.rollout_correction for ROLL's weights and filters of train_infer_correction.

    Raises:
        UserError: if the filters are no list of dicts.
    """
    # ROLL's older switch, whose keys `infer_correction` reads
    if keys.get("infer_correction"):
        return {}
    filters = keys.get("train_infer_correction.filters") or []
    if not isinstance(filters, list) or not all(isinstance(entry, dict) for entry in filters):
        raise UserError(
            f"train_infer_correction.filters={filters}: expected a list of filters, such as "
            "[{enabled: true, agg_type: token, ratio_low: 0.5, ratio_high: 2.0}]"
        )
    # the defaults are ROLL's, here and below
    section = "train_infer_correction.is_weight"
    level = None
    if keys.get(f"{section}.enabled", False):
        level = keys.get(f"{section}.weight_type", "token")
    bound = keys.get(f"{section}.upper_bound", 1.2)
    return _correction(level, bound, filters)


def infer_correction(keys: Settings) -> Settings:
    """Returns algorithm.rollout_correction for ROLL's older keys infer_* and enable_*_reject."""
    if not keys.get("infer_correction"):
        return {}
    filters: list[Settings] = [
        {
            "enabled": keys.get("enable_token_reject"),
            "agg_type": "token",
            "ratio_low": keys.get("infer_token_mask_threshold_min", 0.0),
            "ratio_high": keys.get("infer_token_mask_threshold_max", 2.0),
        },
        {
            "enabled": keys.get("enable_seq_reject") not in (None, False, "None"),
            "agg_type": keys.get("enable_seq_reject"),
            "ratio_low": keys.get("infer_seq_mask_threshold_min", 0.1),
            "ratio_high": keys.get("infer_seq_mask_threshold_max", 10.0),
        },
    ]
    level = keys.get("infer_is_mode", "token")
    if level == "none":
        level = None
    return _correction(level, keys.get("infer_is_threshold_max", 2.0), filters)


def _correction(level: object, bound: object, filters: Iterable[Settings]) -> Settings:
    """Returns the options of `algorithm.rollout_correction`.

    Args:
        level: level of the importance weights, as given; None = no weights.
        bound: their upper bound, as given; None = no bound.
        filters: entries of ROLL's train_infer_correction.filters.
    """
    section = "algorithm.rollout_correction"
    settings: dict[str, object] = {}
    if level is not None:
        settings[f"{section}.rollout_is"] = level
        threshold = math.inf if bound is None else bound
        settings[f"{section}.rollout_is_threshold"] = str(threshold)

    thresholds: dict[str, str] = {}
    for criterion in filters:
        if not criterion.get("enabled"):
            continue
        # an unknown level keeps its name, which the check of `rollout_rs` reports
        roll_level = criterion.get("agg_type", "token")
        level_here = WEIGHT_LEVELS.get(str(roll_level), roll_level)
        if criterion.get("ratio_enabled", True):
            low = criterion.get("ratio_low", 0.8)
            high = criterion.get("ratio_high", 1.2)
            thresholds[f"{level_here}_ratio"] = f"{low}_{high}"
        if criterion.get("diff_enabled", False):
            low = criterion.get("diff_low", -0.2)
            high = criterion.get("diff_high", 0.2)
            thresholds[f"{level_here}_diff"] = f"{low}_{high}"
    if thresholds:
        settings[f"{section}.rollout_rs"] = ",".join(thresholds)
        settings[f"{section}.rollout_rs_threshold"] = ",".join(thresholds.values())
    return settings
