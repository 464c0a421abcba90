"""The conflicts between the options of `trainer.main_ppo`; those of agents are in `agent_rows.py`."""

from collections.abc import Callable, Mapping

from verl_lite.config.conflicts.agent_rows import AGENT_ROWS
from verl_lite.config.conflicts.shared_rows import loss_facts
from verl_lite.config.conflicts.table import Conflict
from verl_lite.config.fields import FreeDict
from verl_lite.config.micro_batches import MICRO_BATCHES, MicroBatchOptions
from verl_lite.config.option_table import value_of
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.rollout import SAMPLED
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl_lite.errors import UserError
from verl_lite.machine.device import is_on_cpu
from verl_lite.registry import takes

PROGRAM_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "gpg")
"""Estimators with one advantage per row that depends only on the scores of the group."""
_STALENESS = "async_training.max_off_policy_threshold"
_PARTIAL = "async_training.partial_rollout"
_ESTIMATOR = "algorithm.adv_estimator"
_CORRECTION = "algorithm.rollout_correction"
_LOSS_MODE = "actor.policy_loss.loss_mode"

# ------------------------------------------------------------------------------------- data, lengths and batches


def _micro_batch_rows(options: MicroBatchOptions) -> tuple[Conflict[PPOConfig], Conflict[PPOConfig]]:
    """Returns the rows of one pass: its micro-batches have a size, and hold the longest sample."""
    size_key = options.rows[0]
    budget_key = options.tokens[0]

    def has_no_size(config: PPOConfig, size: int | None) -> bool:
        # a switch that is null follows the actor's, whose own row reports a missing size
        return value_of(config, options.switch) is False and options.micro_batch_size(config) is None

    def is_too_small(config: PPOConfig, budget: int | None) -> bool:
        if budget is None or not options.uses_tokens(config):
            return False
        # the ranks that share a sequence also share its tokens
        ranks = max(1, config.sequence_parallel_size(options.role))
        return budget * ranks < config.longest_sample

    def least_budget(config: PPOConfig) -> str:
        longest = config.longest_sample
        ranks = max(1, config.sequence_parallel_size(options.role))
        if ranks == 1:
            return f"set {budget_key} to at least {longest}"
        return f"set {budget_key} to at least {longest} in total on the {ranks} ranks that share a sequence"

    return (
        Conflict(
            (size_key,),
            has_no_size,
            "micro-batches of a fixed number of sequences need this number",
            f"set {size_key}",
            beside=(options.switch,),
        ),
        Conflict(
            (budget_key,),
            is_too_small,
            _longest_sample("a micro-batch cannot hold one sample"),
            least_budget,
        ),
    )


def _longest_sample(reason: str) -> Callable[[PPOConfig], str]:
    """Returns a reason that names the length of the longest sample."""
    return lambda config: f"{reason}, data.max_prompt_length + data.max_response_length = {config.longest_sample}"


def _is_over_batch(config: PPOConfig, mini_batch: int | None) -> bool:
    # with environments, a mini-batch counts rows instead of prompts
    return config.reads_prompts and mini_batch is not None and mini_batch > config.data.train_batch_size


def _selects_prompts_twice(config: PPOConfig, sampler: str | None) -> bool:
    if not sampler or not config.reads_prompts:
        return False
    for source in config.data.sources.values():
        # an entry of another form is reported by the section's `check`
        if isinstance(source, Mapping) and source.get("weight"):
            return True
    return False


def _context(config: PPOConfig) -> int:
    """Returns the context length of the rollout engine in tokens."""
    return config.rollout.max_model_len or config.longest_sample


LENGTH_ROWS: tuple[Conflict[PPOConfig], ...] = (
    Conflict(
        ("data.sampler.class_path",),
        _selects_prompts_twice,
        "the sampler and the weights of the sources both select the prompts",
        "remove one of them",
        beside=("data.sources",),
    ),
    Conflict(
        ("actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size"),
        _is_over_batch,
        "a mini-batch is larger than the batch",
        lambda config: f"set at most {config.data.train_batch_size} prompts",
        beside=("data.train_batch_size",),
    ),
    *(row for options in MICRO_BATCHES.values() for row in _micro_batch_rows(options)),
    Conflict(
        ("rollout.max_model_len",),
        lambda config, length: length is not None and length < config.longest_sample,
        _longest_sample("the context is shorter than one sample"),
        lambda config: f"set rollout.max_model_len={config.longest_sample} or more, or null",
    ),
    Conflict(
        ("rollout.max_num_batched_tokens",),
        # with chunked prefill, a prompt is split over several steps
        lambda config, tokens: not config.rollout.enable_chunked_prefill and tokens < _context(config),
        "one step of the engine is shorter than the context",
        lambda config: (
            f"set rollout.max_num_batched_tokens={_context(config)} or more, or rollout.enable_chunked_prefill=true"
        ),
        beside=("rollout.enable_chunked_prefill",),
    ),
)

