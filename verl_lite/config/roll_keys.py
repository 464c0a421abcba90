"""What becomes of ROLL's keys of an agentic run, which stand at the top level there: a part of `verl_keys`.

A key that has the same meaning here is renamed. Where the same word is counted or divided in another way, the sentence
says what to set.
"""

from __future__ import annotations

from verl_lite.config.rules import NoEffect, Only, Renamed, Rule

_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_ONE_ENGINE = NoEffect("trainer, engine and reference share all devices; FSDP2 trains, and rollout.name generates")
_ANY_BATCH = NoEffect("any number of rows works as it is")
_TOP: dict[str, str] = {
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
    "ppo_epochs": "actor.ppo_epochs",
    "pg_clip": "actor.clip_ratio",
    "pg_clip_low": "actor.clip_ratio_low",
    "pg_clip_high": "actor.clip_ratio_high",
    "ratio_type": "actor.ratio_type",
    "loss_agg_mode": "actor.loss_agg_mode",
    "use_kl_loss": "actor.use_kl_loss",
    "kl_loss_coef": "actor.kl_loss_coef",
    "entropy_loss_coef": "actor.entropy_coeff",
    "max_grad_norm": "actor.optim.clip_grad",
    "value_clip": "critic.cliprange_value",
    "actor_train.model_update_frequency": "agentic.model_update_frequency",
    "actor_train.training_args.learning_rate": "actor.optim.lr",
    "actor_train.training_args.weight_decay": "actor.optim.weight_decay",
    "actor_train.training_args.warmup_steps": "actor.optim.lr_warmup_steps",
    "actor_train.training_args.lr_scheduler_type": "actor.optim.lr_scheduler_type",
    "actor_train.training_args.per_device_train_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "critic.training_args.learning_rate": "critic.optim.lr",
    "actor_infer.generating_args.temperature": "rollout.temperature",
    "actor_infer.generating_args.top_p": "rollout.top_p",
    "actor_infer.strategy_args.strategy_name": "rollout.name",
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": "rollout.gpu_memory_utilization",
}
"""Keys of one meaning under two names."""

_OF_AGENTS = (
    "custom_envs",
    "train_env_manager",
    "val_env_manager",
    "rollout_batch_size",
    "val_batch_size",
    "async_generation_ratio",
    "reward_normalization",
    "episode_reward_weight",
    "step_reward_weight",
    "step_reward_gamma",
    "logging_steps",
    "render_save_dir",
)
"""Keys that stand below `agentic.` here, with all that is below them."""

_OF_ENV_MANAGERS: dict[str, Rule] = {
    "max_env_num_per_worker": NoEffect("agentic.env_pool.num_workers processes share the environments"),
    "llm_proxy.proxy_type": Only(("policy",), "the policy acts", "only the policy acts here"),
    "llm_proxy": NoEffect("the policy acts"),
    "world_size": NoEffect("agentic.env_pool.num_workers processes share the environments"),
}

ROLL_RULES: dict[str, Rule] = {
    **{name: Renamed(target) for name, target in _TOP.items()},
    **{name: Renamed(f"agentic.{name}") for name in _OF_AGENTS},
    "target_kl": Renamed("algorithm.kl_ctrl.target_kl", also={"algorithm.kl_ctrl.type": "adaptive"}),
    "actor_infer.generating_args.top_k": Renamed("rollout.top_k", {0: -1}),
    "dual_clip_loss": Renamed("actor.clip_ratio_c", {True: 1.4, False: 1e9}, why="1 + 2 pg_clip, at ROLL's 0.2"),
    "actor_train.model_args.dtype": Renamed("actor.fsdp_config.mixed_precision.param_dtype", _DTYPES),
    "batch_adjust_mode": _ANY_BATCH,
    "agentic.batch_adjust_mode": _ANY_BATCH,
    "use_pg_clip_range": NoEffect("actor.clip_ratio_low and clip_ratio_high are read where they are given"),
    "enable_reference": NoEffect("there is a reference model exactly where a KL term reads it"),
    "enable_old_logprobs_recompute": Only(
        (True,), "they are computed where something reads them", "say algorithm.rollout_correction.bypass_mode=true"
    ),
    "sequence_length": Only((), "", "say data.max_prompt_length and data.max_response_length, which add up to it"),
    "actor_infer.generating_args.max_new_tokens": Only(
        (), "", "tokens of a turn are max_tokens_per_step of its entry in agentic.custom_envs"
    ),
    "actor_infer.generating_args.num_return_sequences": Only((1,), "", "agentic.train_env_manager.group_size says so"),
    "actor_infer.generating_args.num_beams": Only((1,), "training samples", "training has to sample; leave it at 1"),
    "actor_infer.generating_args.repetition_penalty": Only((1, 1.0), "", "the trainer knows no such penalty"),
    "actor_train.training_args.gradient_accumulation_steps": Only(
        (), "", "rows of an optimizer step are actor.ppo_mini_batch_size: the size per device x this x devices"
    ),
    **{
        f"{manager}.{name}": rule
        for manager in ("train_env_manager", "val_env_manager")
        for name, rule in _OF_ENV_MANAGERS.items()
    },
    "env_monitor": NoEffect("agentic.env_pool.timeout_s ends what hangs"),
    "partial_gpu_mode": _ONE_ENGINE,
    "actor_train.model_args": NoEffect("the model says so itself; model.* changes it"),
    "actor_train.data_args": NoEffect("there is no dataset"),
    "actor_train.training_args": NoEffect("learning rate, weight decay, warm-up and schedule are read"),
    **{f"{role}.{part}": _ONE_ENGINE for role in ("actor_train", "actor_infer", "critic")
       for part in ("strategy_args", "device_mapping", "infer_batch_size")},
    "actor_infer.model_args": NoEffect("the engine has the policy's weights; rollout.dtype is its dtype"),
    "actor_infer.data_args": NoEffect("there is no dataset"),
    "actor_infer.generating_args": NoEffect("temperature, top_p and top_k are read"),
    "reference": NoEffect("the reference is the policy before training (model.path)"),
    "track_with": NoEffect("trainer.logger names the trackers"),
    "tracker_kwargs": NoEffect("trainer.logger names the trackers"),
    "logging_dir": NoEffect("logs lie in the run folder"),
    "checkpoint_config": NoEffect("checkpoints lie in the run folder, trainer.default_local_dir"),
    "resume_from_checkpoint": Only(
        (False,), "a new run is started", "say trainer.resume_mode=auto, or resume_path with trainer.resume_from_path"
    ),
}  # fmt: skip
"""The table, in the form of `verl_keys.RULES`."""
