"""The settings of the comparison with TRL: what both sides have in common, and the few things in which they differ.

`EQUAL` is the only place with these values. The commands of both sides are built from it, and the comparison prints it.
Settings that are a default of one side are given too, because the other side often has another default (TRL: a linear
learning rate schedule and bf16; here: weight decay 0.01 and dual clipping).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

PROMPTS = 16
ANSWERS = 8
MICRO_BATCH = 32
"""Rows of a micro-batch of TRL: the fastest of the sizes that were tried on two cores."""
SAVED = 10
"""Steps between checkpoints, from which a stopped run continues."""


@dataclass(frozen=True)
class Equal:
    """A setting that both libraries get.

    Args:
        description: The setting in words, for the printed table.
        ours: Options of `trainer.main_ppo`, with their values.
        trl: Arguments of `trl.GRPOConfig`, with their values.
    """

    description: str
    ours: Mapping[str, object]
    trl: Mapping[str, object]


EQUAL = (
    Equal(
        "16 questions per step, one optimizer step",
        {"data.train_batch_size": PROMPTS, "actor.ppo_mini_batch_size": PROMPTS, "actor.ppo_epochs": 1},
        {
            # TRL counts rows: 16 x 8 of them in a step
            "per_device_train_batch_size": MICRO_BATCH,
            "gradient_accumulation_steps": PROMPTS * ANSWERS // MICRO_BATCH,
            "num_iterations": 1,
        },
    ),
    Equal("8 answers to a question", {"rollout.n": ANSWERS}, {"num_generations": ANSWERS}),
    Equal("questions in the order of the file", {"data.shuffle": False}, {"shuffle_dataset": False}),
    Equal("at most 16 tokens", {"data.max_response_length": 16}, {"max_completion_length": 16}),
    Equal(
        "sampling from all tokens at temperature 1",
        {"rollout.temperature": 1.0, "rollout.top_p": 1.0, "rollout.top_k": -1, "rollout.min_p": 0.0},
        # TRL's 0 and the -1 above both mean all tokens
        {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0},
    ),
    Equal(
        "advantage: score less the mean of its group, divided by the group's standard deviation",
        {
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": True,
            "algorithm.use_kl_in_reward": False,
        },
        {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"},
    ),
    Equal(
        "loss: clipped ratio of each token, mean over the tokens of the step",
        {"actor.policy_loss.loss_mode": "vanilla", "actor.loss_agg_mode": "token-mean"},
        # TRL's name for a mean over all tokens of the step
        {"loss_type": "dapo", "importance_sampling_level": "token", "top_entropy_quantile": 1.0},
    ),
    Equal(
        "ratio clipped at 1 ± 0.2, without a second bound",
        # by default, dual clipping bounds the ratio where an advantage is negative
        {"actor.clip_ratio": 0.2, "actor.clip_ratio_c": None},
        {"epsilon": 0.2, "epsilon_high": 0.2, "delta": None},
    ),
    Equal(
        "answers without an end count like others",
        {"reward.overlong_buffer.enable": False},
        {"mask_truncated_completions": False},
    ),
    Equal(
        "neither a KL term nor an entropy bonus",
        {"actor.use_kl_loss": False, "actor.entropy_coeff": 0.0},
        {"beta": 0.0, "entropy_coef": 0.0},
    ),
    Equal(
        "constant learning rate 1e-5 without warm-up",
        {"actor.optim.lr": 1e-5, "actor.optim.lr_scheduler_type": "constant", "actor.optim.lr_warmup_steps": 0},
        # by default, TRL's rate falls linearly from 1e-6
        {"learning_rate": 1e-5, "lr_scheduler_type": "constant", "warmup_steps": 0},
    ),
    Equal(
        "AdamW without weight decay",
        {
            "actor.optim.optimizer": "adamw",
            "actor.optim.betas": [0.9, 0.999],
            "actor.optim.eps": 1e-8,
            "actor.optim.weight_decay": 0.0,
        },
        {"optim": "adamw_torch", "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0},
    ),
    Equal("norm of the gradient clipped at 1", {"actor.optim.clip_grad": 1.0}, {"max_grad_norm": 1.0}),
    Equal(
        "all numbers in fp32, on CPUs",
        {
            "actor.fsdp_config.mixed_precision.param_dtype": "fp32",
            "rollout.dtype": "fp32",
            "trainer.device": "cpu",
        },
        # TRL's default is bf16
        {"bf16": False, "fp16": False, "model_init_kwargs": {"dtype": "float32"}, "use_cpu": True},
    ),
)
"""What both sides have in common, apart from the model, the questions, the reward and the seed."""

DIFFERENT = (
    "added to the standard deviation: verl_lite 1e-6, TRL 1e-4 (no option; at most 0.03% of an advantage)",
    "processes: verl_lite as many as its default (two on two cores) with one thread each, TRL one with all threads",
    f"TRL has its fastest setting on two cores: no gradient checkpointing, micro-batches of {MICRO_BATCH} rows; "
    "verl_lite has its defaults",
    "random numbers: the same seed gives each side other samples",
)
"""What is not equal."""


def our_settings() -> dict[str, object]:
    """Returns the options of `trainer.main_ppo`: those in `EQUAL`, and those of checkpoints."""
    settings: dict[str, object] = {
        "trainer.save_freq": SAVED,
        "trainer.max_actor_ckpt_to_keep": 1,
        "trainer.resume_mode": "auto",
    }
    for equal in EQUAL:
        settings |= equal.ours
    return settings


def trl_settings() -> dict[str, object]:
    """Returns the arguments of `trl.GRPOConfig`: those in `EQUAL`, and those of speed, checkpoints and output."""
    settings: dict[str, object] = {
        # the fastest setting on two cores, see `DIFFERENT`
        "gradient_checkpointing": False,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "save_total_limit": 1,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    for equal in EQUAL:
        settings |= equal.trl
    return settings


def settings_table() -> str:
    """Returns `EQUAL` as a Markdown table, followed by `DIFFERENT`."""
    lines = ["| equal | verl_lite | TRL |", "|---|---|---|"]
    for equal in EQUAL:
        ours = _words(equal.ours)
        trl = _words(equal.trl)
        lines.append(f"| {equal.description} | {ours} | {trl} |")
    lines += ["", "Not equal:"]
    lines += [f"- {difference}" for difference in DIFFERENT]
    return "\n".join(lines)


def _words(settings: Mapping[str, object]) -> str:
    words = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    return " ".join(words)
