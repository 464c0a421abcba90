"""Loads a model from a Hugging Face folder or a cached hub name, with the config entries that the user overrides.

Only rank 0 reads the weights. The other ranks build an empty model with the same shapes, and the engine fills their
shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.engine.checkpoint import save_model_assets
from workers.engine.network import BuildArguments, EngineNetwork, NetworkBuilder, blocks_named
from workers.engine.packing import ModelInputs
from workers.engine.sequence_parallel import sequence_group
from workers.policy.activations import limit_activations
from workers.policy.adapter import count_trained_parameters, has_adapter, refuse_to_train_choosers
from workers.policy.classifier import classifier_of
from workers.policy.compiled import compile_policy
from workers.policy.model_errors import user_error_on_failure
from workers.policy.token_mixing import Arrangement, arrangement_of, mixing_layers, sharding_problem
from workers.policy.vision import MULTI_MODAL_INPUTS, has_vision, prompt_digests, unused_tower, with_images


@dataclass(frozen=True)
class NetworkSpec:
    """Specification of a network to build on the CPU in `dtype`.

    with_weights: False sets only the buffers. The parameters stay uninitialised and need no memory until written.
    """

    model: NetworkConfig
    config: PretrainedConfig
    dtype: torch.dtype
    with_weights: bool


class Policy(EngineNetwork):
    """A transformers network of tokens with a forward that computes outputs from the hidden states.

    The parameters of `model` have the prefix `model.`, followed by their Hugging Face names. `forward` takes
    `ModelInputs` and options, and returns outputs (b, R) by name.

    extra_inputs: columns that `forward` reads besides the token columns if the batch has them: multi_modal_inputs, and
        others of the shape (b, P+R, ...) or (b, R, ...).
    trains_vision: True if the vision tower is trained.
    adapter: peft's config if an adapter is trained instead of `model`'s own parameters (`workers.policy.adapter`).
    spec, arrangement: the network's specification, and the function that converts micro-batches to inputs
        (`workers.policy.token_mixing`); set by `token_network`.
    """

    model: PreTrainedModel
    spec: NetworkSpec
    arrangement: Arrangement
    prefix = "model."
    extra_inputs: tuple[str, ...] = (MULTI_MODAL_INPUTS,)
    trains_vision = False

    def blocks(self) -> list[nn.Module]:
        """The decoder layers: the modules that a Hugging Face model declares in `_no_split_modules`."""
        return blocks_named(self.model, set(getattr(self.model, "_no_split_modules", None) or ()))

    def prepare_inputs(self, micro_batch: DataProto, device: torch.device) -> tuple[ModelInputs, bool]:
        """The inputs of a micro-batch on `device`, and True if any predicted token counts."""
        columns: dict[str, Any] = dict(micro_batch.batch.items())
        images: Any = micro_batch.non_tensor_batch.get(MULTI_MODAL_INPUTS)
        if images is not None:
            columns["prompt_digests"] = prompt_digests(images)
        inputs = self.arrangement(columns)
        if images is not None:
            inputs = with_images(inputs, images, columns["position_ids"], self.model.config.image_token_id)
        for name in self.extra_inputs:
            if name in columns:
                inputs = inputs.with_column(name, columns[name])
        if self.sequence_group is not None:
            inputs = inputs.shard(self.sequence_group)
        return inputs.to(device), inputs.num_active > 0

    def save_assets(self, path: str) -> None:
        """Writes config, tokenizer, generation config and the adapter's config to the folder `path`."""
        save_model_assets(path, self.spec.model, self.spec.config, self.adapter)

    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        """The backbone's last hidden states: (1, T, H) packed, (b, S, H) padded, (n, L, H) aligned."""
        packed = {} if inputs.sequences is None else {"packed_sequences": inputs.sequences}
        backbone = self.model.base_model if inputs.images else self.model.get_decoder()
        runs_dummy = self.trains_vision or (inputs.images is not None and dist.get_world_size() > 1)
        # before the decoder, as for images: all ranks gather the weights of the blocks in the same order
        zero = unused_tower(self.model) if runs_dummy and not inputs.images else None
        hidden = backbone(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
            **packed,
            **(inputs.images or {}),
        ).last_hidden_state
        return hidden if zero is None else hidden + zero.to(hidden.dtype)

    def label_of(self, head: nn.Linear, inputs: ModelInputs) -> torch.Tensor:
        """Applies a head with one label at each position that predicts a response token. Returns its logits (b, R) in
        the columns of the predicted tokens; fp32, 0 elsewhere."""
        hidden = self.hidden_states(inputs).flatten(0, 1).index_select(0, inputs.predict_index)
        dtype = torch.promote_types(hidden.dtype, torch.float32)  # cheap for a single label
        bias = None if head.bias is None else head.bias.to(dtype)
        return inputs.scatter(F.linear(hidden.to(dtype), head.weight.to(dtype), bias).squeeze(-1))


