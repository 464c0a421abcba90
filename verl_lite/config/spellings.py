"""verl's and ROLL's spellings: which keys are renamed, which have no effect, which are refused, each with a reason.

Keys stand without verl's prefix `actor_rollout_ref.`; an entry holds for all below it, and `*` stands for any role
(actor, ref, critic, reward_model). A key that ignoring would leave the results unchanged is accepted with its sentence;
one that would change them is refused at any value but null and those that are listed. When an option of the same name
is added here, its line goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl_lite.config.schema import is_interpolation

_CORRECTION = "algorithm.rollout_correction"

_AGENTIC = (
    "custom_envs train_env_manager val_env_manager rollout_batch_size val_batch_size async_generation_ratio "
    "reward_normalization episode_reward_weight step_reward_weight step_reward_gamma logging_steps"
)
"""ROLL's keys that stand below `agentic.` here, with all that is below them."""

RENAMED: dict[str, str] = {
    # verl
    "data.tokenizer": "model.tokenizer_path",
    "data.trust_remote_code": "model.trust_remote_code",
    "data.reward_fn_key": "data.columns.data_source",
    "actor.grad_clip": "actor.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "actor.optim.warmup_style": "actor.optim.lr_scheduler_type",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "actor.use_remove_padding": "model.use_remove_padding",
    "actor.use_rollout_log_probs": f"{_CORRECTION}.bypass_mode",
    "actor.tis_imp_ratio_cap": f"{_CORRECTION}.rollout_is_threshold",
    "actor.policy_loss.rollout_correction": _CORRECTION,
    "critic.ppo_infer_micro_batch_size_per_gpu": "critic.forward_micro_batch_size_per_gpu",
    "critic.ppo_infer_max_token_len_per_gpu": "critic.forward_max_token_len_per_gpu",
    "critic.fsdp": "critic.fsdp_config",
    "critic.model.fsdp_config": "critic.fsdp_config",
    "reward_model.model.fsdp_config": "reward_model.fsdp_config",
    **{f"{role}.fsdp_config.dtype": f"{role}.fsdp_config.mixed_precision.param_dtype"
       for role in ("actor", "ref", "critic", "reward_model")},
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": "rollout.update_weights_bucket_megabytes",
    f"{_CORRECTION}.bypass_old_logprob_for_rollout": f"{_CORRECTION}.bypass_mode",
    f"{_CORRECTION}.use_policy_gradient": f"{_CORRECTION}.loss_type",
    f"{_CORRECTION}.use_pure_rollout_correction": f"{_CORRECTION}.loss_type",
    "algorithm.rollout_is": f"{_CORRECTION}.rollout_is",
    "algorithm.rollout_is_threshold": f"{_CORRECTION}.rollout_is_threshold",
    "custom_reward_function.reward_kwargs": "reward.reward_kwargs",
    "custom_reward_function": "reward.custom_reward_function",
    "reward.custom_reward_function.reward_kwargs": "reward.reward_kwargs",
    "reward.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.timeout": "reward.timeout_s",
    "reward_model.model.input_tokenizer": "reward_model.retokenize",
    "reward_model.timeout": "reward.timeout_s",
    "reward_model.max_concurrent": "reward.max_concurrent",
    "reward_model.max_rpm": "reward.max_rpm",
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.overlong_buffer": "reward.overlong_buffer",
    "reward_model.num_workers": "reward.num_workers",
    "trainer.remove_previous_ckpt_in_save": "trainer.max_actor_ckpt_to_keep",
    "trainer.remove_previous_ckpt": "trainer.max_actor_ckpt_to_keep",
    "ray_init.num_cpus": "ray_kwargs.ray_init.num_cpus",
    # ROLL
    **{name: f"agentic.{name}" for name in _AGENTIC.split()},
    "exp_name": "trainer.experiment_name",
    "seed": "trainer.seed",
    "output_dir": "trainer.default_local_dir",
    "rollout_dump_dir": "trainer.rollout_data_dir",
    "num_gpus_per_node": "trainer.n_gpus_per_node",
    "max_steps": "trainer.total_training_steps",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "critic_warmup": "trainer.critic_warmup",
    "pretrain": "model.path",
    "prompt_length": "data.max_prompt_length",
    "response_length": "data.max_response_length",
    "adv_estimator": "algorithm.adv_estimator",
    "gamma": "algorithm.gamma",
    "lambd": "algorithm.lam",
    "reward_clip": "algorithm.reward_clip",
    "advantage_clip": "algorithm.advantage_clip",
    "whiten_rewards": "algorithm.whiten_rewards",
    "whiten_advantages": "algorithm.whiten_advantages",
    "add_token_level_kl": "algorithm.use_kl_in_reward",
    "kl_penalty": "algorithm.kl_penalty",
    "init_kl_coef": "algorithm.kl_ctrl.kl_coef",
    "kl_horizon": "algorithm.kl_ctrl.horizon",
    "target_kl": "algorithm.kl_ctrl.target_kl",
    "ppo_epochs": "actor.ppo_epochs",
    "pg_clip": "actor.clip_ratio",
    "pg_clip_low": "actor.clip_ratio_low",
    "pg_clip_high": "actor.clip_ratio_high",
    "dual_clip_loss": "actor.clip_ratio_c",
    "ratio_type": "actor.ratio_type",
    "loss_agg_mode": "actor.loss_agg_mode",
    "use_kl_loss": "actor.use_kl_loss",
    "kl_loss_coef": "actor.kl_loss_coef",
    "entropy_loss_coef": "actor.entropy_coeff",
    "max_grad_norm": "actor.optim.clip_grad",
    "value_clip": "critic.cliprange_value",
    "actor_train.model_update_frequency": "agentic.model_update_frequency",
    "actor_train.model_args.dtype": "actor.fsdp_config.mixed_precision.param_dtype",
    "actor_train.training_args.learning_rate": "actor.optim.lr",
    "actor_train.training_args.weight_decay": "actor.optim.weight_decay",
    "actor_train.training_args.warmup_steps": "actor.optim.lr_warmup_steps",
    "actor_train.training_args.lr_scheduler_type": "actor.optim.lr_scheduler_type",
    "actor_train.training_args.per_device_train_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "critic.training_args.learning_rate": "critic.optim.lr",
    "actor_infer.generating_args.temperature": "rollout.temperature",
    "actor_infer.generating_args.top_p": "rollout.top_p",
    "actor_infer.generating_args.top_k": "rollout.top_k",
    "actor_infer.strategy_args.strategy_name": "rollout.name",
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": "rollout.gpu_memory_utilization",
}  # fmt: skip
"""Keys of one meaning under two names; `VALUES` has the values that are spelt otherwise."""

