"""The rows for the options of `trainer.main_ppo`."""

from verl_lite.config.idle_options.conditions import (
    beside_is_not,
    engine_is_hf,
    engine_is_hf_or_on_cpu,
    estimator_is_not,
    freezes_vision_anyway,
    has_no_scores_of_functions,
    has_single_teacher,
    if_config,
    is_on_cpu,
    is_on_gpu,
    is_unused,
    loss_is_not,
    scores_one_by_one,
    sizes_by,
    unless,
)
from verl_lite.config.idle_options.shared_rows import LEAVE_OUT
from verl_lite.config.idle_options.table import IdleOption
from verl_lite.config.micro_batches import MICRO_BATCHES

_NO_CRITIC = "only the estimator gae has a critic"
_LOSS_REMEDY = "set actor.policy_loss.loss_mode, or leave it out"
_ESTIMATOR_REMEDY = "set algorithm.adv_estimator, or leave it out"
# losses that read the clip range of the ratio
_CLIPPING_LOSSES = ("vanilla", "a3po", "gspo", "geo_mean", "clip_cov", "cispo", "dppo_tv", "dppo_kl")
_PROMPT_KEYS = tuple(
    f"data.{name}"
    for name in (
        "train_files",
        "val_files",
        "prompt_key",
        "image_key",
        "image_folder",
        "max_pixels",
        "columns",
        "data_source",
        "prompt_template",
        "ground_truth_regex",
        "tools_path",
        "sources",
        "sampler.",
        "custom_cls.",
        "train_batch_size",
        "val_batch_size",
        "truncation",
        "filter_overlong_prompts",
        "train_max_samples",
        "filter_overlong_prompts_workers",
        "val_max_samples",
        "shuffle",
        "seed",
    )
)
_FUNCTION_KEYS = tuple(
    f"reward.{name}"
    for name in (
        "custom_reward_function.",
        "remote.",
        "functions",
        "reward_kwargs",
        "num_workers",
        "batch_size",
        "max_concurrent",
        "max_rpm",
        "timeout_s",
    )
)


def _while_off(switch: str, *keys: str) -> IdleOption:
    """Returns the row of options that have no effect while a switch is off."""
    return IdleOption(keys, unless(switch), f"{switch}=false", f"set {switch}=true, or leave it out")


