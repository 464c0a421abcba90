"""The rows for the sections that all commands share, and for supervised training."""

from verl_lite.config.idle_options.conditions import (
    batch_exceeds_rows,
    beside_is_not,
    if_config,
    is_on_cpu,
    is_on_one_device,
    sets_warmup_steps,
    unless,
)
from verl_lite.config.idle_options.table import IdleOption

LEAVE_OUT = "leave it out"

SHARED_ROWS: tuple[IdleOption, ...] = (
    IdleOption(
        ("*.optim.muon_momentum",),
        beside_is_not("optimizer", "muon"),
        "the optimizer is adamw",
        "set optimizer=muon in the same section, or leave it out",
    ),
    IdleOption(
        ("*.optim.min_lr_ratio", "*.optim.num_cycles"),
        beside_is_not("lr_scheduler_type", "cosine"),
        "the learning rate is constant",
        "set lr_scheduler_type=cosine in the same section, or leave it out",
    ),
    IdleOption(
        ("*.optim.lr_warmup_steps_ratio",),
        sets_warmup_steps,
        "lr_warmup_steps of the same section sets the warm-up",
        "set one of them",
    ),
    IdleOption(
        ("*.fsdp_config.param_offload", "*.fsdp_config.optimizer_offload"),
        is_on_cpu,
        "the workers run on the CPU, whose memory is the host's",
        LEAVE_OUT,
    ),
    IdleOption(
        ("*.fsdp_config.fsdp_size", "*.fsdp_config.reshard_after_forward", "trainer.balance_batch"),
        is_on_one_device,
        "the run has one device",
        "set trainer.n_gpus_per_node, or leave it out",
    ),
    IdleOption(
        ("trainer.total_epochs",),
        lambda situation, key: bool(situation.value("trainer.total_training_steps")),
        "trainer.total_training_steps sets the length of the run",
        "set one of them",
    ),
    IdleOption(
        ("trainer.max_actor_ckpt_to_keep", "trainer.async_save"),
        if_config(lambda config: config.trainer.save_freq == 0),
        "trainer.save_freq=0 saves no checkpoint",
        "set trainer.save_freq=-1 or more, or leave it out",
    ),
    IdleOption(
        ("trainer.resume_allow",),
        if_config(lambda config: config.trainer.resume_mode == "disable"),
        "trainer.resume_mode=disable resumes no run",
        "set trainer.resume_mode=auto, or leave it out",
    ),
    IdleOption(
        ("trainer.share_devices", "trainer.deterministic"),
        is_on_cpu,
        "the workers run on the CPU",
        "set trainer.device=cuda, or leave it out",
    ),
    IdleOption(
        ("trainer.max_retries", "trainer.stall_timeout_s", "ray_kwargs."),
        if_config(lambda config: config.trainer.backend == "inline"),
        "trainer.backend=inline runs in one process, without Ray",
        "set trainer.backend=ray, or leave it out",
    ),
    IdleOption(
        ("ray_kwargs.ray_init.num_cpus", "ray_kwargs.ray_init.object_store_memory_mb"),
        lambda situation, key: bool(situation.value("ray_kwargs.ray_init.address")),
        "the run joins the cluster of ray_kwargs.ray_init.address",
        "set it where that cluster is started",
    ),
    IdleOption(
        ("*.gradient_checkpointing_layers",),
        beside_is_not("enable_gradient_checkpointing", True),
        "enable_gradient_checkpointing=false recomputes nothing",
        "set enable_gradient_checkpointing=true in the same section, or leave it out",
    ),
    IdleOption(
        ("model.lora_alpha", "model.target_modules", "model.exclude_modules"),
        lambda situation, key: situation.value("model.lora_rank") == 0,
        "model.lora_rank=0 trains all weights, without an adapter",
        "set model.lora_rank, or leave it out",
    ),
)
"""Rows for the sections that all commands share."""

SUPERVISED_ROWS: tuple[IdleOption, ...] = (
    IdleOption(
        ("data.train_batch_size",),
        batch_exceeds_rows,
        "the data have fewer training rows, so that a step trains on all of them",
        "set data.train_batch_size to at most the number of rows",
    ),
    IdleOption(
        ("trainer.test_freq",),
        unless("data.val_files"),
        "data.val_files is empty",
        "set data.val_files, or leave it out",
    ),
)

SFT_ROWS: tuple[IdleOption, ...] = (
    IdleOption(
        ("data.chosen_key", "data.rejected_key"),
        if_config(lambda config: config.loss != "dpo"),
        "only loss=dpo reads pairs of answers",
        "set loss=dpo, or leave it out",
    ),
    IdleOption(
        ("data.response_key",),
        if_config(lambda config: config.loss == "dpo"),
        "loss=dpo reads data.chosen_key and data.rejected_key",
        "set these, or leave it out",
    ),
)
