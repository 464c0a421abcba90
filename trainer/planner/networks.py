"""The networks of a run: their shapes, and how an FSDP engine holds them on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from trainer.planner.accelerators import Accelerator
from trainer.planner.model_shape import ModelShape, read_shape
from trainer.ppo.requirements import needs_critic, needs_reference_model
from verl_lite.config import FSDPConfig, ModelConfig, NetworkConfig, PPOConfig, SupervisedConfig
from workers.policy.loading import count_parameters, count_trained
from workers.roles.critic import critic_network
from workers.roles.frozen_models import teacher_network

BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2}
FP32 = 4
BF16 = 2
# bytes of AdamW's two moments per trainable parameter
MOMENTS = 2 * FP32
# the layer that computes and the next, prefetched layer
GATHERED_LAYERS = 2
# prefix of the role of a teacher
TEACHER = "teacher "


@dataclass(frozen=True)
class Networks:
    """Shapes of the run's networks; None for a role that the run does not have.

    Attributes:
        teachers: Shapes of the teachers with a model of their own, by name.
    """

    policy: ModelShape
    critic: ModelShape | None = None
    reward_model: ModelShape | None = None
    teachers: Mapping[str, ModelShape] = field(default_factory=dict)


def read_networks(config: PPOConfig) -> Networks:
    """Reads the shapes of the run's networks from their config.json files. Raises UserError if one is missing."""
    critic = None
    if needs_critic(config):
        # a critic without a path starts from the policy's model
        name = "model.path" if config.critic.model.path is None else "critic.model.path"
        critic_shape = read_shape(critic_network(config), name)
        critic = critic_shape.as_scorer()
    reward_model = None
    if config.reward_model.enable:
        reward_model_shape = read_shape(config.reward_model.model, "reward_model.model.path")
        reward_model = reward_model_shape.as_scorer()

    policy = read_shape(config.model)
    max_pixels = config.data.max_pixels
    # larger images are scaled down, which limits the patches that attend to each other
    if policy.tower is not None and max_pixels is not None:
        largest_image = max(1, max_pixels // policy.tower.pixels)
        tower = replace(policy.tower, largest_image=largest_image)
        policy = replace(policy, tower=tower)

    teachers = {}
    for teacher in config.distillation.named_teachers():
        # others are the policy itself, or behind a URL
        if teacher.path:
            key = f"distillation.teachers.{teacher.name}.path"
            teachers[teacher.name] = read_shape(teacher_network(config, teacher), key)
    return Networks(policy, critic, reward_model, teachers)


def checkpoint_bytes(config: PPOConfig | SupervisedConfig) -> int:
    """Returns the estimated size of one checkpoint: fp32 weights of the trained models, and AdamW's two moments."""
    # frozen networks are not part of a checkpoint
    trained = count_trained(config.model)
    if isinstance(config, PPOConfig) and needs_critic(config):
        trained += count_parameters(critic_network(config))
    return trained * (FP32 + MOMENTS)


@dataclass(frozen=True)
class HeldNetwork:
    """A network in an FSDP engine.

    Attributes:
        shape: Sizes of the network.
        ranks: Number of ranks that share one copy.
        compute: Bytes per element in passes.
        reduce: Bytes per element in the reduction of gradients.
        trained: Number of trainable parameters: all, all but those of a vision tower, those of the adapter, or 0 for a
            frozen network.
        adapter: Number of adapter parameters.
        fsdp: Options of the engine.
        matrices: Number of parameters that Muon updates.
    """

    shape: ModelShape
    ranks: int
    compute: int
    reduce: int = FP32
    trained: int = 0
    adapter: int = 0
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    matrices: int = 0

    @property
    def trains_tower(self) -> bool:
        """True if the network has a vision tower and all its parameters are trained."""
        trains_all = self.trained == self.shape.parameters
        return self.shape.tower is not None and trains_all

    @property
    def weights(self) -> float:
        """Bytes of this rank's weights: fp32 if all are trained, else the compute dtype plus an fp32 adapter."""
        size = self.compute
        if self.trained and not self.adapter:
            size = FP32
        whole = size * self.shape.parameters + FP32 * self.adapter
        return whole / self.ranks

    @property
    def moments(self) -> float:
        """Bytes of this rank's shard of AdamW's two moments, or Muon's one moment."""
        # Muon updates matrices with one moment, and the other parameters are AdamW's
        whole = MOMENTS * self.trained - FP32 * self.matrices
        return whole / self.ranks

    @property
    def optimizer(self) -> str:
        """Name of the optimizer in a plan."""
        return "Muon" if self.matrices else "AdamW"

    @property
    def gathered(self) -> float:
        """Bytes gathered in a pass: the root (embedding, output layer) and two layers, or all layers."""
        shape = self.shape
        layers = shape.layers
        # without resharding, all gathered layers stay until their backward pass
        if self.fsdp.reshard_after_forward:
            layers = min(GATHERED_LAYERS, shape.layers)
        layer_bytes = self.compute * shape.layer_parameters + FP32 * self.adapter / shape.layers
        root_parameters = shape.root_parameters
        if shape.tower is not None:
            root_parameters += shape.tower.root_parameters
        return self.compute * root_parameters + layers * layer_bytes

    def gradients(self, micro_batches: int) -> tuple[float, float]:
        """Returns the bytes of unreduced gradients and of this rank's fp32 shard of reduced gradients.

        With several micro-batches, full gradients accumulate on every rank in the dtype of the reduction. The shard
        then replaces them layer by layer, so only the bytes that it needs beyond them count. With one micro-batch, or
        if every micro-batch is reduced, only gradients of the root and of two layers exist at the same time.
        """
        shape = self.shape
        shard = FP32 * self.trained / self.ranks
        # FSDP keeps unreduced gradients until the last micro-batch, which saves the other reductions
        if micro_batches > 1 and not self.fsdp.reduce_every_micro_batch:
            whole = float(self.reduce * self.trained)
            return whole, max(0.0, shard - whole)
        if self.adapter or not self.trained:
            adapter_gradients = 2.0 * FP32 * self.adapter * GATHERED_LAYERS / shape.layers
            return adapter_gradients, shard

        layers = min(GATHERED_LAYERS, shape.layers)
        parameters = shape.root_parameters + layers * shape.layer_parameters
        if shape.tower is not None and self.trains_tower:
            parameters += shape.tower.root_parameters
        # in the dtype of the pass, and a copy in that of the reduction
        unreduced = float((self.compute + self.reduce) * parameters)
        return unreduced, shard


_COUNTED: dict[str, int] = {}  # sizes of adapters that `trained_parameters` counted


def trained_parameters(model: NetworkConfig, shape: ModelShape, *, freezes_tower: bool) -> tuple[int, int]:
    """Returns the network's number of trainable parameters and, of these, the number in its LoRA adapter."""
    if not isinstance(model, ModelConfig) or not model.lora_rank:
        trained = shape.parameters
        if shape.tower is not None and freezes_tower:
            trained -= shape.tower.parameters
        return trained, 0
    has_all_modules = list(model.target_modules) == ["all-linear"] and not model.exclude_modules
    if has_all_modules:
        adapter = shape.adapter_parameters(model.lora_rank)
        return adapter, adapter

    # modules are chosen by name, so the network is built to count them; --fit asks for the same one many times
    chosen_modules = (model.lora_rank, model.target_modules, model.exclude_modules)
    # as text, because lists cannot be keys
    key = repr((model.path, model.override_config, chosen_modules))
    if key not in _COUNTED:
        _COUNTED[key] = count_trained(model)
    adapter = _COUNTED[key]
    return adapter, adapter


def compute_size(name: str, device: Accelerator) -> int:
    """Returns the bytes per element for a dtype option; `auto` selects the device's default."""
    if name in BYTES:
        return BYTES[name]
    return device.size


def ranks_of_a_copy(fsdp: FSDPConfig, slots: int) -> int:
    """Returns the number of devices that share one copy of the weights."""
    if fsdp.fsdp_size is None or fsdp.fsdp_size < 1:
        return slots
    return min(fsdp.fsdp_size, slots)


def recomputed_layers(model: NetworkConfig, shape: ModelShape) -> int:
    """Returns the number of layers that gradient checkpointing recomputes."""
    if not model.enable_gradient_checkpointing:
        return 0
    if model.gradient_checkpointing_layers is None:
        return shape.layers
    return min(model.gradient_checkpointing_layers, shape.layers)


def held_network(
    slots: int,
    device: Accelerator,
    shape: ModelShape,
    fsdp: FSDPConfig,
    trained: int = 0,
    adapter: int = 0,
    optimizer: str = "adamw",
) -> HeldNetwork:
    """Returns a network in an FSDP engine.

    Args:
        slots: Number of devices of the run.
        device: Kind of the devices.
        shape, fsdp, trained, adapter: See `HeldNetwork`.
        optimizer: Value of the option `optimizer`, such as "adamw" or "muon".
    """
    matrices = 0
    # all parameters of an adapter are matrices
    if optimizer == "muon":
        matrices = adapter or shape.matrix_parameters
    return HeldNetwork(
        shape=shape,
        ranks=ranks_of_a_copy(fsdp, slots),
        compute=compute_size(fsdp.mixed_precision.param_dtype, device),
        reduce=compute_size(fsdp.mixed_precision.reduce_dtype, device),
        trained=trained,
        adapter=adapter,
        fsdp=fsdp,
        matrices=matrices,
    )


def held_networks(
    config: PPOConfig,
    networks: Networks,
    slots: int,
    device: Accelerator,
) -> Iterator[tuple[str, HeldNetwork]]:
    """Yields the role and the network of each FSDP engine in the run."""
    held = partial(held_network, slots, device)
    policy = networks.policy
    actor = config.actor
    trained, adapter = trained_parameters(config.model, policy, freezes_tower=actor.freeze_vision_tower)
    yield "actor", held(policy, actor.fsdp_config, trained, adapter, actor.optim.optimizer)
    if needs_reference_model(config):
        yield "reference", held(policy, config.ref.fsdp_config)
    # teachers have the reference's options
    for name, shape in networks.teachers.items():
        yield f"{TEACHER}{name}", held(shape, config.ref.fsdp_config)

    critic = networks.critic
    if critic is not None:
        options = config.critic
        trained = critic.parameters
        if critic.tower is not None:
            # the vision tower is frozen in a critic too
            trained -= critic.tower.parameters
        yield "critic", held(critic, options.fsdp_config, trained, 0, options.optim.optimizer)
    if networks.reward_model is not None:
        yield "reward model", held(networks.reward_model, config.reward_model.fsdp_config)