# ------------------------------------------------------------------------------------------------ rollout engines


def _engines_on_own_devices(config: PPOConfig) -> bool:
    return not config.hybrid_engine and config.rollout.nnodes > 0


ENGINE_ROWS: tuple[Conflict[PPOConfig], ...] = (
    Conflict(
        ("rollout.tensor_model_parallel_size",),
        lambda config, devices: devices > 1 and config.rollout.name == "hf",
        "the engine hf runs on one device",
        "set rollout.tensor_model_parallel_size=1",
        beside=("rollout.name",),
    ),
    Conflict(
        ("rollout.top_k",),
        lambda config, top_k: top_k < 1 and (config.rollout.top_p < 1 or config.rollout.min_p > 0),
        "training needs the tokens that could be sampled at each position",
        "set rollout.top_k, such as 128, the largest number of tokens that can be sampled at a position; its memory is "
        "4 bytes per token and candidate",
        beside=("rollout.top_p", "rollout.min_p"),
    ),
    # the default of this temperature is 0
    Conflict(
        ("rollout.val_kwargs.temperature",),
        lambda config, temperature: config.rollout.val_kwargs.do_sample and not temperature > 0,
        "a temperature of 0 does not sample",
        "set rollout.val_kwargs.temperature=1.0 or rollout.val_kwargs.do_sample=false",
        beside=("rollout.val_kwargs.do_sample",),
    ),
    Conflict(
        ("rollout.val_kwargs.do_sample",),
        lambda config, samples: (
            not samples and (config.rollout.val_kwargs.n > 1 or config.rollout.val_kwargs.greedy_too)
        ),
        "the greedy answer would be repeated",
        lambda config: f"set {SAMPLED.format(config.rollout.val_kwargs.n)}",
        beside=("rollout.val_kwargs.n", "rollout.val_kwargs.greedy_too"),
    ),
    Conflict(
        ("rollout.nnodes",),
        lambda config, machines: machines > 0 and config.hybrid_engine,
        "the engines share the trainer's devices",
        "set hybrid_engine=false, or rollout.nnodes=0",
        beside=("hybrid_engine",),
    ),
    Conflict(
        ("rollout.nnodes",),
        lambda config, machines: machines == 0 and not config.hybrid_engine,
        "there are no devices for the engines",
        "set rollout.nnodes=1 rollout.n_gpus_per_node=1, or more",
        beside=("hybrid_engine",),
    ),
    Conflict(
        ("rollout.nnodes",),
        lambda config, machines: (
            machines > 1 and _engines_on_own_devices(config) and config.ray_kwargs.ray_init.address is None
        ),
        "several machines need a Ray cluster",
        "set ray_kwargs.ray_init.address=HOST:PORT",
        beside=("ray_kwargs.ray_init.address",),
    ),
    Conflict(
        ("trainer.backend",),
        lambda config, backend: backend == "inline" and _engines_on_own_devices(config),
        "the engines need processes",
        "set trainer.backend=ray",
        beside=("hybrid_engine",),
    ),
)

# ----------------------------------------------------------------------------------------- samples of old weights


def _samples_in_training(config: PPOConfig, threshold: int) -> bool:
    """True if an engine that frees its memory during training would have to sample then."""
    # nothing is sampled ahead, or the running samples are interrupted
    if config.async_training.depth < 1 or config.spans_updates:
        return False
    # only an engine on the trainer's GPUs frees its memory for the training
    if not config.hybrid_engine or is_on_cpu(config.trainer.device):
        return False
    return config.rollout.free_cache_engine


def _has_unbounded_weights(config: PPOConfig, threshold: int) -> bool:
    """True if a stale sample can have any weight: neither the loss nor the correction bounds it."""
    # on-policy samples have a ratio of 1
    if threshold == 0:
        return False
    correction = config.algorithm.rollout_correction
    is_corrected = correction.rollout_is is not None or correction.rollout_rs is not None
    is_bounded = correction.loss_type == "ppo_clip" and bool(loss_facts(config).get("bounds_ratio"))
    return not is_corrected and not is_bounded


