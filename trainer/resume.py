"""Whether a run may continue from a checkpoint: the same data, the same model, the same algorithm.

A checkpoint keeps the whole configuration it was made with. What decides the result must not have changed since,
unless the user names the key in `trainer.resume_allow`; what decides only speed, places and reports may.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import find_checkpoint, read_state
from trainer.cli import NOTHING_LEFT
from verl_lite.config import RunConfig, RunOptions
from verl_lite.errors import UserError

# `model.tokenizer_path`: the data's fingerprint tells if the tokens are others
FREE = tuple(
    """
    recipe ray_kwargs. trainer. rollout.val_kwargs. agentic.val_env_manager. agentic.env_pool.
    data.val_files data.val_batch_size data.val_max_samples data.filter_overlong_prompts_workers
    model.tokenizer_path model.enable_gradient_checkpointing model.checkpoint_steps model.checkpoint_decode
    model.offload_frozen model.use_remove_padding
    algorithm.filter_groups.max_num_gen_batches
    reward.num_workers reward.max_concurrent reward.max_rpm reward.timeout_s reward.max_memory_mb reward.max_error_rate
    reward.overlong_buffer.log reward.remote.max_retries reward.remote.api_key_env
    agentic.val_batch_size agentic.logging_steps
    rollout.calculate_log_probs rollout.enforce_eager rollout.free_cache_engine rollout.gpu_memory_utilization
    rollout.kv_cache_memory_mb rollout.max_num_seqs rollout.tensor_model_parallel_size rollout.max_num_batched_tokens
    rollout.update_weights_bucket_megabytes
    """.split()
)
"""Keys, and beginnings of keys, that may differ: results do not depend on them."""

FREE_LEAVES = tuple(
    """
    use_dynamic_bsz max_token_len_per_gpu micro_batch_size_per_gpu log_prob_chunk_tokens param_offload
    optimizer_offload reshard_after_forward reduce_every_micro_batch fsdp_size min_num_params calculate_entropy
    """.split()
)
"""The same by how a key ends: how the work is cut, and where it waits."""

BOUND = ("trainer.seed", "trainer.critic_warmup")
"""Keys that must not differ although their section may."""


def flat_config(config: Any) -> dict[str, Any]:
    """A configuration as dotted keys and plain values; free dictionaries stay whole."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        inner = {f".{name}": each for name, each in flat_config(value).items()} if is_dataclass(value) else {"": value}
        flat |= {f"{field.name}{name}": each for name, each in inner.items()}
    return flat


def is_bound(name: str, config: RunOptions) -> bool:
    """Whether a key decides the result. The length of the run does where the learning rate's schedule depends on it."""
    if name not in ("trainer.total_training_steps", "trainer.total_epochs"):
        return name in BOUND or not (name.startswith(FREE) or name.endswith(FREE_LEAVES))
    flat = flat_config(config)
    return any(
        flat[key] != "constant" or (flat[f"{optim}lr_warmup_steps"] < 0 and flat[f"{optim}lr_warmup_steps_ratio"] > 0)
        for key in flat
        if (optim := key.removesuffix("lr_scheduler_type")) != key
    )


def differing_keys(saved: Mapping[str, Any], config: RunOptions) -> list[str]:
    """One sentence for each key that decides the result, is not what it was, and is not in trainer.resume_allow.

    A key that the checkpoint's version did not have counts with its default; one that is gone counts as differing.
    """
    now, allowed = flat_config(config), config.trainer.resume_allow
    before = flat_config(type(config)()) | dict(saved)
    names = sorted(name for name in {*before, *now} if is_bound(name, config) and name not in allowed)
    values = ((name, before[name], now.get(name, "(no such key)")) for name in names)
    return [f"{name}: {old} in the checkpoint, {new} now" for name, old, new in values if old != new]


def refuse_another_run(config: RunOptions, run_dir: Path, total_steps: int, to_look: str) -> None:
    """Raises UserError if `trainer.resume_mode` finds a checkpoint that was made with another configuration, or one
    after which no step is left to do. to_look: how a user looks at a run that has no step left."""
    folder = find_checkpoint(run_dir, config.trainer.resume_mode, config.trainer.resume_from_path)
    if folder is None:
        return
    state = read_state(folder)
    if differing := differing_keys(state["config"], config):
        raise UserError(
            f"{folder} was made with another configuration:\n  " + "\n  ".join(differing) + "\nGive the old values; or "
            "start anew with trainer.resume_mode=disable; or, if the change is meant, name the keys: "
            f"trainer.resume_allow=[{','.join(line.split(':')[0] for line in differing)}]"
        )
    done = state["steps"]["global_step"]
    if done >= total_steps:
        raise UserError(
            f"{folder} is at step {done} of {total_steps}: {NOTHING_LEFT}. For more steps raise "
            f"trainer.total_training_steps (or trainer.total_epochs); to look at it, {to_look}"
        )


def refuse_other_data(trainer: RunConfig, run_dir: Path, dataset: str) -> None:
    """Raises UserError if the run continues from a checkpoint that was made with other data, unless the user allows it.
    dataset: its fingerprint; see `steps.EpochSteps`."""
    if {"data.train_files", "data.train_max_samples"} & set(trainer.resume_allow):
        return
    folder = find_checkpoint(run_dir, trainer.resume_mode, trainer.resume_from_path)
    before = dataset if folder is None else read_state(folder)["steps"].get("dataset", dataset)
    if before != dataset:
        raise UserError(
            f"The data is not that of {folder}: its fingerprint is {dataset}, that of the checkpoint {before}. "
            "Resume with the same data.train_files; or, if the change is meant, with "
            "trainer.resume_allow=[data.train_files]"
        )
