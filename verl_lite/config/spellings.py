"""Translates the keys of verl and ROLL: tables of renamed keys, of keys without effect and of refused keys.

Keys are written without verl's prefix `actor_rollout_ref.`. An entry applies to all keys below it, and `*` matches any
role (actor, ref, critic, reward_model). A key is accepted with a note if ignoring it leaves the results unchanged;
otherwise it is refused at all values except null and the harmless values in its entry. When an option of the same name
is added here, remove the entry. `together` translates the keys of ROLL whose meaning depends on other keys.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl_lite.config.option_table import is_interpolation
from verl_lite.config.rollout_correction import WEIGHT_LEVELS

_CORRECTION = "algorithm.rollout_correction"
_ROLES = ("actor", "ref", "critic", "reward_model")
_REWARDS = ("reward", "reward_model")
_POLICY_GRADIENT = [f"{_CORRECTION}.{name}" for name in ("use_policy_gradient", "use_pure_rollout_correction")]
_REMOVE_PREVIOUS = ("trainer.remove_previous_ckpt", "trainer.remove_previous_ckpt_in_save")

RENAMED: dict[str, str] = {
    # verl
    "data.tokenizer": "model.tokenizer_path",
    "data.trust_remote_code": "model.trust_remote_code",
    "data.reward_fn_key": "data.columns.data_source",
    "model.custom_chat_template": "data.chat_template",
    "actor.use_remove_padding": "model.use_remove_padding",
    "actor.use_rollout_log_probs": f"{_CORRECTION}.bypass_mode",
    "actor.tis_imp_ratio_cap": f"{_CORRECTION}.rollout_is_threshold",
    "actor.policy_loss.rollout_correction": _CORRECTION,
    "critic.ppo_infer_micro_batch_size_per_gpu": "critic.forward_micro_batch_size_per_gpu",
    "critic.ppo_infer_max_token_len_per_gpu": "critic.forward_max_token_len_per_gpu",
    "critic.fsdp": "critic.fsdp_config",
    "critic.model.fsdp_config": "critic.fsdp_config",
    "reward_model.model.fsdp_config": "reward_model.fsdp_config",
    **{f"{role}.fsdp_config.dtype": f"{role}.fsdp_config.mixed_precision.param_dtype" for role in _ROLES},
    **{f"{role}.grad_clip": f"{role}.optim.clip_grad" for role in ("actor", "critic")},
    **{f"{role}.optim.warmup_style": f"{role}.optim.lr_scheduler_type" for role in ("actor", "critic")},
    "actor.router_replay.mode": "rollout.router_replay",
    "rollout.enable_rollout_routing_replay": "rollout.router_replay",
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": "rollout.update_weights_bucket_megabytes",
    f"{_CORRECTION}.bypass_old_logprob_for_rollout": f"{_CORRECTION}.bypass_mode",
    **{name: f"{_CORRECTION}.loss_type" for name in _POLICY_GRADIENT},
    **{f"algorithm.{name}": f"{_CORRECTION}.{name}" for name in ("rollout_is", "rollout_is_threshold")},
    "custom_reward_function": "reward.custom_reward_function",
    "reward.custom_reward_function.reward_kwargs": "reward.reward_kwargs",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward_model.model.input_tokenizer": "reward_model.retokenize",
    "reward_model.overlong_buffer": "reward.overlong_buffer",
    **{f"reward_model.{name}": f"reward.{name}" for name in ("max_concurrent", "max_rpm", "num_workers")},
    **{f"{section}.timeout": "reward.timeout_s" for section in _REWARDS},
    **{f"{section}.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer" for section in _REWARDS},
    **{f"{section}.reward_kwargs.max_resp_len": "data.max_response_length" for section in _REWARDS},
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    **dict.fromkeys(_REMOVE_PREVIOUS, "trainer.max_actor_ckpt_to_keep"),
    "ray_init.num_cpus": "ray_kwargs.ray_init.num_cpus",
    # ROLL
    **{name: f"agentic.{name}" for name in (
        "custom_envs train_env_manager val_env_manager rollout_batch_size val_batch_size async_generation_ratio "
        "reward_normalization episode_reward_weight step_reward_weight step_reward_gamma logging_steps").split()},
    **{name: f"algorithm.{name}" for name in (
        "adv_estimator gamma norm_mean_type norm_std_type reward_clip advantage_clip whiten_rewards whiten_advantages "
        "kl_penalty").split()},
    **{name: f"actor.{name}" for name in (
        "ppo_epochs ratio_type loss_agg_mode use_kl_loss kl_loss_coef").split()},
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
    "reward_pretrain": "critic.model.path",
    "num_return_sequences_in_group": "rollout.n",
    **{f"{part}_length": f"data.max_{part}_length" for part in ("prompt", "response")},
    "lambd": "algorithm.lam",
    "add_token_level_kl": "algorithm.use_kl_in_reward",
    "init_kl_coef": "algorithm.kl_ctrl.kl_coef",
    "kl_horizon": "algorithm.kl_ctrl.horizon",
    "target_kl": "algorithm.kl_ctrl.target_kl",
    **{f"pg_clip{side}": f"actor.clip_ratio{side}" for side in ("", "_low", "_high")},
    **dict.fromkeys(("pg_variant", "actor_train.pg_variant"), "actor.policy_loss.loss_mode"),
    "entropy_loss_coef": "actor.entropy_coeff",
    "max_grad_norm": "actor.optim.clip_grad",
    "value_clip": "critic.cliprange_value",
    "actor_train.model_update_frequency": "agentic.model_update_frequency",
    "actor_train.model_args.dtype": "actor.fsdp_config.mixed_precision.param_dtype",
    "actor_train.model_args.disable_gradient_checkpointing": "model.enable_gradient_checkpointing",
    "actor_train.model_args.lora_target": "model.target_modules",
    **{f"actor_train.model_args.{name}": f"model.{name}" for name in ("lora_rank", "lora_alpha")},
    "actor_train.data_args.file_name": "data.train_files",
    "actor_train.data_args.messages": "data.prompt_key",
    "actor_train.training_args.num_train_epochs": "trainer.total_epochs",
    "critic.model_args.dtype": "critic.fsdp_config.mixed_precision.param_dtype",
    **{f"{theirs}.training_args.{name}": f"{ours}.{to}" for theirs, ours in (("actor_train", "actor"), ("critic",) * 2)
       for name, to in (("learning_rate", "optim.lr"), ("weight_decay", "optim.weight_decay"),
                        ("warmup_steps", "optim.lr_warmup_steps"), ("lr_scheduler_type", "optim.lr_scheduler_type"),
                        ("per_device_train_batch_size", "ppo_micro_batch_size_per_gpu"))},
    "validation.data_args.file_name": "data.val_files",
    "validation.generating_args.num_return_sequences": "rollout.val_kwargs.n",
    **{f"{theirs}.generating_args.{name}": f"{ours}.{name}" for name in ("temperature", "top_p", "top_k")
       for theirs, ours in (("actor_infer", "rollout"), ("validation", "rollout.val_kwargs"))},
    "actor_infer.strategy_args.strategy_name": "rollout.name",
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": "rollout.gpu_memory_utilization",
}  # fmt: skip
"""The name used here for each renamed key. `VALUES` translates the values that differ."""

EQUAL = [name for name in RENAMED if name.endswith(".max_resp_len")]
"""Renamed keys whose value must equal that of the option with the name used here."""

BESIDE: dict[str, dict[str, Any]] = {
    "actor.tis_imp_ratio_cap": {f"{_CORRECTION}.rollout_is": "token"},
    "target_kl": {"algorithm.kl_ctrl.type": "adaptive"},
    "validation.generating_args.temperature": {"rollout.val_kwargs.do_sample": True},
}
"""Further options that a renamed key sets."""

NO_EFFECT: dict[str, str] = {
    "it is a matter of speed, memory or logging alone": (
        "*.fsdp_config.forward_prefetch *.fsdp_config.use_torch_compile *.use_torch_compile *.use_prefix_grouper "
        "*.fsdp_config.grad_offload *.fsdp_config.use_orig_params *.fsdp_config.offload_policy model.use_shm "
        "model.use_liger model.tiled_mlp model.use_prefix_grouper model.enable_activation_offload data.use_shm "
        "*.model.use_shm *.model.tiled_mlp *.model.use_liger *.model.enable_activation_offload transfer_queue "
        "rollout.scheduling_policy rollout.multi_stage_wake_up rollout.disable_log_stats rollout.enable_sleep_mode "
        "data.dataloader_num_workers model.use_fused_kernels model.fused_kernel_options *.use_fused_kernels "
        "*.entropy_from_logits_with_chunking *.entropy_checkpointing *.fsdp_config.entropy_checkpointing "
        "*.fsdp_config.entropy_from_logits_with_chunking actor.sum_pi_squared_checkpointing *.checkpoint "
        "checkpoint_config rollout.cudagraph_capture_sizes data.gen_batch_size track_with tracker_kwargs logging_dir "
        "algorithm.filter_groups.max_inflight_gen_batches trainer.max_critic_ckpt_to_keep partial_gpu_mode "
        "*.profiler rollout.profiler rollout.trace rollout.prometheus global_profiler trainer.profile_steps "
        "trainer.npu_profile trainer.controller_nsight_options trainer.worker_nsight_options env_monitor "
        "ray_init.timeline_json_file ray_kwargs.timeline_json_file reward.reward_model.profiler "
        "train_env_manager.max_env_num_per_worker val_env_manager.max_env_num_per_worker "
        "train_env_manager.world_size val_env_manager.world_size rpc_timeout is_use_additional_prompts "
        "use_additional_prompts critic.offload_nccl actor_train.offload_nccl actor_infer.offload_nccl "
        "max_running_requests max_additional_running_prompts is_num_return_sequences_expand"
    ),
    "it belongs to another key, which is off": (
        "difficulty_low_threshold difficulty_high_threshold error_max_len_threshold infer_catastrophic_threshold"
    ),
    "episodes are kept as samples of text: python -m trainer.inspect RUN": "render_save_dir",
    "only text models are trained here": (
        "data.image_key data.video_key data.audio_key data.image_patch_size data.return_multi_modal_inputs "
        "data.mm_processor_kwargs actor.freeze_vision_tower rollout.limit_images"
    ),
    "trainer.seed is the root of every random number": (
        "*.data_loader_seed *.fsdp_config.seed *.fsdp_config.full_determinism rollout.seed rollout.full_determinism"
    ),
    "it counts over all devices, and results do not depend on it; say the key with _per_gpu": (
        "*.ppo_micro_batch_size *.log_prob_micro_batch_size rollout.log_prob_micro_batch_size "
        "critic.forward_micro_batch_size reward_model.micro_batch_size"
    ),
    "trainer, engine, reference and reward model share all devices; FSDP2 trains, and rollout.name generates": (
        "*.engine rollout.n_gpus_per_node reward.reward_model reward_model.n_gpus_per_node reward_model.nnodes "
        "actor_train.strategy_args actor_train.device_mapping actor_train.infer_batch_size actor_infer.strategy_args "
        "actor_infer.device_mapping actor_infer.infer_batch_size critic.strategy_args critic.device_mapping "
        "actor_infer.num_gpus_per_worker actor_infer.worker_cls critic.worker_cls "
        "critic.infer_batch_size rollout.load_format rollout.layered_summon rollout.checkpoint_engine"
    ),
    "an adapter (LoRA) is said by model.lora_rank, lora_alpha, target_modules and exclude_modules, for the policy": (
        "model.lora *.model.lora_alpha *.model.target_modules *.model.exclude_modules *.model.lora"
    ),
    "it says nothing that is not said by another option here, or known": (
        "data.return_raw_input_ids critic.nccl_timeout nccl_timeout trainer.ray_wait_register_center_timeout "
        "data.return_raw_chat data.return_full_prompt data.validation_shuffle model.mtp rollout.mtp critic.model.mtp "
        "*.fsdp_config.forward_only *.load_weight *.fsdp_config.mixed_precision.buffer_dtype "
        "*.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap *.optim.total_training_steps *.rollout_n "
        "actor.calculate_sum_pi_squared *.router_replay critic.enable critic.model.tokenizer_path "
        "rollout.logprobs_mode rollout.skip_tokenizer_init rollout.multi_turn rollout.agent "
        "reward_model.launch_reward_fn_async "
        "reward.sandbox_fusion sandbox_fusion reward_model.sandbox_fusion reward.estimated_tokens_per_request "
        "reward_model.estimated_tokens_per_request rollout.skip rollout.skip_dump_dir rollout.skip_use_default_dir "
        "trainer.use_legacy_worker_impl trainer.use_v1 trainer.v1 distillation hydra ray_kwargs.ray_init.num_gpus "
        "ray_kwargs.ray_init.runtime_env use_pg_clip_range enable_reference reference batch_adjust_mode "
        "agentic.batch_adjust_mode train_env_manager.llm_proxy val_env_manager.llm_proxy actor_train.model_args "
        "actor_train.data_args actor_train.training_args actor_infer.model_args actor_infer.data_args "
        "actor_infer.generating_args critic.model_args critic.data_args critic.training_args validation"
    ),
}
"""Keys that are ignored at any value, because the results do not depend on them, by the reason in the note."""

_AGENTS = "multi-turn is not said so here: agents have recipes (recipe=agentic_..., trainer/AGENTIC.md)"
_VETO = f"a veto by token is {_CORRECTION}.rollout_rs=seq_max_k2 with rollout_rs_threshold=log(veto)^2 / 2"
_LOW_HIGH = (
    f"say {_CORRECTION}.rollout_is=token|sequence|segment|geometric with rollout_is_threshold=low_high, and rollout_rs "
    "with rollout_rs_threshold=low_high"
)
_FSDP2 = "the training engine here is FSDP2 (actor.fsdp_config.*)"

_REFUSALS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    # keys without a replacement
    ("it is not here", (), (
        "data.datagen trainer.default_hdfs_dir *.model.external_lib model.lora_adapter_path ref.model "
        "reward_model.max_length")),
    ("it is not here", (False, 0), (
        "*.qat *.fsdp_config.qat model.mtp.enable rollout.quantization rollout.quantization_config_file "
        "rollout.use_fire_sampling rollout.skip_rollout rollout.skip.enable "
        "trainer.del_local_ckpt_after_load distillation.enabled rollout.over_sample_rate trainer.esi_redundant_time")),
    ("sequence, expert and pipeline parallelism are not here", (1,), (
        "*.ulysses_sequence_parallel_size *.fsdp_config.ulysses_sequence_parallel_size rollout.data_parallel_size "
        "rollout.expert_parallel_size rollout.pipeline_model_parallel_size")),
    ("separate devices for rollout or reward model are not here; all share the trainer's", (False, 0), (
        "rollout.nnodes reward.reward_model.enable_resource_pool reward_model.enable_resource_pool")),
    ("separate devices for the rollout are not here; all share the trainer's", (True,), "hybrid_engine"),
    # engines and networks
    (_FSDP2, ("fsdp", "fsdp2", "dp"), "*.strategy *.fsdp_config.strategy model_engine"),
    (f"Megatron is not here; {_FSDP2}", (), "*.megatron *.veomni"),
    ("weights are held in fp32; mixed_precision.param_dtype is the dtype of computation", ("fp32", "float32"),
     "*.fsdp_config.model_dtype"),
    ("the policy alone replays: say rollout.router_replay=true", ("disabled",),
     "ref.router_replay.mode critic.router_replay.mode reward_model.router_replay.mode"),
    ("the optimizer is torch's AdamW; betas, eps and weight_decay stand beside lr", ("AdamW", "torch.optim", {}),
     "*.optim.optimizer *.optim.optimizer_impl *.optim.override_optimizer_config"),
    ("an adapter (LoRA) is for the policy alone: say model.lora_rank, and model.lora_alpha with it", (0,),
     "*.model.lora_rank model.lora.rank"),
    ("import your code from a recipe instead", (), "model.external_lib"),
    ("say it in the folder model.path or model.tokenizer_path, or with model.override_config", (),
     "model.hf_config_path reward_model.model.tokenizer_path"),
    # rollout
    ("the engine is always continuous; known: sync and async", ("sync", "async"), "rollout.mode"),
    ("training has to sample, without penalties; rollout.val_kwargs is free", (True, 1), (
        "rollout.do_sample rollout.repetition_penalty actor_infer.generating_args.repetition_penalty "
        "actor_infer.generating_args.num_beams")),
    ("say data.max_prompt_length and data.max_response_length", (),
     "rollout.prompt_length rollout.response_length sequence_length"),
    (_AGENTS, (False,), (
        "rollout.chat_scheduler rollout.multi_turn.enable rollout.multi_turn.tool_config_path "
        "rollout.multi_turn.function_tool_path rollout.multi_turn.interaction_config_path "
        "rollout.agent.agent_loop_config_path")),
    (_AGENTS, ("single_turn_agent", {}), "rollout.agent.default_agent_loop rollout.agent.custom_async_server"),
    (f"{_AGENTS}; tools that a prompt only shows are a list of schemas in data.tools_path", (),
     "data.tool_config_path data.function_tool_path"),
    ("weights never leave the process; known: naive", ("naive",), "rollout.checkpoint_engine.backend"),
    ("episodes are kept as samples of text, without being asked: python -m trainer.inspect RUN", (),
     "agentic.render_save_dir"),
    # correction and rewards
    ("a limit of memory is the reward's or environment's own: resource.setrlimit(resource.RLIMIT_AS, ...) in its file",
     (), "reward.max_memory_mb agentic.env_pool.max_memory_mb"),
    (_VETO, (False,), "enable_catastrophic_reject"),
    (_VETO, (), f"{_CORRECTION}.rollout_token_veto_threshold algorithm.rollout_is_veto_threshold"),
    (_LOW_HIGH, ("token", "truncate"), "algorithm.rollout_is_level algorithm.rollout_is_mode"),
    (_LOW_HIGH, (), (
        f"{_CORRECTION}.rollout_rs_threshold_lower algorithm.rollout_is_threshold_lower train_infer_correction")),
    ("weights have no gradient", (True,), "train_infer_correction.is_weight.detach"),
    ("say actor.clip_ratio_c = 1 + 2 pg_clip, which is no number here", (), "dual_clip_loss"),
    ("weights are bounded from above alone", (0,), "infer_is_threshold_min"),
    (f"they are computed where read; say {_CORRECTION}.bypass_mode=true", (True,), "enable_old_logprobs_recompute"),
    (f"they are computed where read; say {_CORRECTION}.bypass_mode=true", (False,),
     "force_disable_old_logprobs_recompute"),
    ("the policy loss counts 1: divide the other coefficients by it", (1,), "rl_loss_coef"),
    ("a bonus for length is a part of your reward", (False,), "add_length_bonus"),
    ("say algorithm.norm_mean_type and algorithm.norm_std_type", (), "divide_std"),
    ("environments are entries of agentic.custom_envs, by their tags", (), "custom_env"),
    ("one ratio for each answer is actor.policy_loss.loss_mode=gspo", ("token",), "importance_sampling"),
    ("answers are not masked or weighed so; algorithm.filter_groups replaces prompts of equal answers", (False,), (
        "max_len_mask difficulty_mask error_max_len_clip difficulty_loss_weight length_loss_weight query_filter_config"
    )),
    ("reward_norm is norm_mean_type and norm_std_type, reward_shift the first alone, reward_scale the second", (False,),
     "reward_norm reward_shift reward_scale"),
    ("say what scores: reward.functions or reward.custom_reward_function: verl_lite/rewards/README.md", (), "rewards"),
    ("say data.sources.NAME.weight, by data_source", (1,), "actor_train.data_args.domain_interleave_probs"),
    ("an answer ends at a stop token of the model or at the longest length", (),
     "actor_infer.generating_args.stop_strings"),
    ("code runs in a sandbox beside the reward process; memory_mb among the kwargs of the reward code limits it",
     (1024,), " ".join(f"{section}.{name}" for name in ("url", "memory_limit_mb")
                       for section in ("reward.sandbox_fusion", "sandbox_fusion", "reward_model.sandbox_fusion"))),
    ("naive, dapo, rate_limited and remote have an equal here; for batch say "
     "reward.custom_reward_function.style=batch", ("naive", "dapo", "rate_limited", "remote", "register"),
     "reward.reward_manager reward_model.reward_manager"),
    ("only the calls per minute are limited, by reward.max_rpm", (), "reward.max_tpm reward_model.max_tpm"),
    # the run
    ("say --config several times: what a later file says wins", (), "base defaults"),
    ("keep all, and choose by `trainer.main_eval RUN --all-checkpoints`", (0,),
     "trainer.max_best_ckpt_to_keep trainer.best_ckpt_metric trainer.best_ckpt_mode"),
    ("validate on fewer prompts with data.val_max_samples", (), "trainer.val_time_budget_s"),
    ("asynchronous training is not here; leave it at sync", ("sync",), "trainer.v1.trainer_mode"),
    ("workers have the driver's environment: export the variable before the command", ({},),
     "ray_kwargs.ray_init.runtime_env.env_vars system_envs"),
    ("say max_tokens_per_step of an entry in agentic.custom_envs", (), "actor_infer.generating_args.max_new_tokens"),
    ("say agentic.train_env_manager.group_size", (1,), "actor_infer.generating_args.num_return_sequences"),
    ("a worker's own loss is actor.policy_loss.loss_mode=module:function", tuple(
        f"roll.pipeline.{name}Worker" for name in (
            "base_worker.Actor", "agentic.agentic_actor_worker.Actor", "agentic.agentic_actor_pg_worker.Actor",
            "rlvr.actor_worker.Actor", "rlvr.actor_pg_worker.ActorPG")), "actor_train.worker_cls"),
    ("say actor.ppo_mini_batch_size: the size per device x this x devices", (),
     "actor_train.training_args.gradient_accumulation_steps"),
    ("only the policy acts here", ("policy",),
     "train_env_manager.llm_proxy.proxy_type val_env_manager.llm_proxy.proxy_type"),
    ("say trainer.resume_mode=auto, or resume_path with trainer.resume_from_path", (False,), "resume_from_checkpoint"),
)  # fmt: skip
"""(reason, harmless values, keys) of the keys that would change the run at all values except null and the harmless."""

REFUSED = {name: (sentence, harmless) for sentence, harmless, names in _REFUSALS for name in names.split()}
_IDLE = {name: sentence for sentence, names in NO_EFFECT.items() for name in names.split()}


def _if_true(value: Any) -> dict[Any, Any]:
    return {True: value, "True": value, "true": value, False: None, "False": None, "false": None}


_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
VALUES: dict[str, dict[Any, Any]] = {
    "data.reward_fn_key": {"data_source": None},
    "actor.tis_imp_ratio_cap": {-1: None, 0: None},
    "actor.router_replay.mode": {"disabled": None, "R3": True},
    **{name: _if_true(1) for name in _REMOVE_PREVIOUS},
    **{name: _if_true("reinforce") for name in _POLICY_GRADIENT},
    "algorithm.rollout_is": _if_true("token"),
    **{f"{part}.generating_args.top_k": {0: -1} for part in ("actor_infer", "validation")},
    "actor_train.model_args.disable_gradient_checkpointing": {True: False, False: True},
    **dict.fromkeys(("pg_variant", "actor_train.pg_variant"), {"ppo": "vanilla", "vanilla": "gpg"}),
    f"{_CORRECTION}.rollout_rs": {
        "token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1", "k3": "seq_mean_k3",
    },
    "algorithm.filter_groups.metric": {"seq_reward": "score"},
    "rollout.dtype": _DTYPES,
    **{f"{role}.fsdp_config.mixed_precision.{dtype}": _DTYPES
       for role in _ROLES for dtype in ("param_dtype", "reduce_dtype")},
}  # fmt: skip
"""Translations of values by key of verl or ROLL. None = the key is ignored at this value."""


@dataclass(frozen=True)
class Verdict:
    """The translation of a key: options to set, a note for the user, and the reason if the key is refused."""

    settings: dict[str, Any] = field(default_factory=dict)
    note: str | None = None
    refusal: str | None = None


def translate(name: str, value: Any) -> Verdict | None:
    """Returns the verdict on a verl or ROLL key that is no key here; None if neither has the key.

    Args:
        name: dotted key without `actor_rollout_ref.`.
    """
    parts = name.split(".")
    if parts[-1] == "_target_":
        return Verdict()
    for depth in range(len(parts), 0, -1):
        known, below = ".".join(parts[:depth]), "".join(f".{part}" for part in parts[depth:])
        for entry in (known, *([".".join(["*", *parts[1:depth]])] if parts[0] in _ROLES else [])):
            if entry in REFUSED:
                return refused(name, value, *REFUSED[entry])
            if entry in _IDLE:
                return Verdict(note=f"{name}={value} has no effect here: {_IDLE[entry]}")
            if entry in RENAMED:
                return _renamed(name, value, RENAMED[entry] + below, entry)
    return None


_OF_PROMPTS = {
    **{f"{name}_batch_size": f"data.{to}_batch_size" for name, to in (("rollout", "train"), ("val", "val"))},
    "actor_infer.generating_args.num_return_sequences": "rollout.n",
    "actor_infer.generating_args.max_new_tokens": "data.max_response_length",
}
"""Names of ROLL keys in a run on prompts. In an agentic run these keys refer to episodes."""


def together(given: Mapping[str, Any]) -> dict[str, Verdict]:
    """Returns verdicts by name on keys of ROLL whose meaning depends on other keys. given: all keys that are set."""
    found: dict[str, Verdict] = {}
    if not given.get("use_pg_clip_range"):
        for name in ("pg_clip_low", "pg_clip_high"):
            found[name] = Verdict(note=f"{name} has no effect: use_pg_clip_range is not true")
    clip = given.get("actor.clip_ratio", given.get("pg_clip", 0.2))
    if not given.get("dual_clip_loss") or isinstance(clip, int | float):
        bound = 1 + 2 * clip if given.get("dual_clip_loss") else None
        found["dual_clip_loss"] = called("dual_clip_loss", {"actor.clip_ratio_c": bound})
    key = "infer_correction" if given.get("infer_correction") else "train_infer_correction"
    parts = ("infer_", "enable_token_reject", "enable_seq_reject", "train_infer_correction.")
    for name in given:
        if name.startswith(parts) and name not in REFUSED and name not in _IDLE:
            found[name] = called(key, _correction_of_roll(given))
    sections = {name.partition(".")[0] for name in given}
    if sections & {"validation", "rewards", "num_return_sequences_in_group"} and "train_env_manager" not in sections:
        found |= {name: called(name, {to: given[name]}) for name, to in _OF_PROMPTS.items() if name in given}
    return found


_ROLL_DEFAULTS = {
    "adv_estimator": "gae",
    "lambd": 0.95,
    "init_kl_coef": 0.2,
    "loss_agg_mode": "seq-mean-token-mean",
    "dual_clip_loss": "null",
    "value_clip": "null",
}
"""Defaults of ROLL that differ from those used here."""


def left_out(given: Mapping[str, Any], value: Callable[[str], Any], source: Callable[[str], str]) -> list[str]:
    """Returns a note on omitted keys with another default in ROLL, for files of ROLL (which set `pretrain`).

    Args:
        given: all keys that are set.
        value: returns the value of a key used here.
        source: returns the source of a key used here.
    """
    keys = {RENAMED.get(name, "actor.clip_ratio_c"): theirs for name, theirs in _ROLL_DEFAULTS.items()}
    ours = [f"{key}={value(key)} (ROLL: {theirs})" for key, theirs in keys.items() if source(key) == "default"]
    return [f"left out, and another default here: {', '.join(ours)}"] if ours and "pretrain" in given else []


def _correction_of_roll(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translates ROLL's train_infer_correction, or its older form infer_correction, to algorithm.rollout_correction."""
    defaults = {"enabled": False, "weight_type": "token", "upper_bound": 1.2}
    is_on, by, bound = (given.get(f"train_infer_correction.is_weight.{name}", one) for name, one in defaults.items())
    filters: list[Mapping[str, Any]] = given.get("train_infer_correction.filters") or []
    if given.get("infer_correction"):
        by, bound = given.get("infer_is_mode", "token"), given.get("infer_is_threshold_max", 2.0)
        is_on, rows = by not in (None, "none"), given.get("enable_seq_reject")
        filters = [
            {"enabled": level not in (None, False, "None"), "agg_type": level, "ratio_low": low, "ratio_high": high}
            | {f"ratio_{to}": given[name] for end, to in (("min", "low"), ("max", "high"))
               if (name := f"infer_{of}_mask_threshold_{end}") in given}
            for of, level, low, high in (
                ("token", "token" if given.get("enable_token_reject") else None, 0.0, 2.0), ("seq", rows, 0.1, 10.0))
        ]  # fmt: skip
    bounds: dict[str, str] = {}
    for one in (one for one in filters if one.get("enabled")):
        level = WEIGHT_LEVELS.get(one.get("agg_type", "token"), one.get("agg_type"))
        for measure, default, low, high in (("ratio", True, 0.8, 1.2), ("diff", False, -0.2, 0.2)):
            if one.get(f"{measure}_enabled", default):
                ends = one.get(f"{measure}_low", low), one.get(f"{measure}_high", high)
                bounds[f"{level}_{measure}"] = "_".join(map(str, ends))
    settings = {"rollout_is": by, "rollout_is_threshold": str(math.inf if bound is None else bound)} if is_on else {}
    if bounds:
        settings |= {"rollout_rs": ",".join(bounds), "rollout_rs_threshold": ",".join(bounds.values())}
    return {f"{_CORRECTION}.{name}": value for name, value in settings.items()}


