"""The options that have no effect in some configurations: one table with key, condition, reason and remedy.

`idle_options` compares the table with the options that the user gave on the command line, in a file or to `train`.
Values of recipes and defaults are not reported, nor are values that equal the default. An idle option is a note; it is
an error where it shows that the run is not the one that the user wants (`is_error`) and the user typed it for this run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_lite.config.loader import COMMAND_LINE, LoadedConfig
from verl_lite.config.option_table import Key, schema_of, value_of
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.supervised import SFTConfig, SupervisedConfig
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl_lite.device import is_on_cpu
from verl_lite.registry import is_own, takes


@dataclass(frozen=True)
class Situation:
    """The resolved options of a run, and what its files say. None and an empty set stand for unknown.

    devices: number of devices. reads_images: whether the policy is a
    vision-language model. rows: training rows of a supervised run. unused_passes: passes that no step of the run needs,
    among `critic`, `reference`, `reference_model` and `old_log_probs`.
    """

    config: Any
    devices: int | None = None
    reads_images: bool | None = None
    rows: int | None = None
    unused_passes: frozenset[str] = frozenset()

    @property
    def on_cpu(self) -> bool:
        return is_on_cpu(self.config.trainer.device)

    def value(self, name: str) -> Any:
        """Returns the value of an option; None if this command has no such option."""
        return value_of(self.config, name)

    def beside(self, key: str, name: str) -> Any:
        """Returns the value of the option `name` in the section of `key`."""
        return self.value(f"{key.rpartition('.')[0]}.{name}")


Condition = Callable[[Situation, str], bool]
"""Returns True if the option with this key has no effect in this situation."""


@dataclass(frozen=True)
class IdleOption:
    """A row of the table.

    keys: dotted keys. A trailing dot stands for all keys of the section, a leading `*.` for any section.
    is_idle: when the keys have no effect. reason: why. remedy: what to set instead. is_error: whether the run is
    refused if the command line has such a key. excluded: keys of these sections that have an effect.
    """

    keys: tuple[str, ...]
    is_idle: Condition
    reason: str
    remedy: str
    is_error: bool = False
    excluded: tuple[str, ...] = ()

    def names(self, key: str) -> bool:
        """Returns True if `key` is one of `keys`."""
        return key not in self.excluded and any(_matches(pattern, key) for pattern in self.keys)


@dataclass
class IdleReport:
    """Sentences about the idle options that the user gave: notes, and problems that end the run."""

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def idle_options(
    loaded: LoadedConfig[Any], situation: Situation, rows: Sequence[IdleOption] | None = None
) -> IdleReport:
    """Returns the report on the options of a command line and its files.

    Args:
        loaded: the configuration with the source of each value.
        situation: the resolved configuration.
        rows: the table; None = the table of the command.
    """
    report = IdleReport()
    table = table_of(type(situation.config)) if rows is None else rows
    given = _given_keys(loaded)
    reported: set[str] = set()
    for row in table:
        notes: list[str] = []
        problems: list[str] = []
        for name, (key, source) in given.items():
            if name in reported or not row.names(name) or not row.is_idle(situation, name):
                continue
            is_typed = row.is_error and source.startswith(COMMAND_LINE)
            if not is_typed and value_of(situation.config, name) == key.default:
                continue
            reported.add(name)
            shown = _shown(key, value_of(situation.config, name), source)
            if is_typed:
                problems.append(shown)
            else:
                notes.append(shown)
        for listed, sentences in ((notes, report.notes), (problems, report.problems)):
            if listed:
                verb = "has" if len(listed) == 1 else "have"
                sentences.append(f"{', '.join(listed)} {verb} no effect here: {row.reason}; {row.remedy}")
    return report


def table_of(root: type) -> Sequence[IdleOption]:
    """Returns the rows for the options of a command."""
    if issubclass(root, PPOConfig):
        return (*PPO_ROWS, *SHARED_ROWS)
    if issubclass(root, SFTConfig):
        return (*SFT_ROWS, *SUPERVISED_ROWS, *SHARED_ROWS)
    if issubclass(root, SupervisedConfig):
        return (*SUPERVISED_ROWS, *SHARED_ROWS)
    return SHARED_ROWS


def _given_keys(loaded: LoadedConfig[Any]) -> dict[str, tuple[Key, str]]:
    """Returns the options that the user gave, with their sources. An entry of a dictionary counts as its option."""
    schema = schema_of(type(loaded.config))
    given: dict[str, tuple[Key, str]] = {}
    for name, source in loaded.provenance.items():
        key = schema.find(tuple(name.split(".")))
        if key is not None and source.startswith((COMMAND_LINE, "file:")):
            given.setdefault(key.name, (key, source))
    return given


def _matches(pattern: str, key: str) -> bool:
    if pattern.startswith("*."):
        return f".{key}".endswith(pattern[1:])
    return key.startswith(pattern) if pattern.endswith(".") else key == pattern


def _shown(key: Key, value: Any, source: str) -> str:
    """Returns `key=value`, with the name that the user wrote if it was translated. Entries of dictionaries are not
    shown, because they may hold secrets."""
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = str(value).replace(" ", "")
    _, _, written_as = source.partition(", as ")
    shown = key.name if key.kind == "dict" else f"{key.name}={text:.200}"
    return f"{shown} (given as {written_as})" if written_as else shown


# ---------------------------------------------------------------------------------------------------- conditions


def _if(test: Callable[[Any], bool]) -> Condition:
    """Returns a condition on the configuration alone."""
    return lambda situation, key: test(situation.config)


def _unless(name: str) -> Condition:
    """Returns a condition that holds while the option `name` is false, null, 0 or empty."""
    return lambda situation, key: not situation.value(name)


def _beside(name: str, *values: Any) -> Condition:
    """Returns a condition that holds while the option `name` in the key's section has none of these values."""
    return lambda situation, key: situation.beside(key, name) not in values


