"""Checks whether the rollout engine, the model and the data of a run fit together, before any worker starts.

These checks need the model's files, the class of the engine or the data, so they are not in the table of
`verl_lite/config/conflicts`; those that compare options have the form of its rows.
"""

from collections.abc import Iterable

from transformers import PretrainedConfig

from trainer.ppo.requirements import needs_critic
from verl_lite.config import ConfigError, PPOConfig
from verl_lite.config.conflicts import Conflict
from verl_lite.errors import UserError
from verl_lite.machine.device import device_type
from workers.engines.base import ROLLOUT_ENGINES, resolve_engine_name, vllm_problem
from workers.engines.slot_cache import check_layers
from workers.engines.vllm_process import check_replay
from workers.policy.loading import empty_network, load_model_config
from workers.policy.router import check_routers
from workers.roles.critic import critic_network

VLLM_LEAST_TEMPERATURE = 0.01
"""vLLM samples with this temperature instead of a lower one above 0."""
OWN_ENGINES = ("hf", "vllm")
"""The engines of this project, which have everything that the rows below need."""


def _engine_lacks(config: PPOConfig, attribute: str) -> bool:
    """Returns True if the class of a user's engine does not declare the attribute."""
    name = resolve_engine_name(config.rollout.name)
    if name in OWN_ENGINES:
        return False
    engine_class = ROLLOUT_ENGINES.get_fn(name)
    return not getattr(engine_class, attribute, False)


def _is_replaced_by_vllm(config: PPOConfig, temperature: float) -> bool:
    """Returns True if vLLM samples with another temperature than this one."""
    return 0 < temperature < VLLM_LEAST_TEMPERATURE and resolve_engine_name(config.rollout.name) == "vllm"


ENGINE_ROWS: tuple[Conflict, ...] = (
    Conflict(
        ("rollout.temperature",),
        _is_replaced_by_vllm,
        f"vLLM would sample with {VLLM_LEAST_TEMPERATURE}, and training compute log-probs with this temperature",
        f"set rollout.temperature={VLLM_LEAST_TEMPERATURE} or more, or rollout.name=hf",
        beside=("rollout.name",),
    ),
    Conflict(
        ("rollout.val_kwargs.temperature",),
        lambda config, temperature: config.rollout.val_kwargs.do_sample and _is_replaced_by_vllm(config, temperature),
        f"vLLM would sample with {VLLM_LEAST_TEMPERATURE}",
        f"set rollout.val_kwargs.temperature={VLLM_LEAST_TEMPERATURE} or more, rollout.val_kwargs.do_sample=false, or "
        "rollout.name=hf",
        beside=("rollout.name",),
    ),
    Conflict(
        ("async_training.partial_rollout",),
        lambda config, is_partial: config.spans_updates and _engine_lacks(config, "snapshot"),
        "partial rollouts need the engine's method snapshot, which returns its running samples",
        "add it (see workers.engines.base.RolloutEngine), or set async_training.partial_rollout=false",
        beside=("rollout.name",),
    ),
    Conflict(
        ("rollout.top_k",),
        lambda config, top_k: top_k > 0 and _engine_lacks(config, "returns_candidates"),
        "training needs the tokens that could be sampled",
        "return them and set the engine's attribute returns_candidates = True (see workers.engines.base), set "
        "rollout.name=hf or vllm, or rollout.top_k=-1",
        beside=("rollout.name",),
    ),
)
"""What an option needs from the engine."""

EXPERT_ROWS: tuple[Conflict, ...] = (
    Conflict(
        ("rollout.router_replay",),
        lambda config, replays: replays and resolve_engine_name(config.rollout.name) not in OWN_ENGINES,
        "the engines hf and vllm keep experts",
        "set rollout.name=hf or vllm",
        beside=("rollout.name",),
    ),
)
"""What training with the experts of the rollout needs from the engine."""

IMAGE_ROWS: tuple[Conflict, ...] = (
    Conflict(
        ("distillation.teachers",),
        lambda config, teachers: config.distillation.is_active,
        "teachers read only text, and rows of the data have images",
        "remove one",
    ),
    Conflict(
        ("agentic.program",),
        lambda config, program: config.is_agentic,
        "its episodes start from text",
        "remove the rows with images from the data",
    ),
    Conflict(
        ("rollout.name",),
        lambda config, name: _engine_lacks(config, "reads_images"),
        "this engine does not read Request.images, and rows of the data have images",
        "set rollout.name=hf, or the class attribute reads_images = True if it does",
    ),
    Conflict(
        ("reward_model.enable",),
        lambda config, is_enabled: is_enabled,
        "a reward model reads only text, and rows of the data have images",
        "score them with a reward function, whose parameter `images` receives them",
    ),
)
"""The parts of a run that cannot read images, for data with images."""


def check_engine(config: PPOConfig) -> None:
    """Raises UserError if the chosen engine cannot run the model; vLLM itself would fail only after its start."""
    _refuse(config, ENGINE_ROWS)
    model = config.model
    # -1 stands for all tokens
    top_k = config.rollout.top_k
    if top_k > 0:
        num_tokens = load_model_config(model).get_text_config().vocab_size
        if top_k > num_tokens:
            raise UserError(
                f"rollout.top_k={top_k}: model.path={model.path!r} has {num_tokens} tokens: set at most that"
            )

    name = resolve_engine_name(config.rollout.name)
    if name == "hf":
        try:
            check_layers(empty_network(model))
        except ValueError as error:
            raise UserError(f"model.path={model.path!r}: {error}") from error
    elif name == "vllm":
        problem = vllm_problem(model, config.rollout, device_type(config.trainer.device))
        if problem is not None:
            raise UserError(f"rollout.name={config.rollout.name}: {problem}: set rollout.name=hf")


def check_experts(config: PPOConfig) -> None:
    """Raises UserError for mixture-of-experts options that the model or the engine does not support."""
    _refuse(config, EXPERT_ROWS)
    settings = []
    if config.actor.router_aux_loss_coef:
        settings.append(f"actor.router_aux_loss_coef={config.actor.router_aux_loss_coef}")
    if config.rollout.router_replay:
        settings.append("rollout.router_replay=true")
        if resolve_engine_name(config.rollout.name) == "vllm":
            check_replay(config.rollout, device_type(config.trainer.device))
    check_routers(config.model, settings)


def check_images(config: PPOConfig) -> None:
    """Raises UserError if a part of the run cannot read the images of the prompts."""
    _refuse(config, IMAGE_ROWS)
    if not needs_critic(config):
        return
    policy = load_model_config(config.model)
    critic = load_model_config(critic_network(config))
    # images are cut into patches once, in the way of the policy
    if critic.model_type != policy.model_type or not _have_same_patches(critic.vision_config, policy.vision_config):
        raise UserError(
            f"critic.model.path={config.critic.model.path!r}: a {critic.model_type} model does not read the images "
            f"that are prepared for {policy.model_type}; set critic.model.path=null or a model of that family"
        )


def _have_same_patches(first: PretrainedConfig, second: PretrainedConfig) -> bool:
    """Returns True if two vision models cut images into the same patches."""
    for name in ("patch_size", "temporal_patch_size", "spatial_merge_size", "in_channels"):
        if getattr(first, name) != getattr(second, name):
            return False
    return True


def _refuse(config: PPOConfig, rows: Iterable[Conflict]) -> None:
    """Raises ConfigError with all conflicts of the configuration."""
    problems: list[str] = []
    for row in rows:
        problems += row.problems(config, ())
    if problems:
        raise ConfigError(problems)