def called(name: str, settings: Mapping[str, Any]) -> Verdict:
    """Returns the verdict on a renamed key. settings: the options to set, by name."""
    shown = ", with ".join(f"{to}={'null' if new is None else new}" for to, new in settings.items())
    return Verdict(dict(settings), f"{name} is called {shown} here" if settings else f"{name} asks for nothing")


def refused(name: str, value: Any, sentence: str, harmless: tuple[Any, ...]) -> Verdict:
    """Returns the verdict on a key that would change the run at all values except null and the harmless."""
    if value is None or is_interpolation(value) or value in harmless:  # the key of a reference has its own verdict
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
    if (further := translate(target, value)) is not None:
        return replace(further, note=further.note and further.note.replace(target, name, 1))
    if entry.endswith(".lora_target") and isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    return called(name, {target: value} | BESIDE.get(entry, {}))


def same_meaning(name: str, value: Any) -> tuple[Any, str | None]:
    """Returns the value used here for a value of verl, and a note if the meaning differs from verl's."""
    if name == "trainer.logger" and "file" in value:
        renamed = ["jsonl" if entry == "file" else entry for entry in value]
        return renamed, "trainer.logger: verl's file tracker is called jsonl here"
    if isinstance(value, str) and value in VALUES.get(name, {}):
        return VALUES[name][value], None
    if name == "actor.policy_loss.loss_mode" and value == "bypass_mode":
        return "vanilla", f"{name}=bypass_mode: {_CORRECTION}.bypass_mode=true says so here, and the loss is vanilla"
    if name == "algorithm.filter_groups.max_num_gen_batches" and not is_interpolation(value) and value <= 0:
        return 10, f"{name}={value}: verl goes on for ever; here a step has a budget, 10"
    if name == "trainer.save_freq" and value == -1:
        return value, f"{name}=-1: a checkpoint is still saved at the end; 0 = never"
    if name == "reward_model.enable" and value is True:
        return value, f"{name}=true: verl takes the model's score alone, which is reward.function_weight=0 here"
    return value, None