BESIDE: dict[str, dict[str, Any]] = {
    "actor.tis_imp_ratio_cap": {f"{_CORRECTION}.rollout_is": "token"},
    "target_kl": {"algorithm.kl_ctrl.type": "adaptive"},
}
"""What a renamed key sets besides."""

EQUAL = {
    "reward.reward_kwargs.max_resp_len": "data.max_response_length",
    "reward_model.reward_kwargs.max_resp_len": "data.max_response_length",
}
"""Keys that have to have the value of another, which alone is read."""

NO_EFFECT: dict[str, str] = {
    "it is a matter of speed or memory alone": (
        "*.fsdp_config.forward_prefetch *.fsdp_config.use_torch_compile *.use_torch_compile *.use_prefix_grouper "
        "*.fsdp_config.grad_offload *.fsdp_config.use_orig_params *.fsdp_config.offload_policy model.use_shm "
        "model.use_liger model.tiled_mlp model.use_prefix_grouper model.enable_activation_offload data.use_shm "
        "critic.model.use_shm critic.model.tiled_mlp critic.model.use_liger critic.model.enable_activation_offload "
        "reward_model.model.use_shm reward_model.model.tiled_mlp reward_model.model.use_liger transfer_queue "
        "rollout.scheduling_policy rollout.multi_stage_wake_up rollout.disable_log_stats "
        "data.dataloader_num_workers model.use_fused_kernels model.fused_kernel_options *.use_fused_kernels "
        "*.entropy_from_logits_with_chunking *.entropy_checkpointing *.fsdp_config.entropy_checkpointing "
        "*.fsdp_config.entropy_from_logits_with_chunking actor.sum_pi_squared_checkpointing"
    ),
    "frames are not kept; trainer.validation_data_dir keeps what was said": "render_save_dir agentic.render_save_dir",
    "only text models are trained here": (
        "data.image_key data.video_key data.audio_key data.image_patch_size data.return_multi_modal_inputs "
        "data.mm_processor_kwargs actor.freeze_vision_tower rollout.limit_images"
    ),
    "there is no profiler; timing_s/* is logged at every step": (
        "*.profiler rollout.profiler rollout.trace rollout.prometheus global_profiler trainer.profile_steps "
        "trainer.npu_profile trainer.controller_nsight_options trainer.worker_nsight_options "
        "ray_init.timeline_json_file ray_kwargs.timeline_json_file reward.reward_model.profiler"
    ),
    "trainer.seed is the root of every random number": (
        "*.data_loader_seed *.fsdp_config.seed *.fsdp_config.full_determinism rollout.seed rollout.full_determinism"
    ),
    "it counts over all devices, and results do not depend on it; say the key with _per_gpu": (
        "*.ppo_micro_batch_size *.log_prob_micro_batch_size rollout.log_prob_micro_batch_size "
        "critic.forward_micro_batch_size reward_model.micro_batch_size"
    ),
    "the engine always gets its weights from the trainer, in the same process": (
        "rollout.load_format rollout.layered_summon rollout.checkpoint_engine"
    ),
    "dumped rollouts are not replayed": "rollout.skip rollout.skip_dump_dir rollout.skip_use_default_dir",
    "trainer, engine, reference and reward model share all devices; FSDP2 trains, and rollout.name generates": (
        "*.engine rollout.n_gpus_per_node reward.reward_model reward_model.n_gpus_per_node reward_model.nnodes "
        "partial_gpu_mode actor_train.strategy_args actor_train.device_mapping actor_train.infer_batch_size "
        "actor_infer.strategy_args actor_infer.device_mapping actor_infer.infer_batch_size critic.strategy_args "
        "critic.device_mapping critic.infer_batch_size"
    ),
    "an adapter (LoRA) is for the policy alone": (
        "critic.model.lora_alpha critic.model.target_modules critic.model.exclude_modules critic.model.lora "
        "reward_model.model.lora_alpha reward_model.model.target_modules reward_model.model.exclude_modules"
    ),
    "verl does not read it either": (
        "data.return_raw_input_ids critic.nccl_timeout nccl_timeout trainer.ray_wait_register_center_timeout"
    ),
    "the chat always travels with the batch, as raw_prompt": "data.return_raw_chat data.return_full_prompt",
    "validation averages over the set, so its order has no meaning": "data.validation_shuffle",
    "algorithm.filter_groups asks for as many more prompts as are likely to be needed, one batch after the other": (
        "data.gen_batch_size algorithm.filter_groups.max_inflight_gen_batches"
    ),
    "model.lora_rank, lora_alpha, target_modules and exclude_modules are read": "model.lora",
    "no multi-token prediction is used": "model.mtp rollout.mtp critic.model.mtp",
    "roles know what they train and load": "*.fsdp_config.forward_only *.load_weight",
    "buffers are kept as the model has them": "*.fsdp_config.mixed_precision.buffer_dtype",
    "the layers of the model are found without being named": "*.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap",
    "the scheduler is told the number of steps by the trainer": "*.optim.total_training_steps",
    "rollout.n is the only place": "*.rollout_n",
    "a checkpoint always holds everything; export writes a Hugging Face folder": "*.checkpoint checkpoint_config",
    "it is computed where algorithm.adv_estimator reads it": "actor.calculate_sum_pi_squared",
    "no router replay is used": "*.router_replay",
    "there is a critic exactly where algorithm.adv_estimator needs values": "critic.enable",
    "the critic reads the policy's tokens; nothing is encoded anew": "critic.model.tokenizer_path",
    "say rollout.engine_kwargs.vllm.cudagraph_capture_sizes": "rollout.cudagraph_capture_sizes",
    "log-probs are always those of logits / temperature": "rollout.logprobs_mode",
    "rollout.free_cache_engine says whether the engine sleeps": "rollout.enable_sleep_mode",
    "the engine never decodes; ids go in and come out": "rollout.skip_tokenizer_init",
    "one turn per sample; agents have recipes of their own (trainer/AGENTIC.md)": "rollout.multi_turn rollout.agent",
    "each sample is scored by itself, while other samples generate": (
        "reward_model.launch_reward_fn_async"
    ),
    "code runs in a sandbox beside the reward process, without a server": (
        "reward.sandbox_fusion sandbox_fusion reward_model.sandbox_fusion"
    ),
    "tokens per minute are not limited": (
        "reward.estimated_tokens_per_request reward_model.estimated_tokens_per_request"
    ),
    "trainer.max_actor_ckpt_to_keep counts whole checkpoints": "trainer.max_critic_ckpt_to_keep",
    "there is one implementation": "trainer.use_legacy_worker_impl trainer.use_v1",
    "training is synchronous": "trainer.v1",
    "distillation is off": "distillation",
    "hydra is not used": "hydra",
    "trainer.n_gpus_per_node says how many devices are used": "ray_kwargs.ray_init.num_gpus",
    "workers have the driver's interpreter, folder and environment": "ray_kwargs.ray_init.runtime_env",
    "actor.clip_ratio_low and clip_ratio_high are read where they are given": "use_pg_clip_range",
    "there is a reference, the policy before training, exactly where a KL term reads it": "enable_reference reference",
    "agentic.env_pool.* says how environments share processes, and ends what hangs": (
        "train_env_manager.max_env_num_per_worker val_env_manager.max_env_num_per_worker env_monitor "
        "train_env_manager.world_size val_env_manager.world_size"
    ),
    "any number of rows works as it is": "batch_adjust_mode agentic.batch_adjust_mode",
    "the policy acts": "train_env_manager.llm_proxy val_env_manager.llm_proxy",
    "it is said by model.*, rollout.* and actor.optim.* here": (
        "actor_train.model_args actor_train.data_args actor_train.training_args actor_infer.model_args "
        "actor_infer.data_args actor_infer.generating_args"
    ),
    "trainer.logger names the trackers": "track_with tracker_kwargs",
    "logs lie in the run folder": "logging_dir",
}  # fmt: skip
"""By sentence the keys that are accepted and dropped at any value, because results do not depend on them here."""

