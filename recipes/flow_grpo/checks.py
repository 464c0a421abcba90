"""Whether the options fit each other, the machine and the files, checked before anything heavy starts.

Takes a `FlowGRPOConfig`; gives one `ConfigError` with every problem found. Losses, ranges, checkpoints and devices are
checked as for language models; here stands what a model of images has not: an entropy, a critic, a greedy answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.tracking import TRACKERS
from verl_lite.config import ActorConfig, AlgorithmConfig, ConfigError, unknown_value
from verl_lite.config.checks import loss_problems, machine_problems, section_problems
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY
from verl_lite.registry import takes

Problems = Iterator[str]

NOT_HERE = {
    "values": "a critic",
    "reward_baselines": "a greedy answer",
    "sum_pi_squared": "a vocabulary",
    "traj_id": "episodes",
    "state_hash": "states",
}
"""Arguments of an estimator that nothing here could give it."""

OFF: dict[str, str] = {
    "algorithm.filter_groups.enable": "dynamic sampling",
    "algorithm.use_pf_ppo": "PF-PPO",
    "algorithm.use_kl_in_reward": "the KL in the reward; use actor.use_kl_loss",
    "algorithm.rollout_correction.bypass_mode": "rollout correction: one engine samples and learns",
    "algorithm.rollout_correction.rollout_is": "rollout correction: one engine samples and learns",
    "algorithm.rollout_correction.rollout_rs": "rollout correction: one engine samples and learns",
    "actor.calculate_entropy": "entropy: that of a step is its noise, which no weight changes",
    "actor.entropy_coeff": "entropy bonus: the entropy of a step is its noise, which no weight changes",
}


def validate(config: FlowGRPOConfig, *, count: int | None = None, available: int | None = None) -> None:
    """Raises ConfigError with all problems. count: devices of the run. available: of this machine."""
    problems = [
        *section_problems(config),
        *loss_problems(config.actor),
        *_data(config),
        *_algorithm(config.algorithm, config.rollout.n),
        *_actor(config.actor, config.sampler.num_train_steps),
        *machine_problems(config, count, available, TRACKERS),
    ]
    for name, what in OFF.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        if value:
            problems.append(f"{name}={value}: flow_grpo has no {what}; leave it out")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _data(config: FlowGRPOConfig) -> Problems:
    for name, value in (
        ("data.train_files", config.data.train_files),
        ("model.path", config.model.path),
        ("model.network", config.model.network),
        ("reward.name", config.reward.name),
    ):
        if not value:
            yield f"{name}={value}: it is needed where no recipe gives it; `recipe=flow_grpo` shows how"
    for file in (*config.data.train_files, *config.data.val_files):
        if not Path(file).is_file() and config.recipe is None:
            yield f"data.train_files, data.val_files: there is no {file}; a text file with one prompt in each line"


def _algorithm(algorithm: AlgorithmConfig, n: int) -> Problems:
    chosen = algorithm.adv_estimator
    if ":" not in chosen and chosen not in ADV_ESTIMATOR_REGISTRY:
        yield unknown_value("algorithm.adv_estimator", chosen, ADV_ESTIMATOR_REGISTRY) + "; or pkg.module:function"
        return
    function = ADV_ESTIMATOR_REGISTRY.get(chosen)
    for argument, what in NOT_HERE.items():
        if function is not None and takes(function, argument):
            yield f"algorithm.adv_estimator={chosen} needs {what}, which flow_grpo has not: use grpo, rloo or opo"
    if n == 1 and chosen.startswith(("grpo", "rloo", "opo", "gpg")):
        yield f"rollout.n=1: {chosen} compares the samples of one prompt with each other; set at least 2, such as 8"


def _actor(actor: ActorConfig, steps: int) -> Problems:
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < steps:
        yield (
            f"actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu}: denoising steps of one micro-batch, "
            f"and a single sample has sampler.num_train_steps={steps}"
        )
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        yield "actor.use_dynamic_bsz=false needs actor.ppo_micro_batch_size_per_gpu, samples of one micro-batch"
