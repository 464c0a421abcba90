"""Whether options fit each other, the machine and the files, checked before anything heavy starts.

Takes a `PPOConfig` (and what the machine has); gives one `ConfigError` with every problem found, each naming key,
value, what was expected and what to change. Types and unknown keys are `loader`'s part. A check stands here
only if its failure would otherwise come late, or silently: a setting that would have no effect counts as a failure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from verl_lite.config.checks.checkpoint import checkpoints
from verl_lite.config.checks.run import TRACKERS, divisors, group_size, run, slots
from verl_lite.config.checks.values import Problems, python_file, value_of
from verl_lite.config.keys import ConfigError, schema_of, unknown_value
from verl_lite.config.ppo import PPOConfig

ROLLOUT_ENGINES = ("auto", "vllm", "hf")
FOREIGN_ENGINES = ("sglang", "trtllm")
"""Engines of verl whose `engine_kwargs` may stand in a configuration without being used."""


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
    from verl_lite.config.checks.agentic import agentic
    from verl_lite.config.checks.algorithm import critic, estimator, losses, shaping
    from verl_lite.config.checks.correction import rollout_correction
    from verl_lite.config.checks.data import data
    from verl_lite.config.checks.model import adapter
    from verl_lite.config.checks.reward import rewards
    from verl_lite.config.checks.sampling import answers_per_prompt, filter_groups, overlong_buffer
    from verl_lite.config.checks.validation import validation

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
        *checkpoints(config.trainer, validates=config.validates),
        *_slots(config, slots, available),
        *data(config),
        *_files(config),
    ]
    if problems:
        raise ConfigError(problems)


def ranges(config: Any) -> Problems:
    """Numbers out of their range, and words that are none of the choices, of the options of any command."""
    for name, key in schema_of(type(config)).keys.items():
        value = value_of(config, name)
        if value is None or key.expects is None:
            continue
        if isinstance(key.expects, tuple):
            if value not in key.expects:
                yield unknown_value(name, value, key.expects) + ("; or null" if key.optional else "")
        elif not key.expects.holds(value):
            yield f"{name}={value}: {key.expects.words}"


def _batch_sizes(config: PPOConfig) -> Problems:
    if config.is_agentic:  # rows are counted there, and their number is not known before
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
    for name, marker in (
        ("model.path", "config.json"),
        ("model.tokenizer_path", "tokenizer_config.json"),
        ("reward_model.model.path", "config.json"),
        ("reward_model.model.path", "tokenizer_config.json"),
        ("critic.model.path", "config.json"),
    ):
        if value_of(config, name) is not None:
            yield from _model_folder(name, value_of(config, name), marker)
    yield from python_file("reward.custom_reward_function.path", config.reward.custom_reward_function.path)


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