_ULYSSES = ("sequence parallelism (Ulysses) is not here; leave it at 1", 1)
_STRATEGY = ("the only training engine here is FSDP2", "fsdp", "fsdp2", "dp")
_MEGATRON = ("Megatron is not here; the training engine is FSDP2 (actor.fsdp_config.*)",)
_QAT = ("quantisation is not here", False)
_MULTI_TURN = ("multi-turn is not said so here: agents have recipes (recipe=agentic_..., trainer/AGENTIC.md)", False)
_DEVICES = ("separate devices for rollout or reward model are not here; all share the trainer's", False, 0)
_VETO = (f"a veto by token is {_CORRECTION}.rollout_rs=seq_max_k2 with rollout_rs_threshold=log(veto)^2 / 2",)
_PENALTY = ("the trainer's log-probs know no such penalty; leave it at 1", 1, 1.0)
_WHOLE = ("an adapter (LoRA) is for the policy alone; this model has none", 0)
_SANDBOX_URL = ("code runs in a sandbox beside the reward process; to ask a server, write an async function that does",)
_SANDBOX_MB = ("memory_mb among the kwargs of the reward code says it", 1024)
_TOOLS = (
    "tools are called in episodes (recipe=agentic_..., trainer/AGENTIC.md); those that a prompt only shows are a list "
    "of schemas in data.tools_path",
)
_MANAGER = (
    "naive, dapo, rate_limited and remote are the managers that have an equal here; for batch, set "
    "reward.custom_reward_function.style=batch",
    "naive", "dapo", "rate_limited", "remote",
)  # fmt: skip
_LIKE_RATE = ("only the calls per minute are limited, by reward.max_rpm",)

