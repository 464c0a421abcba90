"""What becomes of verl's own keys: kept, renamed, without effect here (and why), or refused (and why).

Takes a key and a value as a verl script or YAML spells them, without the prefix `actor_rollout_ref.`; gives a
`Verdict`. The whole table is data, made of the kinds of lines in `rules`: when verl_lite gains an option of
the same name in `config.py`, its line goes (a test says so). A key that ignoring would leave the results unchanged is
accepted with a sentence; one that would change them is refused at any value but verl's default.
"""

from __future__ import annotations

from typing import Any

from verl_lite.config.roll_keys import ROLL_RULES
from verl_lite.config.rules import Means, NoEffect, Only, Renamed, Rule, SameAs, Verdict, apply_rule

PREFIX = "actor_rollout_ref"

_COMPILED = NoEffect("a matter of speed in verl; nothing is compiled here")
_CHUNKED = NoEffect("log-probs and entropy are always computed in chunks; actor.log_prob_chunk_tokens is their size")
_PROFILER = NoEffect("there is no profiler switch; timing_s/* is logged at every step")
_MANAGER = Only(
    ("naive", "dapo", "rate_limited", "remote"),
    "rewards run in processes of their own, with the limits of reward.*; reward.overlong_buffer is DAPO's penalty",
    "naive, dapo, rate_limited and remote are the managers that have an equal here; for batch, set "
    "reward.custom_reward_function.style=batch",
)
_TOKEN_RATE = Only((), "", "only the calls per minute are limited, by reward.max_rpm")
_CHECKPOINT = NoEffect("a checkpoint always holds model, optimizer and scheduler; export writes a HF folder")
_TEXT_ONLY = NoEffect("only text models are trained here")
_GLOBAL_MICRO = NoEffect(
    "it counts over all devices, and results do not depend on it; "
    "micro-batches follow the token budget, or the key of the same name with _per_gpu"
)
_ULYSSES = Only((1,), "no sequence parallelism is used", "sequence parallelism (Ulysses) is not here; leave it at 1")
_STRATEGY = Only(("fsdp", "fsdp2"), "FSDP2 is always used", "the only training engine here is FSDP2")
_SHARED_DEVICES = Only(
    (False,), "the reward model shares the devices of the trainer", "separate devices for the reward model are not here"
)
_MEGATRON = Only((), "", "Megatron is not here; the training engine is FSDP2 (actor.fsdp_config.*)")
_CORRECTION = "algorithm.rollout_correction"
_VETO = Only(
    (), "", f"a veto by token is {_CORRECTION}.rollout_rs=seq_max_k2 with rollout_rs_threshold=log(veto)^2 / 2"
)
_IS_BOUNDS = Only((), "", f"both bounds are {_CORRECTION}.rollout_is_threshold=low_high")
_TOOLS = (
    "tools are called in episodes (recipe=agentic_..., trainer/AGENTIC.md); those that a prompt only shows are a list "
    "of schemas in data.tools_path"
)
_MULTI_TURN = "multi-turn rollout is not here yet"
_RESPONSE_LENGTH = SameAs("data.max_response_length", "data.max_response_length is the length that the penalty reads")
_WHOLE = "an adapter (LoRA) is for the policy alone; this model has none"
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
_WEIGHTS_FROM_TRAINER = NoEffect("the engine starts with dummy weights and always gets them from the trainer")