def _prevents_a3po(config: PPOConfig) -> bool:
    """True if old_log_probs are not those of the rollout, or if the correction weighs the samples as well."""
    correction = config.algorithm.rollout_correction
    return not correction.bypass_mode or correction.rollout_is is not None


def _losses_that_bound_the_ratio(config: PPOConfig) -> str:
    """Returns the remedy for unbounded weights, with the names of the losses that bound them."""
    bounded = [name for name, facts in POLICY_LOSS_REGISTRY.facts.items() if facts.get("bounds_ratio")]
    return (
        f"choose loss_type=ppo_clip and a loss_mode of {', '.join(sorted(bounded))}, or truncate the weights: set "
        "algorithm.rollout_correction.rollout_is=token"
    )


ASYNC_ROWS: tuple[Conflict[PPOConfig], ...] = (
    Conflict(
        ("async_training.batches_ahead",),
        lambda config, batches: config.async_training.depth > config.async_training.max_off_policy_threshold,
        lambda config: f"samples have a staleness of {config.async_training.depth}",
        lambda config: f"set async_training.max_off_policy_threshold={config.async_training.depth}, or fewer batches",
        beside=(_STALENESS,),
    ),
    Conflict(
        (_STALENESS,),
        _samples_in_training,
        "the engine samples during training, which needs the engine's memory",
        "set rollout.free_cache_engine=false, and a rollout.gpu_memory_utilization that leaves memory for training; or "
        "async_training.partial_rollout=true, which interrupts the samples instead",
        beside=("rollout.free_cache_engine",),
    ),
    Conflict(
        (_PARTIAL,),
        lambda config, is_partial: bool(is_partial) and not config.spans_updates,
        "no sample is running when the weights change",
        "set async_training.max_off_policy_threshold=1",
        beside=(_STALENESS, "rollout.oversample"),
    ),
    Conflict(
        (_STALENESS,),
        lambda config, threshold: config.spans_updates and config.rollout.router_replay,
        "samples that continue under new weights have experts of several versions",
        "set async_training.partial_rollout=false",
        beside=("rollout.router_replay",),
    ),
    Conflict(
        (_STALENESS,),
        lambda config, threshold: config.spans_updates and config.rollout.top_k > 0,
        "samples that continue under new weights do not keep the tokens that could be sampled before",
        "set async_training.partial_rollout=false, or rollout.top_k=-1",
        beside=("rollout.top_k",),
    ),
    Conflict(
        (_STALENESS,),
        lambda config, threshold: threshold < config.staleness,
        lambda config: f"samples are up to {config.staleness} weight updates old",
        lambda config: (
            f"set async_training.max_off_policy_threshold={config.staleness} "
            f"async_training.batches_ahead={config.async_training.depth}"
        ),
        beside=("rollout.oversample", "agentic.model_update_frequency"),
    ),
    Conflict(
        (_STALENESS,),
        _has_unbounded_weights,
        "the loss does not bound the ratio of policy and rollout, so that stale samples can have any weight",
        _losses_that_bound_the_ratio,
        beside=(_LOSS_MODE, f"{_CORRECTION}.loss_type"),
    ),
    Conflict(
        (_LOSS_MODE,),
        lambda config, mode: mode == "a3po" and _prevents_a3po(config),
        "a3po weighs the rollout's log-probs itself",
        "set algorithm.rollout_correction.bypass_mode=true and algorithm.rollout_correction.rollout_is=null",
        beside=(f"{_CORRECTION}.bypass_mode", f"{_CORRECTION}.rollout_is"),
    ),
    Conflict(
        (f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.bypass_mode"),
        lambda config, option: bool(option) and not config.rollout.calculate_log_probs,
        "the correction needs the rollout's log-probs",
        "set rollout.calculate_log_probs=true",
        beside=("rollout.calculate_log_probs",),
    ),
)

# ------------------------------------------------------------------------------------------------------ advantages


def _estimator_takes(config: PPOConfig, argument: str) -> bool | None:
    """Returns True if the estimator reads the argument; None if there is no such estimator."""
    try:
        estimator = ADV_ESTIMATOR_REGISTRY.get_fn(config.algorithm.adv_estimator)
    except UserError:  # `user_calls` reports it
        return None
    return takes(estimator, argument)


def _estimator_facts(config: PPOConfig) -> FreeDict:
    """Returns what the estimator declared at its registration; see `core_algos.register_adv_est`."""
    return ADV_ESTIMATOR_REGISTRY.facts.get(config.algorithm.adv_estimator, {})


def _needs_prompts(config: PPOConfig, estimator: str) -> bool:
    """True if the samples are episodes, and the estimator needs greedy answers or the entries of a reward's dict."""
    if not config.is_agentic:
        return False
    return estimator == "gdpo" or bool(_estimator_takes(config, "reward_baselines"))


def _option_that_compares(config: PPOConfig) -> str | None:
    """Returns the option for which the members of a group are compared; None if they are not."""
    # without training, or without rewards
    if config.trainer.val_only or config.distillation.replaces_rewards:
        return None
    if _estimator_facts(config).get("groups"):
        return _ESTIMATOR
    for key in ("algorithm.norm_mean_type", "algorithm.norm_std_type"):
        if value_of(config, key) == "group":
            return key
    if config.algorithm.filter_groups.enable:
        return "algorithm.filter_groups.enable"
    return None


def _group_rows(option: str) -> tuple[Conflict[PPOConfig], Conflict[PPOConfig]]:
    """Returns the rows for groups of one member, which `option` would compare: of prompts, and of environments."""
    reason = "the members of a group are compared"
    remedy = "set at least 2, such as 8"
    return (
        Conflict(
            ("rollout.n", "data.sources.*.n"),
            lambda config, size: size == 1 and config.reads_prompts and _option_that_compares(config) == option,
            reason,
            remedy,
            beside=(option,),
        ),
        Conflict(
            ("agentic.train_env_manager.group_size",),
            lambda config, size: size == 1 and not config.reads_prompts and _option_that_compares(config) == option,
            reason,
            remedy,
            beside=(option,),
        ),
    )


ADVANTAGE_ROWS: tuple[Conflict[PPOConfig], ...] = (
    Conflict(
        (_ESTIMATOR,),
        lambda config, estimator: config.runs_program and estimator not in PROGRAM_ESTIMATORS,
        "agentic.program needs an estimator with one advantage per episode",
        f"set one of {', '.join(PROGRAM_ESTIMATORS)}",
    ),
    Conflict(
        (_ESTIMATOR,),
        lambda config, estimator: not config.is_agentic and _estimator_facts(config).get("rows") == "step",
        "the estimator needs the steps of episodes",
        "name environments in agentic.train_env_manager.tags",
        beside=("agentic.train_env_manager.tags",),
    ),
    Conflict(
        (_ESTIMATOR,),
        _needs_prompts,
        "the estimator needs greedy answers or a reward function's dict, which episodes do not have",
        "set algorithm.adv_estimator=grpo, or agentic_reinforce",
    ),
    Conflict(
        (_ESTIMATOR,),
        lambda config, estimator: (
            config.algorithm.rollout_correction.bypass_mode and bool(_estimator_takes(config, "sum_pi_squared"))
        ),
        "the estimator needs the pass that algorithm.rollout_correction.bypass_mode=true omits",
        "set algorithm.rollout_correction.bypass_mode=false",
        beside=(f"{_CORRECTION}.bypass_mode",),
    ),
    Conflict(
        ("trainer.critic_warmup",),
        # an unknown estimator, for which the result is None, is reported elsewhere
        lambda config, steps: steps > 0 and _estimator_takes(config, "values") is False,
        "the estimator has no critic to train",
        "set trainer.critic_warmup=0",
        beside=(_ESTIMATOR,),
    ),
    Conflict(
        (
            "algorithm.norm_mean_type",
            "algorithm.norm_std_type",
            "algorithm.reward_clip",
            "algorithm.whiten_rewards",
        ),
        lambda config, option: bool(option) and bool(_estimator_facts(config).get("raw_scores")),
        "the estimator reads raw scores",
        "remove it",
        beside=(_ESTIMATOR,),
    ),
    *_group_rows(_ESTIMATOR),
    *_group_rows("algorithm.norm_mean_type"),
    *_group_rows("algorithm.norm_std_type"),
    *_group_rows("algorithm.filter_groups.enable"),
)

# --------------------------------------------------------------------------------------- rewards and distillation


def _has_no_score(config: PPOConfig, weight: float) -> bool:
    # a run that learns from teachers alone needs no score
    if config.reward_model.enable or config.distillation.replaces_rewards:
        return False
    return weight == 0


def _is_other_kind_of_loss(config: PPOConfig, uses_policy_gradient: bool | None) -> bool:
    """True if the distillation loss cannot be trained in the way that the option chooses."""
    # null leaves it to the loss
    if uses_policy_gradient is None:
        return False
    is_advantage = config.distillation.distillation_loss.loss_mode == "k1"
    return uses_policy_gradient is not is_advantage


REWARD_ROWS: tuple[Conflict[PPOConfig], ...] = (
    Conflict(
        ("reward.function_weight",),
        _has_no_score,
        "every score would be 0",
        "set a weight, or reward_model.enable=true",
        beside=("reward_model.enable",),
    ),
    Conflict(
        ("reward_model.model.path",),
        lambda config, path: path is None and config.reward_model.enable,
        "a folder of a sequence-classification model is expected",
        "set reward_model.model.path",
        beside=("reward_model.enable",),
    ),
    Conflict(
        ("reward.overlong_buffer.len",),
        lambda config, length: (
            config.reward.overlong_buffer.enable and not 1 <= length <= config.data.max_response_length
        ),
        lambda config: f"expected 1 to {config.data.max_response_length}",
        "set a number of tokens of the answer",
        beside=("data.max_response_length",),
    ),
    Conflict(
        ("algorithm.filter_groups.metric",),
        lambda config, metric: (
            config.algorithm.filter_groups.enable and metric in ("model", "function") and not config.reward_model.enable
        ),
        "without a reward model there is only one score",
        "set reward_model.enable=true, or another metric",
        beside=("reward_model.enable",),
    ),
    Conflict(
        ("distillation.enabled",),
        lambda config, is_enabled: bool(is_enabled) and not config.distillation.teachers,
        "there is no teacher",
        "set distillation.teachers.NAME.path=FOLDER",
    ),
    Conflict(
        ("distillation.distillation_loss.use_policy_gradient",),
        _is_other_kind_of_loss,
        "k1 is an advantage, because its own gradient does not depend on the teacher; the other losses are "
        "differentiated",
        "set distillation.distillation_loss.use_policy_gradient=null, or another loss_mode",
        beside=("distillation.distillation_loss.loss_mode",),
    ),
    Conflict(
        ("distillation.teachers.*.url",),
        lambda config, url: config.distillation.takes_topk,
        "a server returns the log-prob of the sampled token only",
        "set distillation.distillation_loss.loss_mode=k1, or path",
        beside=("distillation.distillation_loss.loss_mode",),
    ),
    Conflict(
        ("distillation.teachers.*.url",),
        lambda config, url: config.distillation.is_active and config.rollout.temperature != 1,
        "the server's log-probs have the temperature 1",
        "set rollout.temperature=1",
        beside=("rollout.temperature",),
    ),
    Conflict(
        ("distillation.teachers.*.prompt_template",),
        lambda config, template: config.distillation.is_active and config.is_agentic,
        "episodes have no single prompt",
        "set null",
    ),
    Conflict(
        ("distillation.distillation_loss.topk_source",),
        lambda config, source: (
            config.distillation.takes_student_topk and config.algorithm.rollout_correction.bypass_mode
        ),
        "the policy's most probable tokens need the pass over the samples that "
        "algorithm.rollout_correction.bypass_mode=true omits",
        "set algorithm.rollout_correction.bypass_mode=false, or topk_source=teacher",
        beside=(f"{_CORRECTION}.bypass_mode",),
    ),
)

# --------------------------------------------------------------------------------------------------------- the run

RUN_ROWS: tuple[Conflict[PPOConfig], ...] = (
    Conflict(
        ("trainer.critic_warmup",),
        lambda config, steps: (
            config.trainer.total_training_steps is not None and steps >= config.trainer.total_training_steps
        ),
        "fewer steps than those of the run are expected",
        "set a smaller number",
        beside=("trainer.total_training_steps",),
    ),
    Conflict(
        ("trainer.total_training_steps",),
        lambda config, steps: steps is None and not config.reads_prompts and not config.trainer.val_only,
        "environments have no epochs",
        "set a number of steps, such as 200",
    ),
    Conflict(
        ("trainer.val_only", "trainer.test_freq"),
        # true is above 0, too
        lambda config, option: option > 0 and not config.validates,
        "there is nothing to validate",
        "set data.val_files, or for environments agentic.val_env_manager.tags",
        beside=("data.val_files", "agentic.val_env_manager.tags"),
    ),
)

PPO_ROWS: tuple[Conflict[PPOConfig], ...] = (
    *LENGTH_ROWS,
    *ENGINE_ROWS,
    *ASYNC_ROWS,
    *ADVANTAGE_ROWS,
    *REWARD_ROWS,
    *AGENT_ROWS,
    *RUN_ROWS,
)