REFUSED: dict[str, tuple[Any, ...]] = {
    "*.strategy": _STRATEGY,
    "*.fsdp_config.strategy": _STRATEGY,
    "model_engine": _STRATEGY,
    "*.ulysses_sequence_parallel_size": _ULYSSES,
    "*.fsdp_config.ulysses_sequence_parallel_size": _ULYSSES,
    "*.megatron": _MEGATRON,
    "*.veomni": _MEGATRON,
    "*.qat": _QAT,
    "*.fsdp_config.qat": _QAT,
    "*.fsdp_config.model_dtype": (
        "weights are always held in fp32; mixed_precision.param_dtype is the dtype of computation", "fp32", "float32",
    ),
    "*.router_replay.mode": ("router replay is not here", "disabled"),
    "*.optim.optimizer": ("the only optimizer here is AdamW", "AdamW"),
    "*.optim.optimizer_impl": ("only torch.optim is used", "torch.optim"),
    "*.optim.override_optimizer_config": ("set betas, eps and weight_decay beside lr", {}),
    "*.model.lora_rank": _WHOLE,
    "*.model.external_lib": ("import your code from a recipe instead",),
    "reward_model.model.tokenizer_path": ("its tokenizer lies in the folder reward_model.model.path",),
    "reward_model.max_length": ("no text is cut; one that is longer than the model's context has no score",),
    "trainer.max_best_ckpt_to_keep": ("keep all, and choose by `trainer.main_eval RUN --all-checkpoints`", 0),
    "data.datagen": ("data generation during training is not here",),
    "data.tool_config_path": _TOOLS,
    "data.function_tool_path": _TOOLS,
    "model.external_lib": ("import your code from a recipe instead",),
    "model.custom_chat_template": ("put the template into the tokenizer's folder (model.tokenizer_path)",),
    "model.hf_config_path": ("the config comes from model.path; model.override_config changes entries",),
    "model.lora_adapter_path": ("an adapter starts at zero here; merge yours into the model of model.path",),
    "model.lora.rank": ("say model.lora_rank, and model.lora_alpha with it", 0),
    "trainer.val_time_budget_s": ("ask fewer prompts, a random sample, with data.val_max_samples",),
    "model.mtp.enable": ("multi-token prediction is not here", False),
    "ref.model": ("the reference is always the policy before training (model.path)",),
    "rollout.mode": ("the engine is always continuous; known: sync and async", "sync", "async"),
    "rollout.do_sample": ("training has to sample; rollout.val_kwargs is free", True),
    "rollout.repetition_penalty": _PENALTY,
    "rollout.prompt_length": ("say data.max_prompt_length, the only place",),
    "rollout.response_length": ("say data.max_response_length, the only place",),
    "rollout.over_sample_rate": ("over-sampling with abort is not here", 0, 0.0),
    "rollout.data_parallel_size": ("engines = devices / tensor_model_parallel_size, without being told", 1),
    "rollout.expert_parallel_size": ("expert parallelism is not here", 1),
    "rollout.pipeline_model_parallel_size": ("pipeline parallelism is not here", 1),
    "rollout.nnodes": _DEVICES,
    "rollout.quantization": _QAT,
    "rollout.quantization_config_file": _QAT,
    "rollout.use_fire_sampling": ("it changes what is sampled, and is not here", False),
    "rollout.chat_scheduler": _MULTI_TURN,
    "rollout.skip_rollout": ("replaying dumped rollouts is not here", False),
    "rollout.skip.enable": ("replaying dumped rollouts is not here", False),
    "rollout.enable_rollout_routing_replay": ("router replay is not here", False),
    "rollout.checkpoint_engine.backend": ("weights never leave the process; known: naive", "naive"),
    "rollout.multi_turn.enable": _MULTI_TURN,
    "rollout.multi_turn.tool_config_path": _MULTI_TURN,
    "rollout.multi_turn.function_tool_path": _MULTI_TURN,
    "rollout.multi_turn.interaction_config_path": _MULTI_TURN,
    "rollout.agent.agent_loop_config_path": _MULTI_TURN,
    "rollout.agent.default_agent_loop": (*_MULTI_TURN, "single_turn_agent"),
    "rollout.agent.custom_async_server": ("servers of your own are not here; register a rollout engine", {}),
    f"{_CORRECTION}.rollout_token_veto_threshold": _VETO,
    "algorithm.rollout_is_veto_threshold": _VETO,
    f"{_CORRECTION}.rollout_rs_threshold_lower": ("both bounds are rollout_rs_threshold=low_high",),
    "algorithm.rollout_is_threshold_lower": (f"both bounds are {_CORRECTION}.rollout_is_threshold=low_high",),
    "algorithm.rollout_is_level": (f"the level is the value of {_CORRECTION}.rollout_is", "token"),
    "algorithm.rollout_is_mode": (
        f"to drop what is out of bounds say {_CORRECTION}.rollout_is_threshold=low_high", "truncate",
    ),
    "train_infer_correction": (
        f"importance weights are {_CORRECTION}.rollout_is=token|sequence|segment|geometric, its filters rollout_rs="
        "LEVEL_ratio or LEVEL_diff with rollout_rs_threshold=low_high",
    ),
    **{f"{section}.url": _SANDBOX_URL for section in ("reward.sandbox_fusion", "sandbox_fusion",
       "reward_model.sandbox_fusion")},
    **{f"{section}.memory_limit_mb": _SANDBOX_MB for section in ("reward.sandbox_fusion", "sandbox_fusion",
       "reward_model.sandbox_fusion")},
    "reward.reward_manager": _MANAGER,
    "reward.reward_manager.source": ("write a function: reward.custom_reward_function.path", "register"),
    "reward_model.reward_manager": _MANAGER,
    "reward.reward_model.enable_resource_pool": _DEVICES,
    "reward_model.enable_resource_pool": _DEVICES,
    "reward.max_tpm": _LIKE_RATE,
    "reward_model.max_tpm": _LIKE_RATE,
    "trainer.default_hdfs_dir": ("nothing is copied to HDFS; trainer.default_local_dir is the place",),
    "trainer.del_local_ckpt_after_load": ("a checkpoint is never deleted after loading it", False),
    "trainer.esi_redundant_time": ("saving before a node's lease ends is not here", 0),
    "trainer.v1.trainer_mode": ("asynchronous training is not here; leave it at sync", "sync"),
    "hybrid_engine": ("separate rollout devices are not here; trainer and engine always share them", True),
    "distillation.enabled": ("distillation is not here", False),
    "ray_kwargs.ray_init.runtime_env.env_vars": (
        "workers have the driver's environment: export the variable before the command", {},
    ),
    "enable_old_logprobs_recompute": (f"they are computed where read; say {_CORRECTION}.bypass_mode=true", True),
    "sequence_length": ("say data.max_prompt_length and data.max_response_length, which add up to it",),
    "actor_infer.generating_args.max_new_tokens": (
        "tokens of a turn are max_tokens_per_step of its entry in agentic.custom_envs",
    ),
    "actor_infer.generating_args.num_return_sequences": ("agentic.train_env_manager.group_size says so", 1),
    "actor_infer.generating_args.num_beams": ("training has to sample; leave it at 1", 1),
    "actor_infer.generating_args.repetition_penalty": _PENALTY,
    "actor_train.training_args.gradient_accumulation_steps": (
        "rows of an optimizer step are actor.ppo_mini_batch_size: the size per device x this x devices",
    ),
    "train_env_manager.llm_proxy.proxy_type": ("only the policy acts here", "policy"),
    "val_env_manager.llm_proxy.proxy_type": ("only the policy acts here", "policy"),
    "resume_from_checkpoint": ("say trainer.resume_mode=auto, or resume_path with trainer.resume_from_path", False),
}  # fmt: skip
"""(sentence, values that are harmless): keys that would change the run at any other value but null."""