def _unused(name: str) -> Condition:
    """Returns a condition that holds if the run has no such pass."""
    return lambda situation, key: name in situation.unused_passes


def _loss_is_not(*losses: str) -> Condition:
    """Returns a condition that holds if the policy loss is another one of this project. A loss of the user may read any
    option. Distillation with k1 clips its ratio, too."""

    def is_idle(situation: Situation, key: str) -> bool:
        config = situation.config
        mode = config.actor.policy_loss.loss_mode
        loss = POLICY_LOSS_REGISTRY.get(mode)
        is_known = loss is not None and is_own(loss)
        clips_distillation = ".clip_ratio" in key and config.distillation.is_active
        return is_known and mode not in losses and not clips_distillation

    return is_idle


def _estimator_is_not(*estimators: str) -> Condition:
    """Returns a condition that holds if the estimator is another one of this project."""

    def is_idle(situation: Situation, key: str) -> bool:
        chosen = situation.config.algorithm.adv_estimator
        estimator = ADV_ESTIMATOR_REGISTRY.get(chosen)
        return estimator is not None and is_own(estimator) and chosen not in estimators

    return is_idle


def _takes(situation: Situation, argument: str) -> bool:
    """Returns True if the estimator of the run may read this argument."""
    estimator = ADV_ESTIMATOR_REGISTRY.get(situation.config.algorithm.adv_estimator)
    return estimator is None or not is_own(estimator) or takes(estimator, argument)


_DYNAMIC = {
    "actor": "actor.use_dynamic_bsz",
    "critic": "critic.use_dynamic_bsz",
    "reward_model": "reward_model.use_dynamic_bsz",
    "ref": "ref.log_prob_use_dynamic_bsz",
    "rollout": "rollout.log_prob_use_dynamic_bsz",
}
"""The switch between micro-batches by tokens and by rows of each role. Null is the actor's."""


def _sizes_by(tokens: bool) -> Condition:
    """Returns a condition that holds if no pass that reads the key sizes its micro-batches by tokens (True) or by rows
    (False). Passes of other roles read the actor's key if their own is null."""

    def is_idle(situation: Situation, key: str) -> bool:
        actors = bool(situation.value("actor.use_dynamic_bsz"))
        role = key.partition(".")[0]
        switches = list(_DYNAMIC.values()) if role == "actor" else [_DYNAMIC[role]]
        chosen = [situation.value(switch) for switch in switches]
        return all((actors if own is None else own) is not tokens for own in chosen)

    return is_idle


def _no_scores_of_functions(config: PPOConfig) -> bool:
    return not config.reads_prompts or config.reward.function_weight == 0


