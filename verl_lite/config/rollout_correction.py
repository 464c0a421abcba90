"""What may be asked of the rollout correction: a configuration's text made numbers, and verl's presets.

Everything is said in the keys of `algorithm.rollout_correction` (`RolloutCorrectionConfig`, or any object with these
attributes), and read by `correction_of` into a `Correction`, which `rollout_correction` carries out.

Throughout, x = log pi_trainer - log pi_rollout of a sampled token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verl_lite.config.fields import Problems, opt, unknown_value
from verl_lite.config.reads import Options

WEIGHT_LEVELS = {"token": "token", "segment": "segment", "geometric": "seq_mean", "sequence": "seq_sum"}
"""What an importance weight is taken over, by the name of `rollout_is` (and ROLL's weight_type and agg_type)."""

SIGNED_MEASURES, DIVERGENCES = ("k1", "ratio", "diff"), ("k2", "k3")
REJECTION_OPTIONS = (
    *(f"{level}_{measure}" for level in WEIGHT_LEVELS.values() for measure in (*SIGNED_MEASURES, *DIVERGENCES)),
    *(f"seq_max_{measure}" for measure in DIVERGENCES),
)
"""What `rollout_rs` knows: level_measure. verl has k1, k2, k3 over token, seq_mean, seq_sum and seq_max; the rest
is ROLL's, or follows from both."""

_KEY = "algorithm.rollout_correction"


@dataclass
class RolloutCorrectionConfig(Options):
    """What is done about samples whose rollout log-probs differ from the trainer's: see ROLLOUT_CORRECTION.md."""

    rollout_is: str | None = opt(None, "importance weights: null | token | sequence | segment | geometric")
    rollout_is_threshold: str = opt(
        "2.0", "upper bound (truncated), or low_high outside which the weight is 0 (IcePop)"
    )
    rollout_is_batch_normalize: bool = opt(False, "divide the weights by their mean over the batch")
    rollout_rs: str | None = opt(None, "rejection: level_measure, such as token_k1, or a comma list; null = none")
    rollout_rs_threshold: str | None = opt(
        None, "its bounds, one for all or a comma list: of k1, ratio, diff low_high or high; of k2, k3 the largest"
    )
    bypass_mode: bool = opt(
        False, "take the rollout's log-probs as old_log_probs and spare the pass that computes them"
    )
    loss_type: str = opt(
        "ppo_clip", "with bypass_mode: ppo_clip (actor.policy_loss.loss_mode) | reinforce", ("ppo_clip", "reinforce")
    )

    def check(self) -> Problems:
        """Thresholds that are missing or malformed, and a mean over a batch that is never whole."""
        for read in (weighting_of, rejections_of):
            try:
                read(self)
            except ValueError as error:
                yield str(error)
        if self.bypass_mode and self.rollout_is is not None and self.rollout_is_batch_normalize:
            yield (
                f"{_KEY}.rollout_is_batch_normalize=true with bypass_mode=true: weights change with each optimizer "
                "step, so there is no mean of the batch: set bypass_mode=false, or leave it out"
            )

    def overrides(self) -> dict[str, Any]:
        """As settings of a recipe: dotted keys and values, without those that are the default."""
        untouched = RolloutCorrectionConfig()
        return {f"{_KEY}.{name}": value for name, value in vars(self).items() if value != getattr(untouched, name)}


@dataclass(frozen=True)
class Weighting:
    """Importance weights. level: token, segment, seq_mean or seq_sum.

    Without `lower` larger weights are truncated to `upper`; with it, weights outside [lower, upper] are 0 (IcePop).
    """

    level: str
    upper: float = math.inf
    lower: float | None = None
    batch_normalize: bool = False


@dataclass(frozen=True)
class Rejection:
    """One criterion: what it measures, over what, and the closed interval that passes (logarithms for k1 and ratio).

    level: token, segment, seq_mean, seq_sum or seq_max. measure: k1 = -x, ratio = x, k2 = x^2 / 2, k3 = e^x - 1 - x,
    diff = pi_trainer - pi_rollout.
    """

    level: str
    measure: str
    lower: float
    upper: float

    @property
    def name(self) -> str:
        return f"{self.level}_{self.measure}"


@dataclass(frozen=True)
class Correction:
    """What is done: weights or none, and criteria that all have to pass."""

    weighting: Weighting | None = None
    rejections: tuple[Rejection, ...] = ()


def correction_of(options: Any) -> Correction:
    """The numbers of `options`, any object with the attributes of `RolloutCorrectionConfig`.

    bypass_mode and loss_type are not part of it: they say where and in which loss it is used.
    Raises ValueError naming the key: an unknown name (with the nearest), a threshold that is missing or malformed.
    """
    return Correction(weighting_of(options), rejections_of(options))


def weighting_of(options: Any) -> Weighting | None:
    """`rollout_is` and its threshold; None where it is null. Raises ValueError."""
    if options.rollout_is is None:
        return None
    if options.rollout_is not in WEIGHT_LEVELS:
        raise ValueError(unknown_value(f"{_KEY}.rollout_is", options.rollout_is, WEIGHT_LEVELS))
    numbers = _numbers("rollout_is_threshold", str(options.rollout_is_threshold))
    shown = f"{_KEY}.rollout_is_threshold={options.rollout_is_threshold}"
    lower, upper = (None, numbers[0]) if len(numbers) == 1 else numbers
    if not upper > 0:
        raise ValueError(f"{shown}: the largest weight is expected to be above 0, such as 2.0")
    if lower is not None and not 0 <= lower <= 1 <= upper:
        raise ValueError(
            f"{shown}: low_high is expected with low <= 1 <= high, such as 0.5_5.0: 1 is the weight where both agree"
        )
    return Weighting(WEIGHT_LEVELS[options.rollout_is], upper, lower, options.rollout_is_batch_normalize)


def rejections_of(options: Any) -> tuple[Rejection, ...]:
    """`rollout_rs` and its thresholds, one for all or one each; () where it is null. Raises ValueError."""
    if options.rollout_rs is None:
        return ()
    names = [name.strip() for name in options.rollout_rs.split(",") if name.strip()]
    shown = f"{_KEY}.rollout_rs={options.rollout_rs}"
    if not names:
        raise ValueError(f"{shown}: at least one option is expected, such as token_k1, or null")
    for name in names:
        if name not in REJECTION_OPTIONS:
            raise ValueError(unknown_value(f"{_KEY}.rollout_rs", name, REJECTION_OPTIONS))
    if len(set(names)) < len(names):
        raise ValueError(f"{shown}: an option is named twice; say it once, with the narrower threshold")
    if options.rollout_rs_threshold is None:
        raise ValueError(
            f"{shown} needs {_KEY}.rollout_rs_threshold, which is null: such as 0.5_2.0 for k1 and ratio, 0.01 for k2 "
            "and k3"
        )
    texts = [text.strip() for text in str(options.rollout_rs_threshold).split(",") if text.strip()]
    if len(texts) not in (1, len(names)):
        raise ValueError(
            f"{_KEY}.rollout_rs_threshold={options.rollout_rs_threshold}: one threshold, or {len(names)} as "
            f"rollout_rs={options.rollout_rs} has, are expected; found {len(texts)}"
        )
    texts = texts * len(names) if len(texts) == 1 else texts
    return tuple(_rejection(name, text) for name, text in zip(names, texts, strict=True))


def _rejection(name: str, text: str) -> Rejection:
    level, _, measure = name.rpartition("_")
    numbers = _numbers("rollout_rs_threshold", text)
    shown = f"{_KEY}.rollout_rs_threshold={text} of {name}"
    if measure in DIVERGENCES:
        if len(numbers) > 1 or not numbers[0] > 0:
            raise ValueError(
                f"{shown}: one number above 0 is expected, such as 0.01: a divergence is 0 where both agree"
            )
        return Rejection(level, measure, -math.inf, numbers[0])
    neutral = 0 if measure == "diff" else 1
    if len(numbers) == 1:
        numbers = (-numbers[0], numbers[0]) if measure == "diff" else (1 / (numbers[0] or math.nan), numbers[0])
    lower, upper = numbers
    if not lower <= neutral <= upper or lower < neutral - 1:
        example = "-0.2_0.2 or 0.2" if measure == "diff" else "0.5_2.0 or 2.0"
        raise ValueError(
            f"{shown}: low_high with low <= {neutral} <= high is expected, such as {example}: {neutral} is the value "
            "where both agree"
        )
    if measure == "diff":
        return Rejection(level, measure, lower, upper)
    return Rejection(level, measure, math.log(lower) if lower > 0 else -math.inf, math.log(upper))


def _numbers(key: str, text: str) -> tuple[float, ...]:
    """One number, or the two of low_high."""
    try:
        numbers = tuple(float(part) for part in text.split("_", 1))
    except ValueError:
        numbers = (math.nan,)
    if any(math.isnan(number) for number in numbers):
        raise ValueError(f"{_KEY}.{key}={text}: a number or low_high is expected, such as 2.0 or 0.5_2.0")
    return numbers


# ---------------------------------------------------------------------------------------------------- verl's presets

_SEQ_TIS: dict[str, Any] = {"rollout_is": "sequence", "rollout_is_threshold": "2.0"}
_TOKEN_TIS: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": "2.0"}
_TOKEN_ICEPOP: dict[str, Any] = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_GEO_RS: dict[str, Any] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS: dict[str, Any] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}
_SEQ_RS: dict[str, Any] = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_BYPASS: dict[str, Any] = {"bypass_mode": True}
_BYPASS_PG: dict[str, Any] = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: dict[str, RolloutCorrectionConfig] = {
    "disabled": RolloutCorrectionConfig(),
    "decoupled_token_is": RolloutCorrectionConfig(**_TOKEN_TIS),
    "decoupled_seq_is": RolloutCorrectionConfig(**_SEQ_TIS),
    "decoupled_token_icepop": RolloutCorrectionConfig(**_TOKEN_ICEPOP),
    "decoupled_seq_is_rs": RolloutCorrectionConfig(**_SEQ_TIS, **_SEQ_RS),
    "decoupled_geo_rs": RolloutCorrectionConfig(**_GEO_RS),
    "decoupled_geo_rs_seq_tis": RolloutCorrectionConfig(**_GEO_RS, **_SEQ_TIS),
    "decoupled_geo_rs_token_tis": RolloutCorrectionConfig(**_GEO_RS, **_TOKEN_TIS),
    "decoupled_k3_rs": RolloutCorrectionConfig(**_K3_RS),
    "decoupled_k3_rs_seq_tis": RolloutCorrectionConfig(**_K3_RS, **_SEQ_TIS),
    "decoupled_k3_rs_token_tis": RolloutCorrectionConfig(**_K3_RS, **_TOKEN_TIS),
    "bypass_ppo_clip": RolloutCorrectionConfig(**_BYPASS),
    "bypass_ppo_clip_geo_rs": RolloutCorrectionConfig(**_BYPASS, **_GEO_RS),
    "bypass_ppo_clip_k3_rs": RolloutCorrectionConfig(**_BYPASS, **_K3_RS),
    "bypass_pg_is": RolloutCorrectionConfig(**_BYPASS_PG, **_SEQ_TIS),
    "bypass_pg_token_icepop": RolloutCorrectionConfig(**_BYPASS_PG, **_TOKEN_ICEPOP),
    "bypass_pg_geo_rs": RolloutCorrectionConfig(**_BYPASS_PG, **_GEO_RS),
    "bypass_pg_geo_rs_seq_tis": RolloutCorrectionConfig(**_BYPASS_PG, **_GEO_RS, **_SEQ_TIS),
    "bypass_pg_geo_rs_token_tis": RolloutCorrectionConfig(**_BYPASS_PG, **_GEO_RS, **_TOKEN_TIS),
}
"""verl's named combinations with its thresholds; `PRESETS[name].overrides()` are the settings of a recipe."""
