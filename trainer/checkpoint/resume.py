"""Checks that a run may continue from a checkpoint: data, model and algorithm must be the same.

A checkpoint contains the configuration of its run. Keys that affect the result must not have changed since, unless the
user names them in `trainer.resume_allow`. Keys that affect only speed, file locations and reports may change.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.files import find_checkpoint, read_state
from trainer.cli import NOTHING_LEFT
from verl_lite.config import RunConfig, RunOptions
from verl_lite.errors import FinishedRunError, UserError

# model.tokenizer_path is free because the fingerprint of the data changes if the tokens change
FREE = tuple(
    """
    recipe ray_kwargs. trainer. rollout.val_kwargs. agentic.val_env_manager. agentic.env_pool.
    data.val_files data.val_batch_size data.val_max_samples data.filter_overlong_prompts_workers
    model.tokenizer_path model.enable_gradient_checkpointing model.checkpoint_steps model.checkpoint_decode
    model.offload_frozen model.use_remove_padding
    algorithm.filter_groups.max_num_gen_batches
    reward.num_workers reward.max_concurrent reward.max_rpm reward.timeout_s reward.max_error_rate
    reward.overlong_buffer.log reward.remote.max_retries reward.remote.api_key_env
    agentic.val_batch_size agentic.logging_steps
    rollout.calculate_log_probs rollout.enforce_eager rollout.free_cache_engine rollout.gpu_memory_utilization
    rollout.kv_cache_memory_mb rollout.max_num_seqs rollout.tensor_model_parallel_size rollout.max_num_batched_tokens
    rollout.update_weights_bucket_megabytes rollout.lora_sync hybrid_engine rollout.nnodes rollout.n_gpus_per_node
    """.split()
)
"""Keys and prefixes of keys that may differ, because results do not depend on them."""

FREE_LEAVES = tuple(
    """
    use_dynamic_bsz max_token_len_per_gpu micro_batch_size_per_gpu log_prob_chunk_tokens param_offload
    optimizer_offload reshard_after_forward reduce_every_micro_batch fsdp_size min_num_params calculate_entropy
    gradient_checkpointing_layers enable_activation_offload
    """.split()
)
"""Suffixes of keys that may differ: they set how the work is divided and where tensors are kept."""

BOUND = ("trainer.seed", "trainer.critic_warmup")
"""Keys that must not differ although their section is in FREE."""


def flat_config(config: Any) -> dict[str, Any]:
    """Flattens a configuration to a dictionary of dotted keys and plain values.

    Values that are dictionaries stay whole.
    """
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            for name, inner_value in flat_config(value).items():
                flat[f"{field.name}.{name}"] = inner_value
        else:
            flat[field.name] = value
    return flat


def is_bound(name: str, config: RunOptions) -> bool:
    """Returns True if results depend on the key.

    They depend on the length of the run only if a learning rate schedule does.
    """
    if name not in ("trainer.total_training_steps", "trainer.total_epochs"):
        is_free = name.startswith(FREE) or name.endswith(FREE_LEAVES)
        return name in BOUND or not is_free

    # a schedule after the warm-up, or a warm-up whose length is a share of all steps, of any optimizer of the run
    flat = flat_config(config)
    for key, schedule in flat.items():
        if not key.endswith("lr_scheduler_type"):
            continue
        optim = key.removesuffix("lr_scheduler_type")
        has_relative_warmup = flat[f"{optim}lr_warmup_steps"] < 0 and flat[f"{optim}lr_warmup_steps_ratio"] > 0
        if schedule != "constant" or has_relative_warmup:
            return True
    return False


def differing_keys(saved: Mapping[str, object], config: RunOptions) -> list[str]:
    """Returns one sentence for each changed key that affects the result and is not in trainer.resume_allow.

    A key that is missing in the checkpoint, because it is newer, counts with its default. A key of the checkpoint that
    no longer exists counts as changed.
    """
    now = flat_config(config)
    defaults = flat_config(type(config)())
    before = defaults | dict(saved)
    # checkpoints of version 0.1 say auto if auto chose vllm
    if before.get("rollout.name") == "auto" and now.get("rollout.name") != "auto":
        before["rollout.name"] = "vllm"

    differing = []
    for name in sorted({*before, *now}):
        if name in config.trainer.resume_allow or not is_bound(name, config):
            continue
        old_value = before[name]
        new_value = now.get(name, "(no such key)")
        if old_value != new_value:
            differing.append(f"{name}: {old_value} in the checkpoint, {new_value} now")
    return differing


def refuse_another_run(config: RunOptions, run_dir: Path, total_steps: int, to_look: str) -> None:
    """Checks that the run may continue from the checkpoint that `trainer.resume_mode` finds.

    Args:
        config: configuration of the run.
        run_dir: the run folder.
        total_steps: number of steps of the whole run.
        to_look: for the message, how a user can look at a finished run.

    Raises:
        UserError: if the checkpoint is of another configuration.
        FinishedRunError: if no steps remain.
    """
    folder = find_checkpoint(run_dir, config.trainer.resume_mode, config.trainer.resume_from_path)
    if folder is None:
        return
    state = read_state(folder)
    differing = differing_keys(state["config"], config)
    if differing:
        keys = [line.split(":")[0] for line in differing]
        raise UserError(
            f"{folder} was made with another configuration:\n  " + "\n  ".join(differing) + "\nRestore the old values, "
            "start from the beginning with trainer.resume_mode=disable, or, if the change is intended, name the keys: "
            f"trainer.resume_allow=[{','.join(keys)}]"
        )

    done = state["steps"]["global_step"]
    if done >= total_steps:
        raise FinishedRunError(
            f"{folder} is at step {done} of {total_steps}: {NOTHING_LEFT}. For more steps raise "
            f"trainer.total_training_steps (or trainer.total_epochs); to look at it, {to_look}"
        )


def profile_folder(run_dir: Path, step: int) -> Path:
    """Returns the folder of the profiles of a step."""
    return run_dir / "profile" / f"step_{step}"


def refuse_missed_profiles(trainer: RunConfig, run_dir: Path, total_steps: int) -> None:
    """Raises UserError if trainer.profile_steps has a step that the run does not reach, or passed without a profile."""
    folder = find_checkpoint(run_dir, trainer.resume_mode, trainer.resume_from_path)
    done = 0
    if folder is not None:
        done = read_state(folder)["steps"]["global_step"]
    missed = []
    for step in trainer.profile_steps:
        is_ahead = done < step <= total_steps
        # the command of a stopped run is repeated with its options, so a step that has its profile is no mistake
        if not is_ahead and not profile_folder(run_dir, step).is_dir():
            missed.append(step)
    if missed:
        raise UserError(
            f"trainer.profile_steps={trainer.profile_steps}: this run has steps {done + 1} to {total_steps}, so "
            f"{missed} never occur: choose other steps, or set trainer.profile_steps=[]"
        )


def refuse_other_data(trainer: RunConfig, run_dir: Path, dataset: str) -> None:
    """Checks that the run continues with the data of its checkpoint.

    Args:
        trainer: options of the run; data may differ if `resume_allow` has data.train_files or data.train_max_samples.
        run_dir: the run folder.
        dataset: fingerprint of the data, see `EpochSteps`.

    Raises:
        UserError: if the data differ.
    """
    if {"data.train_files", "data.train_max_samples"} & set(trainer.resume_allow):
        return
    folder = find_checkpoint(run_dir, trainer.resume_mode, trainer.resume_from_path)
    if folder is None:
        return
    # a checkpoint without a fingerprint is accepted
    before = read_state(folder)["steps"].get("dataset", dataset)
    # checkpoints of version 0.2.0 and earlier of supervised training have only the number of rows
    number_of_rows = dataset.partition(",")[0]
    if before not in (dataset, number_of_rows):
        raise UserError(
            f"The data is not that of {folder}: its fingerprint is {dataset}, that of the checkpoint {before}. It "
            "changes with the rows, the tokenizer, and the chat template, also with one that writes the date of today. "
            "Resume with the same data.train_files and the same template or, if the change is intended, with "
            "trainer.resume_allow=[data.train_files]"
        )
