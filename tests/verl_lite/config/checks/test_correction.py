"""Options of the rollout correction: what they mean, verl's presets, and one clear message for each that is wrong."""

from __future__ import annotations

import math
import re
from dataclasses import asdict

import pytest

from verl_lite.config import KEYS, PPOConfig, RolloutCorrectionConfig, load_config
from verl_lite.config.checks.correction import rollout_correction
from verl_lite.config.rollout_correction import (
    PRESETS,
    REJECTION_OPTIONS,
    Correction,
    FilterConfig,
    IsWeightConfig,
    Rejection,
    TrainInferCorrectionConfig,
    Weighting,
    correction_of,
    from_roll,
)


def problems(**options: object) -> list[str]:
    """Of a configuration with these options; `rollout.x` and `actor.x` are written with __ for the dot."""
    config = PPOConfig()
    for name, value in options.items():
        target: object = config.algorithm.rollout_correction
        *path, leaf = name.split("__")
        for part in path:
            target = getattr(config if part == path[0] else target, part)
        setattr(target, leaf, value)
    return list(rollout_correction(config))


def test_what_options_mean() -> None:
    assert correction_of(RolloutCorrectionConfig()) == Correction(None, ())
    options = RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_threshold="0.5_5",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1, seq_mean_k3,segment_diff,seq_sum_ratio",
        rollout_rs_threshold="4,0.01,-0.1_0.2,0_3",
    )
    assert correction_of(options) == Correction(
        Weighting("seq_sum", upper=5, lower=0.5, batch_normalize=True),
        (
            Rejection("token", "k1", pytest.approx(-math.log(4)), pytest.approx(math.log(4))),
            Rejection("seq_mean", "k3", -math.inf, 0.01),
            Rejection("segment", "diff", -0.1, 0.2),
            Rejection("seq_sum", "ratio", -math.inf, math.log(3)),
        ),
    )
    shared = correction_of(RolloutCorrectionConfig(rollout_rs="token_k2,seq_max_k3", rollout_rs_threshold=0.5))
    assert [(r.name, r.upper) for r in shared.rejections] == [("token_k2", 0.5), ("seq_max_k3", 0.5)]
    verl = {f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean") for k in ("k1", "k2", "k3")}
    assert verl | {"seq_max_k2", "seq_max_k3"} < set(REJECTION_OPTIONS)


def test_the_command_line_reaches_them() -> None:
    key = "algorithm.rollout_correction"
    line = [f"{key}.rollout_is=token", f"{key}.rollout_is_threshold=2", f'{key}.rollout_rs="token_k1,seq_mean_k3"']
    line += [f'{key}.rollout_rs_threshold="0.5_2.0,0.01"', "model.path=m"]
    options = load_config(line).config.algorithm.rollout_correction
    assert correction_of(options) == Correction(
        Weighting("token", upper=2.0),
        (Rejection("token", "k1", math.log(0.5), math.log(2)), Rejection("seq_mean", "k3", -math.inf, 0.01)),
    )


def test_a_good_configuration_has_no_problem() -> None:
    assert problems() == []
    assert problems(rollout_is="token", rollout_is_threshold="1.5", rollout_is_batch_normalize=True) == []
    assert problems(rollout_rs="seq_mean_k3", rollout_rs_threshold="0.01") == []
    assert problems(bypass_mode=True) == []


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_accepted_and_written_as_settings(name: str) -> None:
    preset = PRESETS[name]
    assert problems(**asdict(preset)) == []
    assert preset.overrides().keys() <= KEYS.keys()
    settings = [f"{key}={str(value).lower()}" for key, value in preset.overrides().items()]
    loaded = load_config(["model.path=m", *settings]).config.algorithm.rollout_correction
    assert asdict(loaded) == asdict(preset)
    assert name.startswith("bypass") == preset.bypass_mode
    assert ("_pg_" in name) == (preset.loss_type == "reinforce")


def test_presets_are_verls() -> None:
    """Names and defaults of the class methods of verl's RolloutCorrectionConfig."""
    assert set(PRESETS) == {
        "disabled", "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs",
        "decoupled_geo_rs", "decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs",
        "decoupled_k3_rs_seq_tis", "decoupled_k3_rs_token_tis", "bypass_ppo_clip", "bypass_ppo_clip_geo_rs",
        "bypass_ppo_clip_k3_rs", "bypass_pg_is", "bypass_pg_token_icepop", "bypass_pg_geo_rs",
        "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis",
    }  # fmt: skip
    tis = PRESETS["decoupled_k3_rs_seq_tis"]
    assert (tis.rollout_is, tis.rollout_is_threshold) == ("sequence", "2.0")
    assert (tis.rollout_rs, tis.rollout_rs_threshold) == ("seq_mean_k3", "0.01")
    assert PRESETS["decoupled_token_icepop"].rollout_is_threshold == "0.5_5.0"
    assert PRESETS["decoupled_geo_rs"].rollout_rs_threshold == "0.999_1.001"


def test_rolls_options_in_words_of_this_project() -> None:
    filters = [
        FilterConfig(enabled=True, agg_type="geometric", diff_enabled=True),
        FilterConfig(enabled=False),
        FilterConfig(enabled=True, agg_type="segment", ratio_enabled=False, diff_enabled=True, diff_low=-0.5),
        FilterConfig(enabled=True, agg_type="sequence", ratio_high=3.0),
    ]
    config = TrainInferCorrectionConfig(IsWeightConfig(enabled=True, weight_type="segment", upper_bound=None), filters)
    assert from_roll(config) == RolloutCorrectionConfig(
        rollout_is="segment",
        rollout_is_threshold="inf",
        rollout_rs="seq_mean_ratio,seq_mean_diff,segment_diff,seq_sum_ratio",
        rollout_rs_threshold="0.8_1.2,-0.2_0.2,-0.5_0.2,0.8_3.0",
    )
    assert correction_of(from_roll(config)).weighting == Weighting("segment")
    assert from_roll(TrainInferCorrectionConfig()) == RolloutCorrectionConfig()
    with pytest.raises(ValueError, match="detach=False"):
        from_roll(TrainInferCorrectionConfig(IsWeightConfig(enabled=True, detach=False)))
    with pytest.raises(ValueError, match="agg_type='tokens'.*geometric"):
        from_roll(TrainInferCorrectionConfig(filters=[FilterConfig(enabled=True, agg_type="tokens")]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "tokens"}, "rollout_is=tokens is not known; known: token.*did you mean token?"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "rollout_is_threshold=two: a number or low_high"),
        ({"rollout_is": "token", "rollout_is_threshold": "True"}, "rollout_is_threshold=True: a number or low_high"),
        ({"rollout_is": "token", "rollout_is_threshold": ""}, "rollout_is_threshold=: a number or low_high"),
        ({"rollout_is": "token", "rollout_is_threshold": "nan"}, "rollout_is_threshold=nan: a number or low_high"),
        ({"rollout_is": "token", "rollout_is_threshold": "-2"}, "rollout_is_threshold=-2: .*above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_0.5"}, "rollout_is_threshold=2_0.5: .*low <= 1 <= high"),
        ({"rollout_is": "token", "rollout_is_threshold": "1.1_2"}, "rollout_is_threshold=1.1_2: .*low <= 1 <= high"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": "2"}, "rollout_rs=token_k4 is not known.*token_k"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": "2"}, "rollout_rs=seq_max_k1 is not known"),
        ({"rollout_rs": " , ", "rollout_rs_threshold": "2"}, "at least one option is expected"),
        ({"rollout_rs": "token_k1,token_k1", "rollout_rs_threshold": "2"}, "named twice"),
        ({"rollout_rs": "token_k1"}, "needs algorithm.rollout_correction.rollout_rs_threshold, which is null"),
        (
            {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,0.1"},
            "rollout_rs_threshold=2,0.1: one threshold, or 3 .*found 2",
        ),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, "0.1_0.2 of token_k2: one number above 0"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0"}, "0 of token_k3: one number above 0"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5"}, "0.5 of token_k1: low_high with low <= 1 <= high"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0"}, "0 of token_k1: low_high"),
        ({"rollout_rs": "token_ratio", "rollout_rs_threshold": "-1_2"}, "-1_2 of token_ratio: low_high"),
        ({"rollout_rs": "token_diff", "rollout_rs_threshold": "0.1_0.2"}, "0.1_0.2 of token_diff: low_high .*low <= 0"),
        ({"rollout_is_threshold": "3"}, "rollout_is_threshold=3 has no effect with .*rollout_is=null"),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=true has no effect"),
        ({"rollout_rs_threshold": "3"}, "rollout_rs_threshold=3 has no effect with .*rollout_rs=null"),
        ({"loss_type": "reinforce"}, "loss_type=reinforce has no effect with .*bypass_mode=false"),
        (
            {"rollout_is": "token", "rollout__calculate_log_probs": False},
            "rollout.calculate_log_probs=false with .*rollout_is=token: .*set rollout.calculate_log_probs=true",
        ),
        ({"bypass_mode": True, "rollout__calculate_log_probs": False}, "false with .*bypass_mode=true"),
        ({"bypass_mode": True, "rollout_is": "token"}, "rollout_is=token has no effect with bypass_mode=true"),
        (
            {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize=true with bypass_mode=true: .*no mean of the batch",
        ),
        (
            {"bypass_mode": True, "loss_type": "reinforce", "actor__policy_loss__loss_mode": "gspo"},
            "actor.policy_loss.loss_mode=gspo has no effect with .*loss_type=reinforce",
        ),
        (
            {"bypass_mode": True, "loss_type": "reinforce", "actor__ratio_type": "segment"},
            "actor.ratio_type=segment has no effect",
        ),
        (
            {"bypass_mode": True, "algorithm__adv_estimator": "optimal_token_baseline"},
            "adv_estimator=optimal_token_baseline needs sum_pi_squared.*set bypass_mode=false",
        ),
    ],
)
def test_what_is_wrong_is_said_once(options: dict[str, object], message: str) -> None:
    [problem] = problems(**options)
    assert re.search(message.replace("?", r"\?"), problem), problem
    assert problem.startswith(("algorithm.", "rollout.", "actor."))