def _below(section: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    """The rules of the keys of one section."""
    return {f"{section}.{name}": rule for name, rule in rules.items()}


def _fsdp_rules(section: str, spelt: str | None = None) -> dict[str, Rule]:
    """The rules of one `fsdp_config` section; verl repeats it for actor, reference and critic.

    spelt: another name of the section in verl; what is not in these rules has the same name below `section`.
    """
    rules: dict[str, Rule] = {
        "grad_offload": NoEffect("gradients live only inside the update"),
        "offload_policy": NoEffect("param_offload and optimizer_offload say what is offloaded here"),
        "forward_prefetch": _COMPILED,
        "use_orig_params": NoEffect("a switch of FSDP1; FSDP2 always keeps the original parameters"),
        "model_dtype": Only(
            ("fp32", "float32"),
            "weights are always held in fp32",
            "weights are always held in fp32; mixed_precision.param_dtype is the dtype of computation",
        ),
        "dtype": Renamed(f"{section}.mixed_precision.param_dtype", _DTYPES),
        "mixed_precision.buffer_dtype": NoEffect("buffers are kept as the model has them"),
        "wrap_policy.transformer_layer_cls_to_wrap": NoEffect("the layers of the model are found without being named"),
        "ulysses_sequence_parallel_size": _ULYSSES,
        "entropy_from_logits_with_chunking": _CHUNKED,
        "entropy_checkpointing": _CHUNKED,
        "use_torch_compile": _COMPILED,
        "full_determinism": NoEffect("the whole run is seeded by trainer.seed"),
        "seed": NoEffect("trainer.seed is the root of every random number"),
        "forward_only": NoEffect("roles know whether they train"),
        "strategy": _STRATEGY,
        "qat": Only((False,), "no quantisation-aware training is used", "quantisation-aware training is not here"),
    }
    renamed: dict[str, Rule] = {spelt: Renamed(section)} if spelt else {}
    return renamed | _below(spelt or section, rules)


def _optim_rules(section: str) -> dict[str, Rule]:
    """The rules of an optimizer's section."""
    return {
        f"{section}.warmup_style": Renamed(f"{section}.lr_scheduler_type"),
        f"{section}.total_training_steps": NoEffect("the scheduler is told the number of steps by the trainer"),
        f"{section}.optimizer": Only(("AdamW",), "AdamW is always used", "the only optimizer here is AdamW"),
        f"{section}.optimizer_impl": Only(("torch.optim",), "torch.optim is always used", "only torch.optim is used"),
        f"{section}.override_optimizer_config": Only(({},), "", f"set betas, eps and weight_decay under {section}"),
    }


_DATA: dict[str, Rule] = {
    "data.tokenizer": Renamed("model.tokenizer_path"),
    "data.trust_remote_code": Renamed("model.trust_remote_code"),
    "data.use_shm": NoEffect("files are read where they lie"),
    "data.reward_fn_key": Renamed("data.columns.data_source", {"data_source": None}),
    "data.return_raw_input_ids": NoEffect("verl does not read it either"),
    "data.return_raw_chat": NoEffect("the chat always travels with the batch, as raw_prompt"),
    "data.return_full_prompt": NoEffect("the chat always travels with the batch, as raw_prompt"),
    "data.dataloader_num_workers": NoEffect("prompts are read in the driver, which costs nothing beside a step"),
    "data.validation_shuffle": NoEffect("validation averages over the set, so its order has no meaning"),
    "data.image_key": _TEXT_ONLY,
    "data.video_key": _TEXT_ONLY,
    "data.audio_key": _TEXT_ONLY,
    "data.image_patch_size": _TEXT_ONLY,
    "data.return_multi_modal_inputs": _TEXT_ONLY,
    "data.mm_processor_kwargs": _TEXT_ONLY,
    "data.datagen": Only((), "", "data generation during training is not here"),
    "data.gen_batch_size": NoEffect(
        "a step begins with data.train_batch_size prompts, and algorithm.filter_groups asks for as many more as are "
        "likely to be needed"
    ),
    "data.tool_config_path": Only((), "", _TOOLS),
    "data.function_tool_path": Only((), "", _TOOLS),
}

_MODEL: dict[str, Rule] = {
    "model.use_shm": NoEffect("files are read where they lie"),
    "model.external_lib": Only((), "", "import your code from a recipe instead"),
    "model.custom_chat_template": Only((), "", "put the template into the tokenizer's folder (model.tokenizer_path)"),
    "model.hf_config_path": Only((), "", "the config comes from model.path; model.override_config changes entries"),
    "model.enable_activation_offload": NoEffect("activations are recomputed, not moved; it is a matter of memory only"),
    "model.lora_adapter_path": Only((), "", "an adapter starts at zero here; merge yours into the model of model.path"),
    "model.lora.rank": Only((0,), "model.lora_rank is read", "say model.lora_rank, and model.lora_alpha with it"),
    "model.lora": NoEffect("model.lora_rank, lora_alpha, target_modules and exclude_modules are read"),
    "model.use_liger": NoEffect("fused kernels change speed only, and none are used"),
    "model.use_fused_kernels": _CHUNKED,
    "model.fused_kernel_options": _CHUNKED,
    "model.tiled_mlp": NoEffect("a matter of memory only"),
    "model.mtp.enable": Only((False,), "no multi-token prediction is used", "multi-token prediction is not here"),
    "model.mtp": NoEffect("no multi-token prediction is used"),
    "model.use_prefix_grouper": NoEffect("a matter of speed only"),
}

_NO_ADAPTER: dict[str, Rule] = {
    "model.lora_rank": Only((0,), _WHOLE, _WHOLE),
    "model.lora_alpha": NoEffect(_WHOLE),
    "model.target_modules": NoEffect(_WHOLE),
    "model.exclude_modules": NoEffect(_WHOLE),
}

_ROLE: dict[str, Rule] = {
    "strategy": _STRATEGY,
    "ulysses_sequence_parallel_size": _ULYSSES,
    "rollout_n": NoEffect("rollout.n is the only place"),
    "load_weight": NoEffect("weights are always loaded"),
    "megatron": _MEGATRON,
    "veomni": _MEGATRON,
    "profiler": _PROFILER,
}
"""What verl repeats below actor, critic and ref."""

_TRAINED: dict[str, Rule] = {
    "data_loader_seed": NoEffect("trainer.seed is the root of every random number"),
    "engine": NoEffect("FSDP2 is always used"),
    "checkpoint": _CHECKPOINT,
}
"""Below actor and critic."""

_LOG_PROBS: dict[str, Rule] = {
    "use_torch_compile": _COMPILED,
    "use_fused_kernels": _CHUNKED,
    "entropy_from_logits_with_chunking": _CHUNKED,
    "entropy_checkpointing": _CHUNKED,
}
"""Below actor and ref."""


_ACTOR: dict[str, Rule] = {
    **_below("actor", _ROLE | _TRAINED | _LOG_PROBS),
    "actor.grad_clip": Renamed("actor.optim.clip_grad"),
    "actor.use_remove_padding": Renamed("model.use_remove_padding"),
    "actor.ppo_micro_batch_size": _GLOBAL_MICRO,
    "actor.calculate_sum_pi_squared": NoEffect("it is computed where algorithm.adv_estimator reads it"),
    "actor.sum_pi_squared_checkpointing": NoEffect("it is computed without gradient, in chunks"),
    "actor.use_prefix_grouper": NoEffect("a matter of speed only"),
    "actor.use_rollout_log_probs": Renamed(f"{_CORRECTION}.bypass_mode"),
    "actor.tis_imp_ratio_cap": Renamed(
        f"{_CORRECTION}.rollout_is_threshold", {-1: None, 0: None}, also={f"{_CORRECTION}.rollout_is": "token"}
    ),
    "actor.freeze_vision_tower": _TEXT_ONLY,
    "actor.policy_loss.rollout_correction": Renamed(_CORRECTION),
    "actor.router_replay.mode": Only(("disabled",), "no router replay is used", "router replay is not here"),
    "actor.router_replay": NoEffect("no router replay is used"),
    "actor.qat": Only((False,), "no quantisation-aware training is used", "quantisation-aware training is not here"),
    **_optim_rules("actor.optim"),
    **_fsdp_rules("actor.fsdp_config"),
}

_CRITIC: dict[str, Rule] = {
    **_below("critic", _ROLE | _TRAINED | _MODEL | _NO_ADAPTER),
    "critic.enable": NoEffect("there is a critic exactly where algorithm.adv_estimator needs values"),
    "critic.grad_clip": Renamed("critic.optim.clip_grad"),
    "critic.model.tokenizer_path": NoEffect("the critic reads the policy's tokens; nothing is encoded anew"),
    "critic.ppo_micro_batch_size": _GLOBAL_MICRO,
    "critic.forward_micro_batch_size": _GLOBAL_MICRO,
    "critic.ppo_infer_micro_batch_size_per_gpu": Renamed("critic.forward_micro_batch_size_per_gpu"),
    "critic.ppo_infer_max_token_len_per_gpu": Renamed("critic.forward_max_token_len_per_gpu"),
    "critic.nccl_timeout": NoEffect("verl does not read it either"),
    **_optim_rules("critic.optim"),
    **_fsdp_rules("critic.fsdp_config"),
    **_fsdp_rules("critic.fsdp_config", spelt="critic.fsdp"),
    **_fsdp_rules("critic.fsdp_config", spelt="critic.model.fsdp_config"),
}

_REF: dict[str, Rule] = {
    **_below("ref", _ROLE | _LOG_PROBS),
    "ref.model": Only((), "", "the reference is always the policy before training (model.path)"),
    "ref.log_prob_micro_batch_size": _GLOBAL_MICRO,
    "ref.router_replay": NoEffect("no router replay is used"),
    **_fsdp_rules("ref.fsdp_config"),
}

_ROLLOUT: dict[str, Rule] = {
    "rollout.mode": Only(("sync", "async"), "the engine is always continuous", "known: sync and async"),
    "rollout.load_format": _WEIGHTS_FROM_TRAINER,
    "rollout.layered_summon": _WEIGHTS_FROM_TRAINER,
    "rollout.do_sample": Only((True,), "training always samples", "training has to sample; rollout.val_kwargs is free"),
    "rollout.repetition_penalty": Only((1, 1.0), "", "the trainer's log-probs know no such penalty; leave it at 1"),
    "rollout.prompt_length": Only((), "", "say data.max_prompt_length, the only place"),
    "rollout.response_length": Only((), "", "say data.max_response_length, the only place"),
    "rollout.log_prob_micro_batch_size": _GLOBAL_MICRO,
    "rollout.over_sample_rate": Only((0, 0.0), "verl does not read it either", "over-sampling with abort is not here"),
    "rollout.multi_stage_wake_up": NoEffect("weights and KV cache always wake one after the other"),
    "rollout.disable_log_stats": NoEffect("the engine's own statistics are never printed"),
    "rollout.cudagraph_capture_sizes": NoEffect("say rollout.engine_kwargs.vllm.cudagraph_capture_sizes"),
    "rollout.data_parallel_size": Only((1,), "", "engines = devices / tensor_model_parallel_size, without being told"),
    "rollout.expert_parallel_size": Only((1,), "", "expert parallelism is not here"),
    "rollout.pipeline_model_parallel_size": Only((1,), "", "pipeline parallelism is not here"),
    "rollout.nnodes": Only((0,), "rollout shares the devices of the trainer", "separate rollout devices are not here"),
    "rollout.n_gpus_per_node": NoEffect("rollout shares the devices of the trainer"),
    "rollout.quantization": Only((), "", "quantised rollout is not here"),
    "rollout.quantization_config_file": Only((), "", "quantised rollout is not here"),
    "rollout.logprobs_mode": NoEffect("log-probs are always those of logits / temperature"),
    "rollout.scheduling_policy": NoEffect("requests are served in order; a matter of speed only"),
    "rollout.enable_sleep_mode": NoEffect("rollout.free_cache_engine says whether the engine sleeps"),
    "rollout.skip_tokenizer_init": NoEffect("the engine never decodes; ids go in and come out"),
    "rollout.limit_images": _TEXT_ONLY,
    "rollout.use_fire_sampling": Only((False,), "", "it changes what is sampled, and is not here"),
    "rollout.chat_scheduler": Only((), "", _MULTI_TURN),
    "rollout.skip_rollout": Only((False,), "", "replaying dumped rollouts is not here"),
    "rollout.skip.enable": Only((False,), "", "replaying dumped rollouts is not here"),
    "rollout.skip": NoEffect("dumped rollouts are not replayed"),
    "rollout.skip_dump_dir": NoEffect("dumped rollouts are not replayed"),
    "rollout.skip_use_default_dir": NoEffect("dumped rollouts are not replayed"),
    "rollout.full_determinism": NoEffect("every request has a seed of its own, derived from trainer.seed"),
    "rollout.seed": NoEffect("every request has a seed of its own, derived from trainer.seed"),
    "rollout.trace": _PROFILER,
    "rollout.profiler": _PROFILER,
    "rollout.prometheus": _PROFILER,
    "rollout.mtp": NoEffect("no multi-token prediction is used"),
    "rollout.enable_rollout_routing_replay": Only((False,), "", "router replay is not here"),
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": Renamed("rollout.update_weights_bucket_megabytes"),
    "rollout.checkpoint_engine.backend": Only(("naive",), "weights never leave the process", "known: naive"),
    "rollout.checkpoint_engine": NoEffect("weights never leave the process"),
    "rollout.multi_turn.enable": Only((False,), "", _MULTI_TURN),
    "rollout.multi_turn.tool_config_path": Only((), "", _MULTI_TURN),
    "rollout.multi_turn.function_tool_path": Only((), "", _MULTI_TURN),
    "rollout.multi_turn.interaction_config_path": Only((), "", _MULTI_TURN),
    "rollout.multi_turn": NoEffect("rollout.multi_turn.enable is false: one turn per sample"),
    "rollout.agent.agent_loop_config_path": Only((), "", _MULTI_TURN),
    "rollout.agent.default_agent_loop": Only(("single_turn_agent",), "", _MULTI_TURN),
    "rollout.agent.custom_async_server": Only((), "", "servers of your own are not here; register a rollout engine"),
    "rollout.agent": NoEffect("samples are driven by the engine's own loop"),
}


def _if_true(value: str) -> dict[Any, Any]:
    return {True: value, "True": value, "true": value, False: None, "False": None, "false": None}


_ALGORITHM: dict[str, Rule] = {
    "algorithm.filter_groups.max_inflight_gen_batches": NoEffect(
        "one generation batch follows the other, and a further one is as large as is likely to be needed"
    ),
    # spellings of 2025
    f"{_CORRECTION}.bypass_old_logprob_for_rollout": Renamed(f"{_CORRECTION}.bypass_mode"),
    f"{_CORRECTION}.use_policy_gradient": Renamed(f"{_CORRECTION}.loss_type", _if_true("reinforce")),
    f"{_CORRECTION}.use_pure_rollout_correction": Renamed(f"{_CORRECTION}.loss_type", _if_true("reinforce")),
    f"{_CORRECTION}.rollout_token_veto_threshold": _VETO,
    f"{_CORRECTION}.rollout_rs_threshold_lower": Only((), "", "both bounds are rollout_rs_threshold=low_high"),
    "algorithm.rollout_is": Renamed(f"{_CORRECTION}.rollout_is", _if_true("token")),
    "algorithm.rollout_is_threshold": Renamed(f"{_CORRECTION}.rollout_is_threshold"),
    "algorithm.rollout_is_threshold_lower": _IS_BOUNDS,
    "algorithm.rollout_is_level": Only(("token",), "", f"the level is the value of {_CORRECTION}.rollout_is"),
    "algorithm.rollout_is_mode": Only(
        ("truncate",), "", f"to drop what is out of bounds say {_CORRECTION}.rollout_is_threshold=low_high"
    ),
    "algorithm.rollout_is_veto_threshold": _VETO,
}

_SANDBOXES = ("reward.sandbox_fusion", "sandbox_fusion", "reward_model.sandbox_fusion")
_SANDBOX: dict[str, Rule] = {
    "url": Only(
        (), "", "code runs in a sandbox beside the reward process; to ask a server, write an async function that does"
    ),
    "max_concurrent": NoEffect("each of reward.num_workers processes runs the code of one answer at a time"),
    "memory_limit_mb": Only(
        (1024,), "it is the sandbox's own limit", "memory_mb among the kwargs of the reward code says it"
    ),
}
_REWARD: dict[str, Rule] = {
    "custom_reward_function.path": Renamed("reward.custom_reward_function.path"),
    "custom_reward_function.name": Renamed("reward.custom_reward_function.name"),
    "custom_reward_function.reward_kwargs": Renamed("reward.reward_kwargs"),
    "reward.custom_reward_function.reward_kwargs": Renamed("reward.reward_kwargs"),
    "reward.reward_kwargs.overlong_buffer_cfg": Renamed("reward.overlong_buffer"),
    "reward.reward_kwargs.max_resp_len": _RESPONSE_LENGTH,
    "reward.reward_manager.name": _MANAGER,
    "reward.reward_manager.source": Only(("register",), "", "write a function: reward.custom_reward_function.path"),
    "reward.reward_manager": NoEffect("each sample is scored by itself"),
    "reward.reward_model.enable": Renamed("reward_model.enable"),
    "reward.reward_model.model_path": Renamed("reward_model.model.path"),
    "reward.reward_model.enable_resource_pool": _SHARED_DEVICES,
    "reward.reward_model.n_gpus_per_node": NoEffect("the reward model shares the devices of the trainer"),
    "reward.reward_model.nnodes": NoEffect("the reward model shares the devices of the trainer"),
    "reward.reward_model.rollout": NoEffect("the reward model runs on the training engine, without an engine server"),
    "reward.reward_model.profiler": _PROFILER,
    **{name: rule for section in _SANDBOXES for name, rule in _below(section, _SANDBOX).items()},
    **dict.fromkeys(_SANDBOXES, NoEffect("code runs in a sandbox beside the reward process, without a server")),
    "reward_model.model.input_tokenizer": Means(
        "reward_model.retokenize", True, "the answer is decoded by the policy's tokenizer (model.tokenizer_path)"
    ),
    **_below("reward_model", _MODEL | _NO_ADAPTER),
    "reward_model.model.tokenizer_path": Only((), "", "its tokenizer lies in the folder reward_model.model.path"),
    **_fsdp_rules("reward_model.fsdp_config"),
    **_fsdp_rules("reward_model.fsdp_config", spelt="reward_model.model.fsdp_config"),
    "reward_model.strategy": _STRATEGY,
    "reward_model.micro_batch_size": _GLOBAL_MICRO,
    "reward_model.max_length": Only((), "", "no text is cut; one that is longer than the model's context has no score"),
    "reward_model.ulysses_sequence_parallel_size": _ULYSSES,
    "reward_model.enable_resource_pool": _SHARED_DEVICES,
    "reward_model.n_gpus_per_node": NoEffect("the reward model shares the devices of the trainer"),
    "reward_model.nnodes": NoEffect("the reward model shares the devices of the trainer"),
    "reward_model.megatron": _MEGATRON,
    "reward_model.profiler": _PROFILER,
    "reward_model.reward_manager": _MANAGER,
    **{f"reward_model.{name}": Renamed(f"reward.{name}") for name in ("max_concurrent", "max_rpm")},
    **{f"{name}.timeout": Renamed("reward.timeout_s") for name in ("reward", "reward_model")},
    **{f"{name}.max_tpm": _TOKEN_RATE for name in ("reward", "reward_model")},
    **{
        f"{name}.estimated_tokens_per_request": NoEffect("tokens per minute are not limited")
        for name in ("reward", "reward_model")
    },
    "reward_model.reward_kwargs.overlong_buffer_cfg": Renamed("reward.overlong_buffer"),
    "reward_model.reward_kwargs.max_resp_len": _RESPONSE_LENGTH,
    "reward_model.reward_kwargs": Renamed("reward.reward_kwargs"),
    "reward_model.overlong_buffer": Renamed("reward.overlong_buffer"),
    "reward_model.num_workers": Renamed("reward.num_workers"),
    "reward_model.launch_reward_fn_async": NoEffect("rewards are always computed while other samples generate"),
}

_KEEP_ONE = {True: 1, "True": 1, "true": 1, False: None, "False": None, "false": None}
_TRAINER: dict[str, Rule] = {
    "trainer.remove_previous_ckpt_in_save": Renamed("trainer.max_actor_ckpt_to_keep", _KEEP_ONE),
    "trainer.remove_previous_ckpt": Renamed("trainer.max_actor_ckpt_to_keep", _KEEP_ONE),
    "trainer.max_critic_ckpt_to_keep": NoEffect("trainer.max_actor_ckpt_to_keep counts whole checkpoints"),
    "trainer.default_hdfs_dir": Only((), "", "nothing is copied to HDFS; trainer.default_local_dir is the place"),
    "trainer.del_local_ckpt_after_load": Only((False,), "", "a checkpoint is never deleted after loading it"),
    "trainer.esi_redundant_time": Only((0,), "", "saving before a node's lease ends is not here"),
    "trainer.ray_wait_register_center_timeout": NoEffect("verl does not read it either"),
    "trainer.use_legacy_worker_impl": NoEffect("there is one implementation"),
    "trainer.use_v1": NoEffect("there is one trainer"),
    "trainer.v1.trainer_mode": Only(("sync",), "", "asynchronous training is not here; leave it at sync"),
    "trainer.v1": NoEffect("training is synchronous"),
    "trainer.profile_steps": _PROFILER,
    "trainer.npu_profile": _PROFILER,
    "trainer.controller_nsight_options": _PROFILER,
    "trainer.worker_nsight_options": _PROFILER,
    "global_profiler": _PROFILER,
    "hybrid_engine": Only((True,), "trainer and engine always share devices", "separate rollout devices are not here"),
    "nccl_timeout": NoEffect("verl does not read it either"),
    "model_engine": Only(("dp", "fsdp", "fsdp2"), "FSDP2 is always used", "the only training engine here is FSDP2"),
    "transfer_queue": NoEffect("batches go through Ray's object store"),
    "distillation.enabled": Only((False,), "", "distillation is not here"),
    "distillation": NoEffect("distillation is off"),
    "hydra": NoEffect("hydra is not used"),
    "ray_init.num_cpus": Renamed("ray_kwargs.ray_init.num_cpus"),
    "ray_init.timeline_json_file": _PROFILER,
    "ray_kwargs.timeline_json_file": _PROFILER,
    "ray_kwargs.ray_init.num_gpus": NoEffect("trainer.n_gpus_per_node says how many devices are used"),
    "ray_kwargs.ray_init.runtime_env.env_vars": Only(
        ({},), "", "workers have the driver's environment: export the variable before the command"
    ),
    "ray_kwargs.ray_init.runtime_env": NoEffect("workers use the driver's interpreter, folder and environment"),
}

RULES: dict[str, Rule] = {
    **_DATA,
    **_MODEL,
    **_ACTOR,
    **_CRITIC,
    **_REF,
    **_ROLLOUT,
    **_ALGORITHM,
    **_REWARD,
    **_TRAINER,
    **ROLL_RULES,
}

VALUES: dict[str, dict[Any, Any]] = {
    f"{_CORRECTION}.rollout_rs": {
        "token": "token_k1",
        "sequence": "seq_sum_k1",
        "geometric": "seq_mean_k1",
        "k3": "seq_mean_k3",
    },
    "algorithm.filter_groups.metric": {"seq_reward": "score"},
    "rollout.dtype": _DTYPES,
    **{
        f"{role}.fsdp_config.mixed_precision.{dtype}": _DTYPES
        for role in ("actor", "ref", "critic", "reward_model")
        for dtype in ("param_dtype", "reduce_dtype")
    },
}
"""Values that verl spells differently, for keys that have the same name here."""

LOGGERS = {"file": "jsonl"}
"""Trackers that verl names differently."""


def judge(name: str, value: Any) -> Verdict | None:
    """The verdict on a verl key that is not a key here; None when verl does not have it either.

    name: dotted, without `actor_rollout_ref.`; a rule for a section holds for everything below it.
    """
    parts = name.split(".")
    if parts[-1] == "_target_":
        return Verdict()
    for depth in range(len(parts), 0, -1):
        rule = RULES.get(".".join(parts[:depth]))
        if rule is not None:
            return apply_rule(rule, name, ".".join(parts[depth:]), value)
    return None


def same_meaning(name: str, value: Any) -> tuple[Any, str | None]:
    """A value (of the right type) as it is spelt here, and a note where the meaning differs from verl's."""
    if name == "trainer.logger":
        renamed = [LOGGERS.get(entry, entry) for entry in value]
        return renamed, "trainer.logger: verl's file tracker is called jsonl here" if renamed != value else None
    table = VALUES.get(name, {})
    if isinstance(value, str) and value in table:
        return table[value], None
    if name == "actor.policy_loss.loss_mode" and value == "bypass_mode":
        return "vanilla", (
            f"actor.policy_loss.loss_mode=bypass_mode: {_CORRECTION}.bypass_mode=true says so here, and the loss of "
            "its loss_type=ppo_clip is vanilla"
        )
    if name == "algorithm.filter_groups.max_num_gen_batches" and value <= 0:
        return 10, (
            f"algorithm.filter_groups.max_num_gen_batches={value}: verl goes on for ever; here a step has a budget, 10"
        )
    if name == "trainer.save_freq" and value == -1:
        return value, "trainer.save_freq=-1: a checkpoint is still saved at the end; 0 = never"
    if name == "reward_model.enable" and value is True:
        return value, (
            "reward_model.enable=true: verl takes the model's score alone, which is said by reward.function_weight=0 "
            "here; with another weight the reward function's is added"
        )
    return value, None