PPO_ROWS: tuple[IdleOption, ...] = (
    # distillation
    IdleOption(
        ("distillation.distillation_loss.", "distillation.teacher_key"),
        if_config(lambda config: config.distillation.enabled is not False and not config.distillation.teachers),
        "the run has no teachers and would train on rewards alone",
        "set distillation.teachers.NAME.path=FOLDER, or leave it out",
        is_error=True,
    ),
    IdleOption(
        ("distillation.distillation_loss.", "distillation.teacher_key", "distillation.teachers"),
        if_config(lambda config: not config.distillation.is_active),
        "distillation.enabled=false",
        "set distillation.enabled=true, or leave it out",
    ),
    IdleOption(
        ("distillation.distillation_loss.topk", "distillation.distillation_loss.topk_source"),
        if_config(lambda config: not config.distillation.takes_topk),
        "distillation.distillation_loss.loss_mode=k1 compares the sampled token only",
        "set loss_mode to a divergence, such as forward_kl_topk, or leave it out",
    ),
    IdleOption(
        ("distillation.distillation_loss.topk_source",),
        if_config(lambda config: config.distillation.distillation_loss.topk == -1),
        "distillation.distillation_loss.topk=-1 compares the whole vocabulary",
        "set topk, or leave it out",
    ),
    IdleOption(
        ("distillation.distillation_loss.loss_max_clamp",),
        if_config(lambda config: config.distillation.takes_topk),
        "it bounds the advantage of loss_mode=k1",
        "leave it out",
    ),
    IdleOption(
        ("distillation.teacher_key",),
        if_config(has_single_teacher),
        "the only teacher has no key, so that all rows are its rows",
        "set distillation.teachers.NAME.key, or leave it out",
    ),
    # data
    IdleOption(
        _PROMPT_KEYS,
        if_config(lambda config: not config.reads_prompts),
        "the samples are episodes of the environments in agentic.train_env_manager.tags, which read no data files",
        LEAVE_OUT,
    ),
    IdleOption(
        ("data.sampler.class_name",),
        unless("data.sampler.class_path"),
        "data.sampler.class_path is null",
        "set data.sampler.class_path, or leave it out",
    ),
    IdleOption(
        ("data.custom_cls.name",),
        unless("data.custom_cls.path"),
        "data.custom_cls.path is null",
        "set data.custom_cls.path, or leave it out",
    ),
    IdleOption(
        ("data.shuffle",),
        lambda situation, key: bool(situation.value("data.sampler.class_path")),
        "the sampler of data.sampler.class_path chooses the order",
        LEAVE_OUT,
    ),
    IdleOption(
        ("data.filter_overlong_prompts_workers",),
        unless("data.filter_overlong_prompts"),
        "data.filter_overlong_prompts=false filters nothing",
        "set data.filter_overlong_prompts=true, or leave it out",
    ),
    IdleOption(
        ("data.val_batch_size", "data.val_max_samples"),
        unless("data.val_files"),
        "data.val_files is empty",
        "set data.val_files, or leave it out",
    ),
    IdleOption(
        ("data.image_key", "data.image_folder", "data.max_pixels"),
        lambda situation, key: situation.reads_images is False,
        "the model of model.path reads only text",
        LEAVE_OUT,
    ),
    # networks
    IdleOption(
        ("actor.freeze_vision_tower",),
        freezes_vision_anyway,
        "the vision tower is trained only in a vision-language model without an adapter (model.lora_rank=0)",
        "set model.path or model.lora_rank, or leave it out",
    ),
    IdleOption(
        ("critic.",),
        is_unused("critic"),
        f"the estimator of the run has no critic; {_NO_CRITIC}",
        "set algorithm.adv_estimator=gae, or leave it out",
    ),
    IdleOption(
        ("ref.",),
        is_unused("reference"),
        "no KL term needs the reference model",
        "set actor.use_kl_loss=true or algorithm.use_kl_in_reward=true, or leave it out",
    ),
    IdleOption(
        ("ref.fsdp_config.",),
        is_unused("reference_model"),
        "with model.lora_rank above 0 the reference is the policy without its adapter",
        "set actor.fsdp_config, or leave it out",
    ),
    _while_off("reward_model.enable", "reward_model."),
    IdleOption(
        (
            "rollout.log_prob_use_dynamic_bsz",
            "rollout.log_prob_max_token_len_per_gpu",
            "rollout.log_prob_micro_batch_size_per_gpu",
        ),
        is_unused("old_log_probs"),
        "no step needs a pass for old_log_probs",
        LEAVE_OUT,
    ),
    IdleOption(
        tuple(options.tokens[0] for options in MICRO_BATCHES.values()),
        sizes_by(tokens=False),
        "micro-batches are sized by rows",
        "set the role's use_dynamic_bsz=true, or leave it out",
    ),
    IdleOption(
        tuple(options.rows[0] for options in MICRO_BATCHES.values()),
        sizes_by(tokens=True),
        "micro-batches are sized by tokens (use_dynamic_bsz=true)",
        "set the role's use_dynamic_bsz=false, or leave it out",
    ),
    # the policy loss
    IdleOption(
        ("actor.clip_ratio",),
        if_config(lambda config: None not in (config.actor.clip_ratio_low, config.actor.clip_ratio_high)),
        "actor.clip_ratio_low and actor.clip_ratio_high are set",
        LEAVE_OUT,
    ),
    IdleOption(
        ("actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high"),
        loss_is_not(*_CLIPPING_LOSSES),
        "the policy loss does not clip the ratio",
        _LOSS_REMEDY,
    ),
    IdleOption(
        ("actor.clip_ratio_c",),
        loss_is_not("vanilla", "a3po", "dppo_tv", "dppo_kl"),
        "the policy loss has no dual clip",
        _LOSS_REMEDY,
    ),
    IdleOption(
        ("actor.ratio_type",),
        loss_is_not("vanilla", "cispo", "tis", "topr"),
        "the policy loss has its own ratio",
        _LOSS_REMEDY,
    ),
    IdleOption(("actor.tau_pos", "actor.tau_neg"), loss_is_not("sapo"), "only sapo reads it", _LOSS_REMEDY),
    *(
        IdleOption((f"actor.policy_loss.{name}",), loss_is_not(loss), f"only {loss} reads it", _LOSS_REMEDY)
        for name, loss in (
            ("clip_cov_ratio", "clip_cov"),
            ("clip_cov_lb", "clip_cov"),
            ("clip_cov_ub", "clip_cov"),
            ("kl_cov_ratio", "kl_cov"),
            ("ppo_kl_coef", "kl_cov"),
            ("dro_beta", "dro"),
            ("tis_lower_bound", "tis"),
            ("tis_upper_bound", "tis"),
            ("topr_positive_weight", "topr"),
            ("topr_negative_weight", "topr"),
            ("kimi15_tau", "kimi15"),
            ("cispo_unified_mask", "cispo"),
        )
    ),
    IdleOption(
        ("actor.loss_scale_factor",),
        if_config(lambda config: config.actor.loss_agg_mode != "seq-mean-token-sum-norm"),
        "only actor.loss_agg_mode=seq-mean-token-sum-norm divides by it",
        "set that mode, or leave it out",
    ),
    _while_off("actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type"),
    # generation
    IdleOption(
        ("rollout.nnodes", "rollout.n_gpus_per_node"),
        if_config(lambda config: config.hybrid_engine),
        "hybrid_engine=true: the engines share the devices of the trainer",
        "set trainer.n_gpus_per_node, or hybrid_engine=false for engines on devices of their own",
    ),
    IdleOption(
        ("rollout.enable_chunked_prefill", "rollout.enforce_eager", "rollout.gpu_memory_utilization"),
        engine_is_hf_or_on_cpu,
        "only vLLM on a GPU reads it",
        LEAVE_OUT,
    ),
    IdleOption(("rollout.enable_prefix_caching",), engine_is_hf, "only vLLM reads it", LEAVE_OUT),
    IdleOption(
        ("rollout.kv_cache_memory_mb",),
        is_on_gpu,
        "it limits the cache on a CPU",
        "set rollout.gpu_memory_utilization, or leave it out",
    ),
    IdleOption(("rollout.free_cache_engine",), is_on_cpu, "the engine frees memory on a GPU only", LEAVE_OUT),
    IdleOption(
        ("rollout.lora_sync",),
        unless("model.lora_rank"),
        "model.lora_rank=0: there is no adapter to send",
        "set model.lora_rank, or leave it out",
    ),
    IdleOption(
        ("rollout.recompute_kv_on_update",),
        if_config(lambda config: not config.spans_updates),
        "no sample continues under new weights",
        "set async_training.partial_rollout=true, or leave it out",
    ),
    IdleOption(
        ("rollout.val_kwargs.",),
        if_config(lambda config: not config.validates),
        "the run has no validation data",
        "set data.val_files, or leave it out",
    ),
    IdleOption(
        ("rollout.val_kwargs.temperature", "rollout.val_kwargs.top_p", "rollout.val_kwargs.top_k"),
        unless("rollout.val_kwargs.do_sample"),
        "rollout.val_kwargs.do_sample=false decodes greedily",
        "set rollout.val_kwargs.do_sample=true, or leave it out",
    ),
    # advantages
    IdleOption(
        ("algorithm.gamma",),
        estimator_is_not("gae", "reinforce_plus_plus", "reinforce", "agentic_reinforce", "step_reinforce", "gigpo"),
        "the estimator does not discount",
        _ESTIMATOR_REMEDY,
    ),
    IdleOption(("algorithm.lam",), estimator_is_not("gae"), "only gae reads it", _ESTIMATOR_REMEDY),
    IdleOption(
        ("algorithm.norm_adv_by_std_in_grpo",),
        estimator_is_not("grpo", "grpo_vectorized", "grpo_passk", "gdpo"),
        "only grpo, grpo_passk and gdpo divide by the group's standard deviation",
        _ESTIMATOR_REMEDY,
    ),
    IdleOption(
        ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
        estimator_is_not("gdpo"),
        "only gdpo reads it",
        "set algorithm.adv_estimator=gdpo, or leave it out",
    ),
    _while_off(
        "algorithm.filter_groups.enable",
        "algorithm.filter_groups.metric",
        "algorithm.filter_groups.max_num_gen_batches",
    ),
    _while_off("algorithm.use_pf_ppo", "algorithm.pf_ppo."),
    IdleOption(
        ("algorithm.pf_ppo.weight_pow",),
        beside_is_not("reweight_method", "pow"),
        "only algorithm.pf_ppo.reweight_method=pow reads it",
        LEAVE_OUT,
    ),
    _while_off("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl."),
    IdleOption(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        beside_is_not("type", "adaptive"),
        "algorithm.kl_ctrl.type=fixed keeps the coefficient",
        "set algorithm.kl_ctrl.type=adaptive, or leave it out",
    ),
    IdleOption(
        (
            "algorithm.rollout_correction.rollout_is_threshold",
            "algorithm.rollout_correction.rollout_is_batch_normalize",
        ),
        unless("algorithm.rollout_correction.rollout_is"),
        "algorithm.rollout_correction.rollout_is=null",
        "set algorithm.rollout_correction.rollout_is=token, or leave it out",
    ),
    IdleOption(
        ("algorithm.rollout_correction.rollout_rs_threshold",),
        unless("algorithm.rollout_correction.rollout_rs"),
        "algorithm.rollout_correction.rollout_rs=null",
        "set algorithm.rollout_correction.rollout_rs, such as token_k1, or leave it out",
    ),
    _while_off("algorithm.rollout_correction.bypass_mode", "algorithm.rollout_correction.loss_type"),
    # rewards
    IdleOption(
        _FUNCTION_KEYS,
        if_config(has_no_scores_of_functions),
        "no reward function is called: environments return the scores, or reward.function_weight=0",
        "leave it out, or set reward.function_weight",
    ),
    IdleOption(
        ("reward.custom_reward_function.name", "reward.custom_reward_function.style"),
        unless("reward.custom_reward_function.path"),
        "reward.custom_reward_function.path=null",
        "set reward.custom_reward_function.path=FILE.py, or leave it out",
    ),
    IdleOption(
        ("reward.reward_kwargs",),
        lambda situation, key: bool(situation.value("reward.functions")),
        "each part of reward.functions has its own kwargs",
        "set reward.functions.PART.kwargs",
    ),
    IdleOption(
        ("reward.remote.max_retries", "reward.remote.api_key_env"),
        unless("reward.remote.url"),
        "reward.remote.url=null",
        "set reward.remote.url, or leave it out",
    ),
    _while_off("reward.overlong_buffer.enable", "reward.overlong_buffer."),
    IdleOption(
        ("reward.batch_size",),
        if_config(scores_one_by_one),
        "the reward function takes one sample per call",
        "set reward.custom_reward_function.style=batch, or leave it out",
    ),
    # agents
    IdleOption(
        ("agentic.",),
        if_config(lambda config: not config.is_agentic),
        "the run has neither a program nor environments",
        "set agentic.program or agentic.train_env_manager.tags, or leave it out",
        # the weights of runs on prompts are sent at this frequency, too
        excluded=("agentic.model_update_frequency",),
    ),
    IdleOption(
        ("agentic.program_kwargs", "agentic.program_options.", "agentic.endpoint."),
        if_config(lambda config: not config.agentic.has_program),
        "the run has no program",
        "set agentic.program, or leave it out",
    ),
    IdleOption(
        (
            "agentic.train_env_manager.",
            "agentic.val_env_manager.",
            "agentic.custom_envs",
            "agentic.rollout_batch_size",
            "agentic.val_batch_size",
            "agentic.env_pool.timeout_s",
        ),
        if_config(lambda config: config.agentic.has_program),
        "the episodes are those of the program",
        "set data.train_batch_size, rollout.n or agentic.program_options instead, or leave it out",
    ),
    IdleOption(
        ("agentic.val_env_manager.", "agentic.val_batch_size"),
        unless("agentic.val_env_manager.tags"),
        "agentic.val_env_manager.tags is empty",
        "set agentic.val_env_manager.tags, or leave it out",
    ),
    IdleOption(
        ("agentic.train_env_manager.max_replaced_groups",),
        if_config(
            lambda config: (
                config.agentic.train_env_manager.group_filter_cls is None and not config.algorithm.filter_groups.enable
            )
        ),
        "no filter drops groups",
        "set agentic.train_env_manager.group_filter_cls, or leave it out",
    ),
    IdleOption(
        ("agentic.episode_reward_weight", "agentic.step_reward_weight"),
        estimator_is_not("gigpo"),
        "only gigpo reads it",
        "set algorithm.adv_estimator=gigpo, or leave it out",
    ),
    IdleOption(
        ("agentic.step_reward_gamma",),
        estimator_is_not("gigpo", "step_reinforce"),
        "only gigpo and step_reinforce read it",
        _ESTIMATOR_REMEDY,
    ),
    # the run
    IdleOption(
        ("trainer.total_epochs",),
        if_config(lambda config: not config.reads_prompts),
        "environments have no epochs",
        "set trainer.total_training_steps",
    ),
    IdleOption(
        ("trainer.log_val_generations", "trainer.validation_data_dir"),
        if_config(lambda config: not config.validates),
        "the run has no validation data",
        "set data.val_files, or leave it out",
    ),
)