def _if_true(value: Any) -> dict[Any, Any]:
    return {True: value, "True": value, "true": value, False: None, "False": None, "false": None}


_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
VALUES: dict[str, dict[Any, Any]] = {
    "data.reward_fn_key": {"data_source": None},
    "actor.tis_imp_ratio_cap": {-1: None, 0: None},
    "trainer.remove_previous_ckpt_in_save": _if_true(1),
    "trainer.remove_previous_ckpt": _if_true(1),
    f"{_CORRECTION}.use_policy_gradient": _if_true("reinforce"),
    f"{_CORRECTION}.use_pure_rollout_correction": _if_true("reinforce"),
    "algorithm.rollout_is": _if_true("token"),
    "actor_infer.generating_args.top_k": {0: -1},
    "dual_clip_loss": {True: 1.4, False: 1e9},  # 1 + 2 pg_clip, at ROLL's 0.2
    f"{_CORRECTION}.rollout_rs": {
        "token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1", "k3": "seq_mean_k3",
    },
    "algorithm.filter_groups.metric": {"seq_reward": "score"},
    "rollout.dtype": _DTYPES,
    **{f"{role}.fsdp_config.mixed_precision.{dtype}": _DTYPES
       for role in ("actor", "ref", "critic", "reward_model") for dtype in ("param_dtype", "reduce_dtype")},
}  # fmt: skip
"""Values that verl spells differently, by its key; None = the key is left out."""