def _scores_one_by_one(config: PPOConfig) -> bool:
    """True if no part of the reward takes lists of samples."""
    styles = [entry.get("style", "sample") for entry in config.reward.functions.values() if isinstance(entry, Mapping)]
    own = config.reward.custom_reward_function
    if own.path is not None:
        styles.append(own.style)
    return all(style == "sample" for style in styles)


def _has_single_teacher(config: PPOConfig) -> bool:
    """True if all rows have the same teacher, so that no column selects it."""
    if any(config.distillation.check()):
        return False
    teachers = config.distillation.named_teachers()
    return len(teachers) == 1 and teachers[0].key is None


def _engine_is_hf(situation: Situation, key: str) -> bool:
    return bool(situation.config.rollout.name == "hf")


def _engine_is_hf_or_on_cpu(situation: Situation, key: str) -> bool:
    return _engine_is_hf(situation, key) or situation.on_cpu


def _on_cpu(situation: Situation, key: str) -> bool:
    return situation.on_cpu


def _on_gpu(situation: Situation, key: str) -> bool:
    return not situation.on_cpu


def _on_one_device(situation: Situation, key: str) -> bool:
    return situation.devices == 1


def _freezes_vision_anyway(situation: Situation, key: str) -> bool:
    return bool(situation.config.model.lora_rank) or situation.reads_images is False


def _batch_exceeds_rows(situation: Situation, key: str) -> bool:
    return situation.rows is not None and situation.value(key) > situation.rows


# ---------------------------------------------------------------------------------------------------- the table

_LEAVE_OUT = "leave it out"

