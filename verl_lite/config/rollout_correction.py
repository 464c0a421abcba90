"""The options of the rollout correction, and their conversion to numbers.

`correction_of` parses `algorithm.rollout_correction` (a `RolloutCorrectionConfig`, or any object with its attributes)
into a `Correction`, which `rollout_correction` applies.

Throughout, x = log pi_trainer - log pi_rollout of a sampled token.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from verl_lite.config.fields import Options, Problems, opt, unknown_value

WEIGHT_LEVELS = {"token": "token", "segment": "segment", "geometric": "seq_mean", "sequence": "seq_sum"}
"""The level of an importance weight by the name in `rollout_is` (and in ROLL's weight_type and agg_type)."""

SIGNED_MEASURES = ("k1", "ratio", "diff")
DIVERGENCES = ("k2", "k3")
REJECTION_OPTIONS = (
    *(f"{level}_{measure}" for level in WEIGHT_LEVELS.values() for measure in (*SIGNED_MEASURES, *DIVERGENCES)),
    *(f"{level}_{measure}" for level in ("seq_max", "batch") for measure in DIVERGENCES),
)
"""The names that `rollout_rs` accepts, each LEVEL_MEASURE. verl has k1, k2 and k3 over token, seq_mean, seq_sum and
seq_max; batch_k2 is M2PO's criterion (arXiv:2510.01161); the others come from ROLL or combine both."""

_KEY = "algorithm.rollout_correction"


@dataclass
class RolloutCorrectionConfig(Options):
    """Corrections for samples whose rollout log-probs differ from the trainer's; see ROLLOUT_CORRECTION.md."""

    rollout_is: str | None = opt(None, "importance weights: null | token | sequence | segment | geometric")
    rollout_is_threshold: str = opt("2.0", "upper bound (truncation), or low_high: weights outside are 0 (IcePop)")
    rollout_is_batch_normalize: bool = opt(False, "divide the weights by their mean over the batch")
    rollout_rs: str | None = opt(None, "rejection: LEVEL_MEASURE, such as token_k1, or a comma list; null = none")
    rollout_rs_threshold: str | None = opt(None, "bound for all or one each: low_high or high; k2, k3: high")
    bypass_mode: bool | None = opt(None, "old_log_probs = the rollout's log-probs; null = true if samples are stale")
    loss_type: str = opt("ppo_clip", "bypass_mode: ppo_clip = policy_loss.loss_mode", ("ppo_clip", "reinforce"))

    def check(self) -> Problems:
        try:
            correction_of(self)
        except ValueError as error:
            yield str(error)


@dataclass(frozen=True)
class Weighting:
    """Importance weights.

    Attributes:
        level: token, segment, seq_mean or seq_sum.
        upper, lower: if `lower` is None, larger weights are truncated to `upper`; else weights outside
            [lower, upper] are 0 (IcePop).
        batch_normalize: True to divide the weights by their mean over the batch.
    """

    level: str
    upper: float = math.inf
    lower: float | None = None
    batch_normalize: bool = False


@dataclass(frozen=True)
class Rejection:
    """A rejection criterion: samples pass if their measure lies in [lower, upper] (logarithms for k1 and ratio).

    Attributes:
        level: token, segment, seq_mean, seq_sum, seq_max, or batch: the tokens with the largest measure are rejected
            until the mean over the others is at most `upper`.
        measure: k1 = -x, ratio = x, k2 = x^2 / 2, k3 = e^x - 1 - x, diff = pi_trainer - pi_rollout.
        lower, upper: bounds of the measure.
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
    """Importance weights, if any, and rejection criteria, all of which a sample has to pass."""

    weighting: Weighting | None = None
    rejections: tuple[Rejection, ...] = ()


class CorrectionOptions(Protocol):
    """The options that `correction_of` reads, with the names of verl's `RolloutCorrectionConfig`."""

    rollout_is: str | None
    rollout_is_threshold: str
    rollout_is_batch_normalize: bool
    rollout_rs: str | None
    rollout_rs_threshold: str | None


def correction_of(options: CorrectionOptions) -> Correction:
    """Parses `options`, any object with the attributes of `RolloutCorrectionConfig`, into a `Correction`.

    bypass_mode and loss_type are not read here: they decide where and in which loss the correction is applied.

    Raises:
        ValueError: a name is unknown, or a threshold is missing or malformed; the message names the key.
    """
    weighting = None
    if options.rollout_is is not None:
        if options.rollout_is not in WEIGHT_LEVELS:
            raise ValueError(unknown_value(f"{_KEY}.rollout_is", options.rollout_is, WEIGHT_LEVELS))
        text = str(options.rollout_is_threshold)
        low, upper = _bounds(text)
        # the weight of an on-policy sample, 1, passes
        is_interval = low is None or 0 <= low <= 1 <= upper
        # false for NaN, a malformed text
        is_valid = upper > 0 and is_interval
        if not is_valid:
            raise ValueError(
                f"{_KEY}.rollout_is_threshold={text}: expected the largest weight, such as 2.0, or low_high with "
                "low <= 1 <= high, such as 0.5_5.0"
            )
        level = WEIGHT_LEVELS[options.rollout_is]
        weighting = Weighting(level, upper, low, options.rollout_is_batch_normalize)
    rejections = tuple(_rejections(options))
    return Correction(weighting, rejections)


def _rejections(options: CorrectionOptions) -> Iterator[Rejection]:
    """Yields the criteria of `rollout_rs`, which have one common threshold or one threshold each."""
    if options.rollout_rs is None:
        return
    names = _parts(options.rollout_rs)
    for name in names:
        if name not in REJECTION_OPTIONS:
            raise ValueError(unknown_value(f"{_KEY}.rollout_rs", name, REJECTION_OPTIONS))
    texts = _parts(str(options.rollout_rs_threshold))
    are_different = len(set(names)) == len(names)
    if not names or not are_different or len(texts) not in (1, len(names)):
        raise ValueError(
            f"{_KEY}.rollout_rs={options.rollout_rs} with rollout_rs_threshold={options.rollout_rs_threshold}: "
            "expected different options, such as token_k1, and one threshold for all or one per option"
        )
    if len(texts) == 1:
        texts *= len(names)
    for name, text in zip(names, texts, strict=True):
        try:
            yield _rejection(name, text)
        except ValueError as error:
            raise ValueError(f"{_KEY}.rollout_rs_threshold={text} of {name}: {error}") from None


def _parts(text: str) -> list[str]:
    """Splits a text at commas, and leaves out empty parts."""
    parts = [part.strip() for part in text.split(",")]
    return list(filter(None, parts))


def _rejection(name: str, threshold: str) -> Rejection:
    """Returns the criterion LEVEL_MEASURE with its threshold. Raises ValueError if the threshold does not fit."""
    level, _, measure = name.rpartition("_")
    low, upper = _bounds(threshold)
    if measure in DIVERGENCES:
        # k2 and k3 are never negative
        if low is not None or not upper > 0:
            raise ValueError("expected one number above 0, such as 0.01")
        return Rejection(level, measure, -math.inf, upper)
    if measure == "diff":
        if low is None:
            low = -upper
        # probabilities differ by at most 1
        if not -1 <= low <= 0 <= upper:
            raise ValueError("expected low_high with low <= 0 <= high, such as -0.2_0.2, or 0.2")
        return Rejection(level, measure, low, upper)
    if low is None:
        # an upper bound of 0 has no inverse; NaN fails the check below
        low = 1 / (upper or math.nan)
    if not 0 <= low <= 1 <= upper:
        raise ValueError("expected low_high with low <= 1 <= high, such as 0.5_2.0, or 2.0")
    # ratios are compared as logarithms
    log_low = -math.inf
    if low > 0:
        log_low = math.log(low)
    return Rejection(level, measure, log_low, math.log(upper))


def _bounds(text: str) -> tuple[float | None, float]:
    """Parses `low_high` or `high`. Returns (low or None, high); high is NaN if the text is neither."""
    try:
        if "_" not in text:
            return None, float(text)
        low, upper = text.split("_", 1)
        return float(low), float(upper)
    except ValueError:
        return None, math.nan
