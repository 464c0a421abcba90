"""Whether options fit each other, the machine and the files, checked before anything heavy starts.

Takes a `PPOConfig` (and what the machine has); gives one `ConfigError` with every problem found, each naming key,
value, what was expected and what to change. Types and unknown keys are `config_loader`'s part. A check stands here
only if its failure would otherwise come late, or silently: a setting that would have no effect counts as a failure.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from verl_lite.checks.checkpoint import checkpoints
from verl_lite.checks.run import TRACKERS, divisors, group_size, run, slots
from verl_lite.config import PPOConfig
from verl_lite.options.agentic import is_agentic, validates
from verl_lite.settings.keys import ConfigError, unknown_value

Problems = Iterator[str]

ROLLOUT_ENGINES = ("auto", "vllm", "hf")
FOREIGN_ENGINES = ("sglang", "trtllm")
"""Engines of verl whose `engine_kwargs` may stand in a configuration without being used."""

AT_LEAST: dict[str, float] = {
    "data.train_batch_size": 1,
    "data.val_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "data.filter_overlong_prompts_workers": 1,
    "data.seed": 0,
    "actor.ppo_epochs": 1,
    "actor.ppo_max_token_len_per_gpu": 1,
    "actor.ppo_micro_batch_size_per_gpu": 1,
    "actor.log_prob_chunk_tokens": 1,
    "actor.kl_loss_coef": 0,
    "actor.policy_loss.ppo_kl_coef": 0,
    "actor.policy_loss.kimi15_tau": 0,
    "actor.policy_loss.tis_lower_bound": 0,
    "actor.policy_loss.topr_positive_weight": 0,
    "actor.policy_loss.topr_negative_weight": 0,
    "actor.optim.lr": 0,
    "actor.optim.weight_decay": 0,
    "actor.optim.lr_warmup_steps": -1,
    "actor.fsdp_config.wrap_policy.min_num_params": 0,
    "ref.fsdp_config.wrap_policy.min_num_params": 0,
    "critic.ppo_epochs": 1,
    "critic.ppo_max_token_len_per_gpu": 1,
    "critic.ppo_micro_batch_size_per_gpu": 1,
    "critic.forward_max_token_len_per_gpu": 1,
    "critic.forward_micro_batch_size_per_gpu": 1,
    "critic.optim.lr": 0,
    "critic.optim.weight_decay": 0,
    "critic.optim.lr_warmup_steps": -1,
    "critic.fsdp_config.wrap_policy.min_num_params": 0,
    "reward_model.forward_max_token_len_per_gpu": 1,
    "reward_model.micro_batch_size_per_gpu": 1,
    "reward_model.fsdp_config.wrap_policy.min_num_params": 0,
    "ref.log_prob_max_token_len_per_gpu": 1,
    "ref.log_prob_micro_batch_size_per_gpu": 1,
    "rollout.n": 1,
    "rollout.tensor_model_parallel_size": 1,
    "rollout.kv_cache_memory_mb": 1,
    "rollout.max_num_seqs": 1,
    "rollout.max_num_batched_tokens": 1,
    "rollout.update_weights_bucket_megabytes": 1,
    "rollout.log_prob_max_token_len_per_gpu": 1,
    "rollout.log_prob_micro_batch_size_per_gpu": 1,
    "rollout.val_kwargs.n": 1,
    "rollout.val_kwargs.temperature": 0,
    "algorithm.kl_ctrl.kl_coef": 0,
    "algorithm.kl_ctrl.horizon": 1,
    "algorithm.filter_groups.max_num_gen_batches": 1,
    "reward.overlong_buffer.len": 0,
    "reward.num_workers": 0,
    "reward.batch_size": 1,
    "reward.max_concurrent": 1,
    "reward.max_memory_mb": 1,
    "reward.remote.max_retries": 0,
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.seed": 0,
    "trainer.save_freq": -1,
    "trainer.max_actor_ckpt_to_keep": 1,
    "trainer.max_best_ckpt_to_keep": 0,
    "trainer.max_retries": 0,
    "trainer.test_freq": -1,
    "trainer.critic_warmup": 0,
    "trainer.log_val_generations": 0,
    "trainer.samples_max_mb": 0,
    "ray_kwargs.ray_init.num_cpus": 1,
    "ray_kwargs.ray_init.wait_for_nodes_s": 0,
    "ray_kwargs.ray_init.object_store_memory_mb": 80,
}
"""Smallest value of a key; null passes where the key may be null."""

POSITIVE = (
    "actor.clip_ratio",
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.loss_scale_factor",
    "actor.tau_pos",
    "actor.tau_neg",
    "actor.policy_loss.clip_cov_ratio",
    "actor.policy_loss.kl_cov_ratio",
    "actor.policy_loss.dro_beta",
    "actor.policy_loss.tis_upper_bound",
    "actor.optim.eps",
    "actor.optim.clip_grad",
    "actor.optim.num_cycles",
    "critic.cliprange_value",
    "critic.optim.eps",
    "critic.optim.clip_grad",
    "critic.optim.num_cycles",
    "rollout.gpu_memory_utilization",
    "rollout.top_p",
    "rollout.val_kwargs.top_p",
    "algorithm.kl_ctrl.target_kl",
    "algorithm.reward_clip",
    "algorithm.advantage_clip",
    "algorithm.pf_ppo.weight_pow",
    "reward.overlong_buffer.penalty_factor",
    "reward.timeout_s",
    "trainer.stall_timeout_s",
    "trainer.val_time_budget_s",
    "reward.max_rpm",
)

AT_MOST_ONE = (
    "actor.policy_loss.clip_cov_ratio",
    "actor.policy_loss.kl_cov_ratio",
    "actor.optim.lr_warmup_steps_ratio",
    "actor.optim.min_lr_ratio",
    "critic.optim.lr_warmup_steps_ratio",
    "critic.optim.min_lr_ratio",
    "rollout.gpu_memory_utilization",
    "rollout.val_kwargs.top_p",
    "algorithm.gamma",
    "algorithm.lam",
    "reward.max_error_rate",
)
NOT_NEGATIVE_SHARES = frozenset(AT_MOST_ONE) - frozenset(POSITIVE)

ALL_OR_AT_LEAST_ONE = (
    "actor.ppo_mini_batch_size",
    "critic.ppo_mini_batch_size",
    "data.train_max_samples",
    "data.val_max_samples",
    "actor.fsdp_config.fsdp_size",
    "ref.fsdp_config.fsdp_size",
    "critic.fsdp_config.fsdp_size",
    "reward_model.fsdp_config.fsdp_size",
    "rollout.val_kwargs.top_k",
)

CHOICES: dict[str, tuple[str, ...]] = {
    "data.truncation": ("error", "left", "right", "middle"),
    "actor.ratio_type": ("token", "segment"),
    "actor.optim.lr_scheduler_type": ("constant", "cosine"),
    "actor.fsdp_config.mixed_precision.param_dtype": ("auto", "fp32", "bf16"),
    "actor.fsdp_config.mixed_precision.reduce_dtype": ("fp32", "bf16"),
    "ref.fsdp_config.mixed_precision.param_dtype": ("auto", "fp32", "bf16"),
    "ref.fsdp_config.mixed_precision.reduce_dtype": ("fp32", "bf16"),
    "critic.optim.lr_scheduler_type": ("constant", "cosine"),
    "critic.fsdp_config.mixed_precision.param_dtype": ("auto", "fp32", "bf16"),
    "critic.fsdp_config.mixed_precision.reduce_dtype": ("fp32", "bf16"),
    "reward_model.fsdp_config.mixed_precision.param_dtype": ("auto", "fp32", "bf16"),
    "reward_model.fsdp_config.mixed_precision.reduce_dtype": ("fp32", "bf16"),
    "rollout.dtype": ("auto", "fp32", "bf16"),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", "reinforce"),
    "reward.custom_reward_function.style": ("sample", "batch", "trl"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.backend": ("ray", "inline"),
    "trainer.resume_mode": ("disable", "auto", "resume_path"),
    "trainer.best_ckpt_mode": ("max", "min"),
}


def validate(
    config: PPOConfig,
    *,
    slots: int | None = None,
    available: int | None = None,
    rollout_engines: Collection[str] = ROLLOUT_ENGINES,
    trackers: Collection[str] = TRACKERS,
) -> None:
    """Check a whole configuration.

    slots: devices of the whole run; null = n_gpus_per_node * nnodes. available: GPUs of this machine, or its cores
    where it runs on the CPU; null = not checked. rollout_engines, trackers: names known besides `pkg.module:object`
    (a caller above adds those registered by plug-ins).

    Raises:
        ConfigError: all problems together.
    """
    # imports torch, which printing the options does not need
    from verl_lite.checks.agentic import agentic
    from verl_lite.checks.algorithm import critic, estimator, losses, shaping
    from verl_lite.checks.correction import rollout_correction
    from verl_lite.checks.data import data
    from verl_lite.checks.model import adapter
    from verl_lite.checks.reward import rewards
    from verl_lite.checks.sampling import answers_per_prompt, filter_groups, overlong_buffer
    from verl_lite.checks.validation import validation

    trainer = config.trainer
    if slots is None and trainer.n_gpus_per_node is not None:
        slots = trainer.n_gpus_per_node * trainer.nnodes
    problems = [
        *ranges(config),
        *_batch_sizes(config),
        *_micro_batches(config),
        *adapter(config.model),
        *losses(config),
        *estimator(config),
        *shaping(config),
        *critic(config),
        *rollout_correction(config),
        *rewards(config),
        *filter_groups(config),
        *overlong_buffer(config),
        *answers_per_prompt(config),
        *agentic(config),
        *_sampling(config),
        *validation(config),
        *_engine(config, rollout_engines),
        *run(config, trackers),
        *_validation(config),
        *checkpoints(config.trainer, validates=validates(config)),
        *_slots(config, slots, available),
        *data(config),
        *_files(config),
    ]
    if problems:
        raise ConfigError(problems)


def value_of(config: Any, name: str) -> Any:
    """The value at a dotted key; None where the command has no such option."""
    return reduce(lambda section, part: getattr(section, part, None), name.split("."), config)


def ranges(config: Any) -> Problems:
    """Numbers out of their range, and words that are none of the choices; of options that a command has."""
    for name, least in AT_LEAST.items():
        value = value_of(config, name)
        if value is not None and not value >= least:
            yield f"{name}={value}: at least {least} is expected"
    for name in POSITIVE:
        value = value_of(config, name)
        if value is not None and not 0 < value < math.inf:
            yield f"{name}={value}: a number above 0 is expected"
    for name in AT_MOST_ONE:
        value = value_of(config, name)
        if value is not None and (value > 1 or (name in NOT_NEGATIVE_SHARES and not value >= 0)):
            yield f"{name}={value}: a share between 0 and 1 is expected"
    for name in ALL_OR_AT_LEAST_ONE:
        value = value_of(config, name)
        if value is not None and value != -1 and value < 1:
            yield f"{name}={value}: -1 (all) or at least 1 is expected"
    for name, choices in CHOICES.items():
        value = value_of(config, name)
        if value is not None and value not in choices:
            yield unknown_value(name, value, choices)
    for name in ("actor.optim.betas", "critic.optim.betas"):
        betas = value_of(config, name)
        if betas is not None and (len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)):
            yield f"{name}={betas}: two numbers from 0 up to but not 1 are expected, such as [0.9,0.999]"


def _batch_sizes(config: PPOConfig) -> Problems:
    if is_agentic(config):  # rows are counted there, and their number is not known before
        return
    prompts = config.data.train_batch_size
    for name in ("actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size"):
        mini = value_of(config, name)
        if mini is not None and mini > prompts:
            yield (
                f"{name}={mini} is larger than data.train_batch_size={prompts}; both count prompts, and "
                f"a mini-batch is a part of the batch: set {name} to at most {prompts}"
            )


def _micro_batches(config: PPOConfig) -> Problems:
    """Exactly the size that use_dynamic_bsz asks for, and a token budget that holds the longest sample."""
    actor, longest = config.actor, config.data.max_prompt_length + config.data.max_response_length
    critic, scorer = config.critic, config.reward_model
    roles = (
        ("actor.", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", actor),
        ("critic.", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", critic),
        ("critic.", "use_dynamic_bsz", "forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu", critic),
        ("reward_model.", "use_dynamic_bsz", "micro_batch_size_per_gpu", "forward_max_token_len_per_gpu", scorer),
        ("ref.log_prob_", "use_dynamic_bsz", "micro_batch_size_per_gpu", "max_token_len_per_gpu", config.ref),
        ("rollout.log_prob_", "use_dynamic_bsz", "micro_batch_size_per_gpu", "max_token_len_per_gpu", config.rollout),
    )
    for start, dynamic_key, size_key, budget_key, section in roles:
        leaf = start.partition(".")[2]
        dynamic, size, budget = (getattr(section, leaf + key) for key in (dynamic_key, size_key, budget_key))
        is_dynamic = actor.use_dynamic_bsz if dynamic is None else dynamic
        if is_dynamic and size is not None:
            yield (
                f"{start}{size_key}={size} has no effect with {start}{dynamic_key}=true, where {start}{budget_key} "
                f"rules: leave the size out, or set {start}{dynamic_key}=false"
            )
        # what `size` falls back to; for a critic's forward that is the size of its update
        inherited = actor.ppo_micro_batch_size_per_gpu or (start == "critic." and critic.ppo_micro_batch_size_per_gpu)
        if not is_dynamic and size is None and not inherited:
            yield (
                f"{start}{dynamic_key}=false needs {start}{size_key}, which is null: give a number of sequences, "
                f"or set {start}{dynamic_key}=true"
            )
        if is_dynamic and budget is not None and budget < longest:
            yield (
                f"{start}{budget_key}={budget} cannot hold one sample of data.max_prompt_length + "
                f"data.max_response_length = {longest} tokens: set at least {longest}"
            )


def _sampling(config: PPOConfig) -> Problems:
    rollout = config.rollout
    if not rollout.temperature > 0:
        yield (
            f"rollout.temperature={rollout.temperature}: training has to sample, so a number above 0 is expected "
            "(1.0 as a rule); greedy decoding belongs to rollout.val_kwargs"
        )
    for name, value, whole in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, -1)):
        if value != whole:
            yield (
                f"rollout.{name}={value}: samples from a truncated distribution have other probabilities than the "
                f"trainer computes, and the ratio of the loss would be wrong: set rollout.{name}={whole:g}; "
                f"rollout.val_kwargs.{name} is free"
            )


def _engine(config: PPOConfig, engines: Collection[str]) -> Problems:
    rollout, data = config.rollout, config.data
    if ":" not in rollout.name and rollout.name not in engines:
        yield unknown_value("rollout.name", rollout.name, engines) + "; or pkg.module:Class"
    if rollout.name == "hf" and rollout.tensor_model_parallel_size > 1:
        yield (
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: the hf engine runs on one "
            "device; set it to 1, or rollout.name=vllm"
        )
    longest = data.max_prompt_length + data.max_response_length
    context = longest if rollout.max_model_len is None else rollout.max_model_len
    if context < longest:
        yield (
            f"rollout.max_model_len={context} is shorter than data.max_prompt_length + data.max_response_length = "
            f"{longest}: set at least {longest}, or null"
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < context:
        yield (
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is shorter than the context of {context} "
            f"tokens, and rollout.enable_chunked_prefill=false forbids to split a prompt: set at least {context}"
        )
    for name, entries in rollout.engine_kwargs.items():
        if name not in (*engines, *FOREIGN_ENGINES) or not isinstance(entries, dict):
            yield (
                f"rollout.engine_kwargs.{name}={entries}: arguments stand below an engine's name, such as "
                "rollout.engine_kwargs.vllm.KEY=VALUE"
            )


def _validation(config: PPOConfig) -> Problems:
    trainer = config.trainer
    if not validates(config) and (trainer.val_only or trainer.test_freq > 0):
        asked = "val_only=true" if trainer.val_only else f"test_freq={trainer.test_freq}"
        source = "agentic.val_env_manager.tags" if is_agentic(config) else "data.val_files"
        yield f"trainer.{asked} needs {source}, which is empty"


def _slots(config: PPOConfig, count: int | None, available: int | None) -> Problems:
    """Devices (on a CPU: worker slots) against the machine, the engine and the backend."""
    yield from slots(config, count, available)
    trainer, tensor_parallel = config.trainer, config.rollout.tensor_model_parallel_size
    if count is None or trainer.nnodes < 1 or count < 1:
        return
    here = count // trainer.nnodes
    if tensor_parallel > 0 and here % tensor_parallel != 0:
        yield (
            f"rollout.tensor_model_parallel_size={tensor_parallel} does not divide trainer.n_gpus_per_node={here}: "
            f"an engine takes whole devices of one machine; use one of {divisors(here)}"
        )
    for role in ("actor", "ref", "critic", "reward_model"):
        name = f"{role}.fsdp_config.fsdp_size"
        yield from group_size(name, value_of(config, name), count)


def _files(config: PPOConfig) -> Problems:
    if config.model.path is None:
        yield "model.path is null: give a Hugging Face folder or a cached hub name, or recipe=quickstart for both"
    else:
        yield from _model_folder("model.path", config.model.path, "config.json")
    if config.reward_model.model.path is not None:
        for marker in ("config.json", "tokenizer_config.json"):
            yield from _model_folder("reward_model.model.path", config.reward_model.model.path, marker)
    if config.critic.model.path is not None:
        yield from _model_folder("critic.model.path", config.critic.model.path, "config.json")
    if config.model.tokenizer_path is not None:
        yield from _model_folder("model.tokenizer_path", config.model.tokenizer_path, "tokenizer_config.json")
    reward = config.reward.custom_reward_function.path
    if reward is not None and not reward.startswith("pkg://") and not Path(reward).is_file():
        yield (
            f"reward.custom_reward_function.path={reward}: there is no file {Path(reward).absolute()} "
            "(a module is given as pkg://package.module)"
        )


def _model_folder(name: str, value: str, marker: str) -> Problems:
    """A folder with `marker` in it, or a hub name; without network a hub name has to be in the cache."""
    folder = Path(value)
    if folder.is_dir():
        if not (folder / marker).is_file():
            yield f"{name}={value}: the folder {folder.absolute()} has no {marker}, so it is not a Hugging Face folder"
        return
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", value):
        yield f"{name}={value}: there is no folder {folder.absolute()}"
        return
    if os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0"):
        return
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return
    if not isinstance(try_to_load_from_cache(value, marker), str):
        yield (
            f"{name}={value}: there is neither a folder {folder.absolute()} nor a model of that name in the Hugging "
            f"Face cache, and HF_HUB_OFFLINE is set: fetch it first with `hf download {value}`"
        )