SHARED_ROWS: tuple[IdleOption, ...] = (
    IdleOption(
        ("*.optim.muon_momentum",),
        _beside("optimizer", "muon"),
        "the optimizer is adamw",
        "set optimizer=muon in the same section, or leave it out",
    ),
    IdleOption(
        ("*.optim.min_lr_ratio", "*.optim.num_cycles"),
        _beside("lr_scheduler_type", "cosine"),
        "the learning rate is constant",
        "set lr_scheduler_type=cosine in the same section, or leave it out",
    ),
    IdleOption(
        ("*.optim.lr_warmup_steps_ratio",),
        lambda situation, key: situation.beside(key, "lr_warmup_steps") >= 0,
        "lr_warmup_steps of the same section sets the warm-up",
        "set one of them",
    ),
    IdleOption(
        ("*.fsdp_config.param_offload", "*.fsdp_config.optimizer_offload"),
        _on_cpu,
        "the workers run on the CPU, whose memory is the host's",
        _LEAVE_OUT,
    ),
    IdleOption(
        ("*.fsdp_config.fsdp_size", "*.fsdp_config.reshard_after_forward", "trainer.balance_batch"),
        _on_one_device,
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
        _if(lambda config: config.trainer.save_freq == 0),
        "trainer.save_freq=0 saves no checkpoint",
        "set trainer.save_freq=-1 or more, or leave it out",
    ),
    IdleOption(
        ("trainer.resume_allow",),
        _if(lambda config: config.trainer.resume_mode == "disable"),
        "trainer.resume_mode=disable resumes no run",
        "set trainer.resume_mode=auto, or leave it out",
    ),
    IdleOption(
        ("trainer.share_devices", "trainer.deterministic"),
        _on_cpu,
        "the workers run on the CPU",
        "set trainer.device=cuda, or leave it out",
    ),
    IdleOption(
        ("trainer.max_retries", "trainer.stall_timeout_s", "ray_kwargs."),
        _if(lambda config: config.trainer.backend == "inline"),
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
        _beside("enable_gradient_checkpointing", True),
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

_NO_CRITIC = "only the estimator gae has a critic"
_LOSS_REMEDY = "set actor.policy_loss.loss_mode, or leave it out"
_ESTIMATOR_REMEDY = "set algorithm.adv_estimator, or leave it out"
_CLIPPING_LOSSES = ("vanilla", "a3po", "gspo", "geo_mean", "clip_cov", "cispo", "dppo_tv", "dppo_kl")
_PROMPT_KEYS = tuple(
    f"data.{name}"
    for name in (
        *("train_files", "val_files", "prompt_key", "image_key", "image_folder", "max_pixels", "columns"),
        *("data_source", "prompt_template", "ground_truth_regex", "tools_path", "sources", "sampler.", "custom_cls."),
        *("train_batch_size", "val_batch_size", "truncation", "filter_overlong_prompts", "train_max_samples"),
        *("filter_overlong_prompts_workers", "val_max_samples", "shuffle", "seed"),
    )
)
_FUNCTION_KEYS = tuple(
    f"reward.{name}"
    for name in (
        *("custom_reward_function.", "remote.", "functions", "reward_kwargs", "num_workers", "batch_size"),
        *("max_concurrent", "max_rpm", "timeout_s"),
    )
)

PPO_ROWS: tuple[IdleOption, ...] = (
    # distillation
    IdleOption(
        ("distillation.distillation_loss.", "distillation.teacher_key"),
        _if(lambda config: config.distillation.enabled is not False and not config.distillation.teachers),
        "the run has no teachers and would train on rewards alone",
        "set distillation.teachers.NAME.path=FOLDER, or leave it out",
        is_error=True,
    ),
    IdleOption(
        ("distillation.distillation_loss.", "distillation.teacher_key", "distillation.teachers"),
        _if(lambda config: not config.distillation.is_active),
        "distillation.enabled=false",
        "set distillation.enabled=true, or leave it out",
    ),
    IdleOption(
        ("distillation.distillation_loss.topk", "distillation.distillation_loss.topk_source"),
        _if(lambda config: not config.distillation.takes_topk),
        "distillation.distillation_loss.loss_mode=k1 compares the sampled token only",
        "set loss_mode to a divergence, such as forward_kl_topk, or leave it out",
    ),
    IdleOption(
        ("distillation.distillation_loss.topk_source",),
        _if(lambda config: config.distillation.distillation_loss.topk == -1),
        "distillation.distillation_loss.topk=-1 compares the whole vocabulary",
        "set topk, or leave it out",
    ),
    IdleOption(
        ("distillation.distillation_loss.loss_max_clamp",),
        _if(lambda config: config.distillation.takes_topk),
        "it bounds the advantage of loss_mode=k1",
        "leave it out",
    ),
    IdleOption(
        ("distillation.teacher_key",),
        _if(_has_single_teacher),
        "the only teacher has no key, so that all rows are its rows",
        "set distillation.teachers.NAME.key, or leave it out",
    ),
    # data
    IdleOption(
        _PROMPT_KEYS,
        _if(lambda config: not config.reads_prompts),
        "the samples are episodes of the environments in agentic.train_env_manager.tags, which read no data files",
        _LEAVE_OUT,
    ),
    IdleOption(
        ("data.sampler.class_name",),
        _unless("data.sampler.class_path"),
        "data.sampler.class_path is null",
        "set data.sampler.class_path, or leave it out",
    ),
    IdleOption(
        ("data.custom_cls.name",),
        _unless("data.custom_cls.path"),
        "data.custom_cls.path is null",
        "set data.custom_cls.path, or leave it out",
    ),
    IdleOption(
        ("data.shuffle",),
        lambda situation, key: bool(situation.value("data.sampler.class_path")),
        "the sampler of data.sampler.class_path chooses the order",
        _LEAVE_OUT,
    ),
    IdleOption(
        ("data.filter_overlong_prompts_workers",),
        _unless("data.filter_overlong_prompts"),
        "data.filter_overlong_prompts=false filters nothing",
        "set data.filter_overlong_prompts=true, or leave it out",
    ),
    IdleOption(
        ("data.val_batch_size", "data.val_max_samples"),
        _unless("data.val_files"),
        "data.val_files is empty",
        "set data.val_files, or leave it out",
    ),
    IdleOption(
        ("data.image_key", "data.image_folder", "data.max_pixels"),
        lambda situation, key: situation.reads_images is False,
        "the model of model.path reads only text",
        _LEAVE_OUT,
    ),
    # networks
    IdleOption(
        ("actor.freeze_vision_tower",),
        _freezes_vision_anyway,
        "the vision tower is trained only in a vision-language model without an adapter (model.lora_rank=0)",
        "set model.path or model.lora_rank, or leave it out",
    ),
    IdleOption(
        ("critic.",),
        _unused("critic"),
        f"the estimator of the run has no critic; {_NO_CRITIC}",
        "set algorithm.adv_estimator=gae, or leave it out",
    ),
    IdleOption(
        ("ref.",),
        _unused("reference"),
        "no KL term needs the reference model",
        "set actor.use_kl_loss=true or algorithm.use_kl_in_reward=true, or leave it out",
    ),
    IdleOption(
        ("ref.fsdp_config.",),
        _unused("reference_model"),
        "with model.lora_rank above 0 the reference is the policy without its adapter",
        "set actor.fsdp_config, or leave it out",
    ),
    IdleOption(
        ("reward_model.",),
        _unless("reward_model.enable"),
        "reward_model.enable=false",
        "set reward_model.enable=true, or leave it out",
    ),
    IdleOption(
        (
            "rollout.log_prob_use_dynamic_bsz",
            "rollout.log_prob_max_token_len_per_gpu",
            "rollout.log_prob_micro_batch_size_per_gpu",
        ),
        _unused("old_log_probs"),
        "no step needs a pass for old_log_probs",
        _LEAVE_OUT,
    ),
    IdleOption(
        (
            "actor.ppo_max_token_len_per_gpu",
            "critic.ppo_max_token_len_per_gpu",
            "critic.forward_max_token_len_per_gpu",
            "reward_model.forward_max_token_len_per_gpu",
            "ref.log_prob_max_token_len_per_gpu",
            "rollout.log_prob_max_token_len_per_gpu",
        ),
        _sizes_by(tokens=True),
        "micro-batches are sized by rows",
        "set the role's use_dynamic_bsz=true, or leave it out",
    ),
    IdleOption(
        (
            "actor.ppo_micro_batch_size_per_gpu",
            "critic.ppo_micro_batch_size_per_gpu",
            "critic.forward_micro_batch_size_per_gpu",
            "reward_model.micro_batch_size_per_gpu",
            "ref.log_prob_micro_batch_size_per_gpu",
            "rollout.log_prob_micro_batch_size_per_gpu",
        ),
        _sizes_by(tokens=False),
        "micro-batches are sized by tokens (use_dynamic_bsz=true)",
        "set the role's use_dynamic_bsz=false, or leave it out",
    ),
    # the policy loss
    IdleOption(
        ("actor.clip_ratio",),
        _if(lambda config: None not in (config.actor.clip_ratio_low, config.actor.clip_ratio_high)),
        "actor.clip_ratio_low and actor.clip_ratio_high are set",
        _LEAVE_OUT,
    ),
    IdleOption(
        ("actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high"),
        _loss_is_not(*_CLIPPING_LOSSES),
        "the policy loss does not clip the ratio",
        _LOSS_REMEDY,
    ),
    IdleOption(
        ("actor.clip_ratio_c",),
        _loss_is_not("vanilla", "a3po", "dppo_tv", "dppo_kl"),
        "the policy loss has no dual clip",
        _LOSS_REMEDY,
    ),
    IdleOption(
        ("actor.ratio_type",),
        _loss_is_not("vanilla", "cispo", "tis", "topr"),
        "the policy loss has its own ratio",
        _LOSS_REMEDY,
    ),
    IdleOption(("actor.tau_pos", "actor.tau_neg"), _loss_is_not("sapo"), "only sapo reads it", _LOSS_REMEDY),
    *(
        IdleOption((f"actor.policy_loss.{name}",), _loss_is_not(loss), f"only {loss} reads it", _LOSS_REMEDY)
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
        _if(lambda config: config.actor.loss_agg_mode != "seq-mean-token-sum-norm"),
        "only actor.loss_agg_mode=seq-mean-token-sum-norm divides by it",
        "set that mode, or leave it out",
    ),
    IdleOption(
        ("actor.kl_loss_coef", "actor.kl_loss_type"),
        _unless("actor.use_kl_loss"),
        "actor.use_kl_loss=false",
        "set actor.use_kl_loss=true, or leave it out",
    ),
    # generation
    IdleOption(
        ("rollout.nnodes", "rollout.n_gpus_per_node"),
        _if(lambda config: config.hybrid_engine),
        "hybrid_engine=true: the engines share the devices of the trainer",
        "set trainer.n_gpus_per_node, or hybrid_engine=false for engines on devices of their own",
    ),
    IdleOption(
        ("rollout.enable_chunked_prefill", "rollout.enforce_eager", "rollout.gpu_memory_utilization"),
        _engine_is_hf_or_on_cpu,
        "only vLLM on a GPU reads it",
        _LEAVE_OUT,
    ),
    IdleOption(("rollout.enable_prefix_caching",), _engine_is_hf, "only vLLM reads it", _LEAVE_OUT),
    IdleOption(
        ("rollout.kv_cache_memory_mb",),
        _on_gpu,
        "it limits the cache on a CPU",
        "set rollout.gpu_memory_utilization, or leave it out",
    ),
    IdleOption(("rollout.free_cache_engine",), _on_cpu, "the engine frees memory on a GPU only", _LEAVE_OUT),
    IdleOption(
        ("rollout.lora_sync",),
        _unless("model.lora_rank"),
        "model.lora_rank=0: there is no adapter to send",
        "set model.lora_rank, or leave it out",
    ),
    IdleOption(
        ("rollout.recompute_kv_on_update",),
        _if(lambda config: not config.spans_updates),
        "no sample continues under new weights",
        "set async_training.partial_rollout=true, or leave it out",
    ),
    IdleOption(
        ("rollout.val_kwargs.",),
        _if(lambda config: not config.validates),
        "the run has no validation data",
        "set data.val_files, or leave it out",
    ),
    IdleOption(
        ("rollout.val_kwargs.temperature", "rollout.val_kwargs.top_p", "rollout.val_kwargs.top_k"),
        _unless("rollout.val_kwargs.do_sample"),
        "rollout.val_kwargs.do_sample=false decodes greedily",
        "set rollout.val_kwargs.do_sample=true, or leave it out",
    ),
    # advantages
    IdleOption(
        ("algorithm.gamma",),
        _estimator_is_not("gae", "reinforce_plus_plus", "reinforce", "agentic_reinforce", "step_reinforce", "gigpo"),
        "the estimator does not discount",
        _ESTIMATOR_REMEDY,
    ),
    IdleOption(("algorithm.lam",), _estimator_is_not("gae"), "only gae reads it", _ESTIMATOR_REMEDY),
    IdleOption(
        ("algorithm.norm_adv_by_std_in_grpo",),
        _estimator_is_not("grpo", "grpo_vectorized", "grpo_passk", "gdpo"),
        "only grpo, grpo_passk and gdpo divide by the group's standard deviation",
        _ESTIMATOR_REMEDY,
    ),
    IdleOption(
        ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
        _estimator_is_not("gdpo"),
        "only gdpo reads it",
        "set algorithm.adv_estimator=gdpo, or leave it out",
    ),
    IdleOption(
        ("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"),
        _unless("algorithm.filter_groups.enable"),
        "algorithm.filter_groups.enable=false",
        "set algorithm.filter_groups.enable=true, or leave it out",
    ),
    IdleOption(
        ("algorithm.pf_ppo.",),
        _unless("algorithm.use_pf_ppo"),
        "algorithm.use_pf_ppo=false",
        "set algorithm.use_pf_ppo=true, or leave it out",
    ),
    IdleOption(
        ("algorithm.pf_ppo.weight_pow",),
        _beside("reweight_method", "pow"),
        "only algorithm.pf_ppo.reweight_method=pow reads it",
        _LEAVE_OUT,
    ),
    IdleOption(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl."),
        _unless("algorithm.use_kl_in_reward"),
        "algorithm.use_kl_in_reward=false",
        "set algorithm.use_kl_in_reward=true, or leave it out",
    ),
    IdleOption(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        _beside("type", "adaptive"),
        "algorithm.kl_ctrl.type=fixed keeps the coefficient",
        "set algorithm.kl_ctrl.type=adaptive, or leave it out",
    ),
    IdleOption(
        (
            "algorithm.rollout_correction.rollout_is_threshold",
            "algorithm.rollout_correction.rollout_is_batch_normalize",
        ),
        _unless("algorithm.rollout_correction.rollout_is"),
        "algorithm.rollout_correction.rollout_is=null",
        "set algorithm.rollout_correction.rollout_is=token, or leave it out",
    ),
    IdleOption(
        ("algorithm.rollout_correction.rollout_rs_threshold",),
        _unless("algorithm.rollout_correction.rollout_rs"),
        "algorithm.rollout_correction.rollout_rs=null",
        "set algorithm.rollout_correction.rollout_rs, such as token_k1, or leave it out",
    ),
    IdleOption(
        ("algorithm.rollout_correction.loss_type",),
        _unless("algorithm.rollout_correction.bypass_mode"),
        "algorithm.rollout_correction.bypass_mode=false",
        "set algorithm.rollout_correction.bypass_mode=true, or leave it out",
    ),
    # rewards
    IdleOption(
        _FUNCTION_KEYS,
        _if(_no_scores_of_functions),
        "no reward function is called: environments return the scores, or reward.function_weight=0",
        "leave it out, or set reward.function_weight",
    ),
    IdleOption(
        ("reward.custom_reward_function.name", "reward.custom_reward_function.style"),
        _unless("reward.custom_reward_function.path"),
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
        _unless("reward.remote.url"),
        "reward.remote.url=null",
        "set reward.remote.url, or leave it out",
    ),
    IdleOption(
        ("reward.overlong_buffer.",),
        _unless("reward.overlong_buffer.enable"),
        "reward.overlong_buffer.enable=false",
        "set reward.overlong_buffer.enable=true, or leave it out",
    ),
    IdleOption(
        ("reward.batch_size",),
        _if(_scores_one_by_one),
        "the reward function takes one sample per call",
        "set reward.custom_reward_function.style=batch, or leave it out",
    ),
    # agents
    IdleOption(
        ("agentic.",),
        _if(lambda config: not config.is_agentic),
        "the run has neither a program nor environments",
        "set agentic.program or agentic.train_env_manager.tags, or leave it out",
        excluded=("agentic.model_update_frequency",),
    ),
    IdleOption(
        ("agentic.program_kwargs", "agentic.program_options.", "agentic.endpoint."),
        _if(lambda config: not config.agentic.has_program),
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
        _if(lambda config: config.agentic.has_program),
        "the episodes are those of the program",
        "set data.train_batch_size, rollout.n or agentic.program_options instead, or leave it out",
    ),
    IdleOption(
        ("agentic.val_env_manager.", "agentic.val_batch_size"),
        _unless("agentic.val_env_manager.tags"),
        "agentic.val_env_manager.tags is empty",
        "set agentic.val_env_manager.tags, or leave it out",
    ),
    IdleOption(
        ("agentic.train_env_manager.max_replaced_groups",),
        _if(
            lambda config: (
                config.agentic.train_env_manager.group_filter_cls is None and not config.algorithm.filter_groups.enable
            )
        ),
        "no filter drops groups",
        "set agentic.train_env_manager.group_filter_cls, or leave it out",
    ),
    IdleOption(
        ("agentic.episode_reward_weight", "agentic.step_reward_weight"),
        _estimator_is_not("gigpo"),
        "only gigpo reads it",
        "set algorithm.adv_estimator=gigpo, or leave it out",
    ),
    IdleOption(
        ("agentic.step_reward_gamma",),
        _estimator_is_not("gigpo", "step_reinforce"),
        "only gigpo and step_reinforce read it",
        _ESTIMATOR_REMEDY,
    ),
    # the run
    IdleOption(
        ("trainer.total_epochs",),
        _if(lambda config: not config.reads_prompts),
        "environments have no epochs",
        "set trainer.total_training_steps",
    ),
    IdleOption(
        ("trainer.log_val_generations", "trainer.validation_data_dir"),
        _if(lambda config: not config.validates),
        "the run has no validation data",
        "set data.val_files, or leave it out",
    ),
)

SUPERVISED_ROWS: tuple[IdleOption, ...] = (
    IdleOption(
        ("data.train_batch_size",),
        _batch_exceeds_rows,
        "the data have fewer training rows, so that a step trains on all of them",
        "set data.train_batch_size to at most the number of rows",
    ),
    IdleOption(
        ("trainer.test_freq",),
        _unless("data.val_files"),
        "data.val_files is empty",
        "set data.val_files, or leave it out",
    ),
)

SFT_ROWS: tuple[IdleOption, ...] = (
    IdleOption(
        ("data.chosen_key", "data.rejected_key"),
        _if(lambda config: config.loss != "dpo"),
        "only loss=dpo reads pairs of answers",
        "set loss=dpo, or leave it out",
    ),
    IdleOption(
        ("data.response_key",),
        _if(lambda config: config.loss == "dpo"),
        "loss=dpo reads data.chosen_key and data.rejected_key",
        "set these, or leave it out",
    ),
)