PolicyBuilder = Callable[[NetworkSpec], Policy]


def token_network(
    model: NetworkConfig, build_policy: PolicyBuilder, sequence_parallel_size: int = 1, trains_vision: bool = False
) -> NetworkBuilder:
    """Returns the engine's builder of the network that `model` specifies, as the policy that `build_policy` makes.

    sequence_parallel_size: number of consecutive ranks that share the tokens of each micro-batch. trains_vision: False
    freezes the vision tower of a vision-language model.
    """

    def build(arguments: BuildArguments) -> Policy:
        spec = NetworkSpec(
            model,
            load_model_config(model),
            dtype=arguments.compute_dtype if has_adapter(model) else arguments.dtype,
            with_weights=arguments.with_weights,
        )
        policy = build_policy(spec)
        policy.sequence_group = sequence_group(sequence_parallel_size) if sequence_parallel_size > 1 else None
        policy.spec, policy.arrangement = spec, arrangement_of(policy.model, model)
        if arguments.trains:
            policy.trains_vision = trains_vision and has_vision(spec.config) and not has_adapter(model)
            if not policy.trains_vision:
                _freeze_non_text_layers(policy.model)
            refuse_to_train_choosers(policy.model)
            limit_activations(policy.model, model)
        if model.compile:
            compile_policy(policy)
        return policy

    return build


def _freeze_non_text_layers(network: PreTrainedModel) -> None:
    """Freezes the layers that do not process text, such as image encoders: they get no gradient."""
    of_text = set(network.get_decoder().parameters())
    for parameter in network.base_model.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter in of_text)


def load_model_config(model: NetworkConfig) -> PretrainedConfig:
    """The model's config with `model.override_config` applied. For a multimodal model, returns the config of its text
    model if transformers has a causal language model for that. Raises UserError if the path or an override does not
    exist."""
    if model.path is None:
        raise UserError("model.path=null: expected a Hugging Face folder or the name of a cached model")
    remedy = (
        "expected a folder with config.json and weights in Hugging Face format, or the name of a model in the local "
        "hub cache"
    )
    with user_error_on_failure(f"model.path={model.path!r} cannot be read", remedy):
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    causal: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if causal is not None and causal.config_class is type(config.get_text_config()):
        config = config.get_text_config()
    for name, value in model.override_config.items():
        is_off = value is None or value == 0
        if is_off and not hasattr(config, name):
            continue  # 0, false and null switch off what the model does not have anyway, such as embd_pdrop=0
        if not hasattr(config, name):
            raise UserError(f"model.override_config.{name}={value!r}: a {config.model_type} config has no such entry")
        entry = f"model.override_config.{name}={value!r} is not accepted"
        with user_error_on_failure(entry, f"a {config.model_type} config has {getattr(config, name)!r} there"):
            setattr(config, name, value)
    return config


def longest_context(model: PretrainedConfig) -> int | None:
    """The model's maximum number of tokens according to its config; None if the config has no such entry."""
    return getattr(model.get_text_config(), "max_position_embeddings", None)


def shown(model: NetworkConfig) -> str:
    """The network as error messages name it: model.path and model.override_config."""
    replaced = f" with model.override_config={dict(model.override_config)}" if model.override_config else ""
    return f"model.path={model.path!r}{replaced}"


def count_parameters(model: NetworkConfig) -> int:
    """Number of parameters of a causal language model, computed from its config; tied parameters count once."""
    return sum(parameter.numel() for parameter in empty_network(model).parameters())


def count_trained(model: NetworkConfig) -> int:
    """Number of trained parameters, which are the adapter's if there is one, computed from the config. Raises UserError
    if `model.target_modules` names no layer of the network."""
    return count_trained_parameters(empty_network(model), model)