_IDLE = {name: sentence for sentence, names in NO_EFFECT.items() for name in names.split()}


@dataclass(frozen=True)
class Verdict:
    """What to do with one verl key: what to set, what to say, why it is refused, which key has to have its value."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None
    refusal: str | None = None
    equals: str | None = None


def translate(name: str, value: Any) -> Verdict | None:
    """The verdict on a verl or ROLL key that is not a key here; None where neither has it.

    Args:
        name: dotted, without `actor_rollout_ref.`.
    """
    parts = name.split(".")
    if parts[-1] == "_target_":
        return Verdict()
    for depth in range(len(parts), 0, -1):
        known, below = ".".join(parts[:depth]), "".join(f".{part}" for part in parts[depth:])
        for entry in (known, ".".join(["*", *parts[1:depth]])):
            if entry in EQUAL:
                said = value is not None and not is_interpolation(value)
                note = f"{name}={value} has no effect here: {EQUAL[entry]} is read"
                return Verdict(equals=EQUAL[entry], note=note) if said else Verdict()
            if entry in REFUSED:
                sentence, *harmless = REFUSED[entry]
                return _refused(name, value, sentence, harmless)
            if entry in _IDLE:
                return Verdict(note=f"{name}={value} has no effect here: {_IDLE[entry]}")
            if entry in RENAMED:
                return _renamed(name, value, RENAMED[entry] + below, entry)
    return None


def _refused(name: str, value: Any, sentence: str, harmless: list[Any]) -> Verdict:
    if value is None or is_interpolation(value) or value in harmless:  # a reference is to a key judged by itself
        return Verdict(note=None if value is None else f"{name}={value} has no effect here: {sentence}")
    accepted = " or ".join(str(one).lower() if isinstance(one, bool) else str(one) for one in (*harmless, "null"))
    return Verdict(refusal=f"it would change the run: {sentence}. Accepted: {accepted}")


def _renamed(name: str, value: Any, target: str, entry: str) -> Verdict:
    if entry == "reward_model.model.input_tokenizer":
        value = value is not None or None
    table = VALUES.get(name, {})
    value = table.get(value, value) if isinstance(value, str | bool | int) else value
    if value is None:
        return Verdict()
    further = translate(target, value)
    if further is not None:
        return replace(further, note=further.note and further.note.replace(target, name, 1))
    settings = {target: value} | BESIDE.get(entry, {})
    return Verdict(settings, f"{name} is called {', with '.join(f'{to}={new}' for to, new in settings.items())} here")


def same_meaning(name: str, value: Any) -> tuple[Any, str | None]:
    """A value (of the right type) as it is spelt here, and a note where the meaning differs from verl's."""
    if name == "trainer.logger" and "file" in value:
        return ["jsonl" if entry == "file" else entry for entry in value], (
            "trainer.logger: verl's file tracker is called jsonl here"
        )
    if isinstance(value, str) and value in VALUES.get(name, {}):
        return VALUES[name][value], None
    if name == "actor.policy_loss.loss_mode" and value == "bypass_mode":
        return "vanilla", f"{name}=bypass_mode: {_CORRECTION}.bypass_mode=true says so here, and the loss is vanilla"
    if name == "algorithm.filter_groups.max_num_gen_batches" and not is_interpolation(value) and value <= 0:
        return 10, f"{name}={value}: verl goes on for ever; here a step has a budget, 10"
    if name == "trainer.save_freq" and value == -1:
        return value, "trainer.save_freq=-1: a checkpoint is still saved at the end; 0 = never"
    if name == "reward_model.enable" and value is True:
        return value, (
            "reward_model.enable=true: verl takes the model's score alone, which is said by reward.function_weight=0 "
            "here; with another weight the reward function's is added"
        )
    return value, None