def packing_note(model: NetworkConfig) -> str:
    """A line for the user if `model.use_remove_padding` is set and this network cannot be packed; otherwise empty."""
    if not model.use_remove_padding:
        return ""
    network = empty_network(model)
    if not (mixing := mixing_layers(network)):
        return ""
    return (
        f"model.use_remove_padding=true: a {type(network).__name__} is not packed, because layers of kind "
        f"{', '.join(mixing[:3])} cannot separate packed sequences; each sequence of a micro-batch has its own row, "
        "padded to the longest"
    )


def check_sequence_parallel(model: NetworkConfig, role: str, size: int) -> None:
    """Raises UserError if the model cannot be trained with this many ranks per sequence. Reads only its config.

    role: prefix of the option, such as "actor.".
    """
    if size > 1 and (problem := sharding_problem(empty_network(model), model, size)):
        raise UserError(f"{role}ulysses_sequence_parallel_size={size} with model.path={model.path!r}: {problem}")


def empty_network(model: NetworkConfig) -> PreTrainedModel:
    """The causal language model on the meta device, built from its config. Raises UserError if it cannot be built."""
    config = load_model_config(model)
    remedy = "its config.json must describe a causal language model; correct it or the entries of model.override_config"
    with user_error_on_failure(f"{shown(model)} cannot be built", remedy), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)


def build_network(auto_class: Any, spec: NetworkSpec, *, new_head: bool = False) -> PreTrainedModel:
    """Builds a network of a transformers Auto class, with dropout and other noise disabled.

    new_head: the head may be missing from the checkpoint and is then initialised with zeros. Raises UserError if the
    checkpoint lacks other weights, which transformers would initialise at random.
    """
    disable_progress_bar()
    if spec.with_weights:
        network = _load_network(auto_class, spec, new_head)
    else:
        with no_init_weights():
            network = auto_class.from_config(
                spec.config, dtype=spec.dtype, trust_remote_code=spec.model.trust_remote_code
            )
        network.tie_weights()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for noise in ("attention_dropout", "jitter_noise"):  # jitter_noise: noise on the inputs of routers
            if isinstance(getattr(module, noise, None), float):
                vars(module)[noise] = 0.0
    return network


def build_with_label(kind: str, spec: NetworkSpec, refusal: str) -> PreTrainedModel:
    """Builds a network with one label from a saved one, or from a causal language model with a new head of zeros.

    kind: see `workers.policy.classifier`. refusal: message of the UserError for a saved network with several labels;
    has the fields {path} and {labels}.
    """
    auto_class = classifier_of(kind, spec.config)
    has_head = any(kind in name for name in spec.config.architectures or ())
    if has_head and spec.config.num_labels != 1:
        raise UserError(refusal.format(path=spec.model.path, labels=spec.config.num_labels))
    spec.config.num_labels = 1
    network = build_network(auto_class, spec, new_head=not has_head)
    spec.config.architectures = [type(network).__name__]  # the class that loads its checkpoints
    return network


def _load_network(auto_class: Any, spec: NetworkSpec, new_head: bool) -> PreTrainedModel:
    """Builds the network and loads the checkpoint's weights. Arguments as in `build_network`."""
    verbosity = get_verbosity()
    if new_head:  # suppresses transformers' long report of missing weights, which are expected here
        set_verbosity_error()
    remedy = "its weights must be complete and fit its config.json and model.override_config"
    try:
        with user_error_on_failure(f"{shown(spec.model)}: the weights cannot be loaded", remedy):
            network, report = auto_class.from_pretrained(
                str(spec.model.path),
                config=spec.config,
                dtype=spec.dtype,
                trust_remote_code=spec.model.trust_remote_code,
                output_loading_info=True,
            )
    finally:
        set_verbosity(verbosity)
    backbone = f"{network.base_model_prefix}."
    missing = set(report["missing_keys"])
    replaceable = {name for name in missing if new_head and not name.startswith(backbone)}
    if missing - replaceable:
        raise UserError(
            f"model.path={spec.model.path!r}: its weights do not fit a {type(network).__name__}, which also needs "
            f"{', '.join(sorted(missing - replaceable)[:5])}"
        )
    with torch.no_grad():
        for name in replaceable:
            network.get_parameter(name).zero_()
    return network
