"""Loads a model from a Hugging Face folder or a cached hub name, with the config entries that the user overrides.

Only rank 0 reads the weights. The other ranks build an empty model with the same shapes, and the engine fills their
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject
from verl_lite.protocol import DataProto
from workers.engine.network import BuildArguments, EngineNetwork, NetworkBuilder, block_classes, blocks_named
from workers.engine.packing import ModelInputs
from workers.engine.sequence_parallel import sequence_group
from workers.policy.activations import limit_activations
from workers.policy.adapter import count_trained_parameters, has_adapter, refuse_to_train_choosers
from workers.policy.assets import model_assets
from workers.policy.classifier import AutoClass, causal_lm_class_of, classifier_of
from workers.policy.compiled import compile_policy
from workers.policy.export import rehearse_export, save_assets
from workers.policy.generation_config import generation_config
from workers.policy.model_errors import user_error_on_failure
from workers.policy.saved_adapter import CONFIG_FILE
from workers.policy.terminal import clean_library_logs
from workers.policy.token_mixing import Arrangement, arrangement_of, sharding_problem, unpacked_note
from workers.policy.vision import MULTI_MODAL_INPUTS, has_vision, prompt_digests, unused_tower, with_images
from workers.policy.weights import LoadingReport, has_own_output_layer, require_fitting_weights

clean_library_logs()


@dataclass(frozen=True)
class NetworkSpec:
    """Specification of a network to build on the CPU.

    Attributes:
        model: the options of the network.
        config: the network's config, with the options applied.
        dtype: dtype of the parameters.
        with_weights: False sets only the buffers. The parameters stay uninitialised and need no memory until written.
        is_empty: True builds the network on the meta device and compares it with the weight files. They are not read.
    """

    model: NetworkConfig
    config: PretrainedConfig
    dtype: torch.dtype
    with_weights: bool
    is_empty: bool = False


class Policy(EngineNetwork):
    """A transformers network of tokens with a forward that computes outputs from the hidden states.

    The parameters of `model` have the prefix `model.`, followed by their Hugging Face names. `forward` takes
    `ModelInputs` and options, and returns outputs (b, R) by name.

    Attributes:
        model: the transformers network.
        spec: the network's specification; set by `token_network`.
        arrangement: the function that converts micro-batches to inputs (`workers.policy.token_mixing`); set by
            `token_network`.
        extra_inputs: columns that `forward` reads besides the token columns if the batch has them: multi_modal_inputs,
            and others of the shape (b, P+R, ...) or (b, R, ...).
        trains_vision: True if the vision tower is trained.
        assets: files of a checkpoint besides the weights, on the rank that writes them.
    """

    model: PreTrainedModel
    spec: NetworkSpec
    arrangement: Arrangement
    prefix = "model."
    extra_inputs: tuple[str, ...] = (MULTI_MODAL_INPUTS,)
    trains_vision = False
    assets: Mapping[str, bytes] = MappingProxyType({})

    def blocks(self) -> list[nn.Module]:
        """Returns the decoder layers: the modules that a Hugging Face model declares in `_no_split_modules`."""
        return blocks_named(self.model, block_classes(self.model))

    def prepare_inputs(self, micro_batch: DataProto, device: torch.device) -> tuple[ModelInputs, bool]:
        """Returns the inputs of a micro-batch on `device`, and True if any predicted token counts."""
        columns: dict[str, torch.Tensor] = {}
        for key in micro_batch.batch.keys():
            columns[str(key)] = micro_batch.batch[key]
        image_column = micro_batch.non_tensor_batch.get(MULTI_MODAL_INPUTS)
        if image_column is None:
            inputs = self.arrangement(columns)
        else:
            # prompts with equal tokens and different images share no tokens
            images = image_column.tolist()
            columns["prompt_digests"] = prompt_digests(images)
            text_inputs = self.arrangement(columns)
            image_token_id = self.model.config.image_token_id
            inputs = with_images(text_inputs, images, columns["position_ids"], image_token_id)

        for name in self.extra_inputs:
            if name in columns:
                inputs = inputs.with_column(name, columns[name])
        # after the columns, which are those of the whole row
        if self.sequence_group is not None:
            inputs = inputs.shard(self.sequence_group)
        return inputs.to(device), inputs.num_active > 0

    def save_assets(self, path: str) -> None:
        """Writes config, tokenizer, generation config and the adapter's config to the folder `path`."""
        save_assets(path, self.assets, self.adapter)

    def hidden_states(self, inputs: ModelInputs) -> torch.Tensor:
        """Computes the backbone's last hidden states: (1, T, H) packed, (b, S, H) padded, (n, L, H) aligned."""
        options: dict[str, object] = dict(inputs.images or {})
        if inputs.sequences is not None:
            options["packed_sequences"] = inputs.sequences
        # the decoder alone has no vision tower, and less to do
        backbone = self.model.base_model if inputs.images else self.model.get_decoder()

        # A trained tower needs a gradient also without images. A frozen one is sharded: if other ranks may have images,
        # all ranks must gather its weights.
        runs_dummy = self.trains_vision or (inputs.images is not None and dist.get_world_size() > 1)
        zero = None
        # before the decoder, as for images: all ranks gather the weights of the blocks in the same order
        if runs_dummy and not inputs.images:
            zero = unused_tower(self.model)
        outputs = backbone(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
            **options,
        )
        hidden: torch.Tensor = outputs.last_hidden_state
        if zero is None:
            return hidden
        return hidden + zero.to(hidden.dtype)

    def label_of(self, head: nn.Linear, inputs: ModelInputs) -> torch.Tensor:
        """Applies a head with one label at each position that predicts a response token. Returns its logits (b, R) in
        the columns of the predicted tokens; fp32, 0 elsewhere."""
        all_hidden = self.hidden_states(inputs).flatten(0, 1)
        # (N, H)
        hidden = all_hidden.index_select(0, inputs.predict_index)

        # in fp32, which is cheap for a single label
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        weight = head.weight.to(dtype)
        bias = None if head.bias is None else head.bias.to(dtype)
        # (N, 1)
        labels = F.linear(hidden.to(dtype), weight, bias)
        return inputs.scatter(labels.squeeze(-1))


PolicyBuilder = Callable[[NetworkSpec], Policy]


def token_network(
    model: NetworkConfig,
    build_policy: PolicyBuilder,
    sequence_parallel_size: int = 1,
    trains_vision: bool = False,
    chat_template: str | None = None,
    answer_ends: Callable[[], Collection[int]] = tuple,
) -> NetworkBuilder:
    """Returns the engine's builder of the network that `model` specifies, as the policy that `build_policy` makes.

    Args:
        model: the network.
        build_policy: builds the policy.
        sequence_parallel_size: number of consecutive ranks that share the tokens of each micro-batch.
        trains_vision: False freezes the vision tower of a vision-language model.
        chat_template: data.chat_template of a trained network, which its checkpoints and exports contain.
        answer_ends: returns the tokens with which a trained network learns to end its answers; see `model_assets`.
    """

    def build(arguments: BuildArguments) -> Policy:
        is_empty = arguments.device.type == "meta"
        # the base model of an adapter is frozen, and needs no fp32
        dtype = arguments.compute_dtype if has_adapter(model) else arguments.dtype
        config = load_model_config(model)
        spec = NetworkSpec(model, config, dtype, with_weights=arguments.with_weights, is_empty=is_empty)
        policy = build_policy(spec)
        if sequence_parallel_size > 1:
            policy.sequence_group = sequence_group(sequence_parallel_size)
        policy.spec = spec
        policy.arrangement = arrangement_of(policy.model, model)

        if arguments.trains:
            policy.trains_vision = trains_vision and has_vision(config) and not has_adapter(model)
            if not policy.trains_vision:
                _freeze_non_text_layers(policy.model)
            refuse_to_train_choosers(policy.model)
            limit_activations(policy.model, model)
            # on the rank that writes them, or to find errors
            if arguments.with_weights or is_empty:
                policy.assets = model_assets(model, config, chat_template, answer_ends())

        if model.compile and not is_empty:
            compile_policy(policy)
        return policy

    return build


def check_network(
    model: NetworkConfig,
    build_policy: PolicyBuilder,
    *,
    trains: bool,
    chat_template: str | None = None,
) -> None:
    """Raises UserError for all that would prevent the workers from building and training this network, or prevent the
    export of the trained network: its config, code, weight files, saved adapter, logits, tokenizer and other files.

    Reads no weights, except to compare an output layer with the embedding. Options that depend on the number of devices
    are checked elsewhere.
    """
    # the meta device, on which the dtypes do not matter
    meta = torch.device("meta")
    arguments = BuildArguments(torch.float32, torch.float32, trains=trains, with_weights=False, device=meta)
    build_network_of_tokens = token_network(model, build_policy, chat_template=chat_template)
    # reads the config and the code, and compares the names in the files of weights and adapter with the network's
    policy = build_network_of_tokens(arguments)
    assert isinstance(policy, Policy)
    if trains:
        kind = type(policy.model).__name__
        rehearse_export(str(model.path), kind, policy.assets, trust_remote_code=model.trust_remote_code)


def _freeze_non_text_layers(network: PreTrainedModel) -> None:
    """Freezes the layers that do not process text, such as image encoders: they get no gradient."""
    text_parameters = set(network.get_decoder().parameters())
    for parameter in network.base_model.parameters():
        if parameter not in text_parameters:
            parameter.requires_grad_(False)


def load_model_config(model: NetworkConfig) -> PretrainedConfig:
    """Returns the model's config with `model.override_config` applied.

    For a multimodal model, this is the config of its text model if transformers has a causal language model for that.

    Raises:
        UserError: the path or an override does not exist, or the weights there cannot be trained.
    """
    if model.path is None:
        raise UserError("model.path=null: expected a Hugging Face folder or the name of a cached model")
    remedy = (
        "expected a folder with config.json and weights in Hugging Face format, or the name of a model in the local "
        "hub cache"
    )
    _refuse_adapter_folder(model)
    with user_error_on_failure(f"model.path={model.path!r} cannot be read", remedy):
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)

    # of a multimodal model whose text model is a network of its own, that network
    text_config = config.get_text_config()
    is_whole = text_config is config
    causal_lm_class = causal_lm_class_of(config)
    if causal_lm_class is not None and causal_lm_class.config_class is type(text_config):
        config = text_config
    _apply_overrides(config, model)
    _refuse_quantized_weights(config, model)
    _untie_own_output_layer(config, model, is_whole)
    return config


def _apply_overrides(config: PretrainedConfig, model: NetworkConfig) -> None:
    """Sets the entries of `model.override_config`. Raises UserError for an entry that the config lacks or refuses."""
    for name, value in model.override_config.items():
        if not hasattr(config, name):
            # 0, false and null switch off what the model does not have anyway, such as embd_pdrop=0
            if value is None or value == 0:
                continue
            raise UserError(f"model.override_config.{name}={value!r}: a {config.model_type} config has no such entry")
        problem = f"model.override_config.{name}={value!r} is not accepted"
        remedy = f"a {config.model_type} config has {getattr(config, name)!r} there"
        with user_error_on_failure(problem, remedy):
            setattr(config, name, value)


def _refuse_adapter_folder(model: NetworkConfig) -> None:
    """Raises UserError for the folder of an adapter, which transformers would add to the network on one rank."""
    if (Path(str(model.path)) / CONFIG_FILE).is_file():
        raise UserError(
            f"model.path={model.path!r}: it contains an adapter ({CONFIG_FILE}). Set model.path to its base model and "
            f"model.lora_adapter_path={model.path}, or merge it with peft's merge_and_unload and give the merged model"
        )


def _refuse_quantized_weights(config: PretrainedConfig, model: NetworkConfig) -> None:
    """Raises UserError for quantized weights: the engines compute with weights in fp32 or bf16."""
    # a multimodal model can have the entry in either of them
    for part in (config, config.get_text_config()):
        quantization = getattr(part, "quantization_config", None)
        if quantization is None:
            continue
        entries = quantization if isinstance(quantization, dict) else quantization.to_dict()
        raise UserError(
            f"model.path={model.path!r}: its config.json has a quantization_config "
            f"(quant_method={entries.get('quant_method')!r}), and quantized weights can be neither trained nor used as "
            "a frozen network. Give the model with weights in bf16 or fp32"
        )


def _untie_own_output_layer(config: PretrainedConfig, model: NetworkConfig, is_whole: bool) -> None:
    """Sets tie_word_embeddings to false if the weights have an output layer that differs from the embedding.

    transformers keeps such an output layer, too, but only in the process that reads the weights. An adapter that was
    merged after new tokens were added leaves such a folder.

    Args:
        is_whole: False for the text model of a multimodal model, whose rollout engine reads another config.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return
    if not has_own_output_layer(str(model.path), config):
        return
    if model.override_config.get("tie_word_embeddings"):
        raise UserError(
            f"{shown(model)}: the weights have an output layer that differs from the embedding, and would lose it; "
            "remove model.override_config.tie_word_embeddings"
        )
    if not is_whole:
        raise UserError(
            f"model.path={model.path!r}: its config.json has tie_word_embeddings=true, but its weights have an output "
            "layer that differs from the embedding; set tie_word_embeddings to false in its config.json"
        )
    config.tie_word_embeddings = False


def output_layer_note(model: NetworkConfig) -> str:
    """Returns a sentence if the output layer of this model is untied because of its weights, otherwise an empty
    string."""
    if "tie_word_embeddings" not in _untied_entries(model):
        return ""
    return (
        f"model.path={model.path}: its config.json has tie_word_embeddings=true, but its weights have an output layer "
        "that differs from the embedding. Both are used, trained and exported, with tie_word_embeddings=false"
    )


def rollout_overrides(model: NetworkConfig) -> JsonObject:
    """Returns the entries in which the config of a rollout engine differs from the model's config.json."""
    return dict(model.override_config) | _untied_entries(model)


def _untied_entries(model: NetworkConfig) -> dict[str, bool]:
    """Returns tie_word_embeddings=false if `load_model_config` unties an output layer because of its weights."""
    if "tie_word_embeddings" in model.override_config:
        return {}
    config = AutoConfig.from_pretrained(str(model.path), trust_remote_code=model.trust_remote_code)
    if not getattr(config, "tie_word_embeddings", False):
        return {}
    if load_model_config(model).tie_word_embeddings:
        return {}
    return {"tie_word_embeddings": False}


def longest_context(model: PretrainedConfig) -> int | None:
    """Returns the model's maximum number of tokens according to its config; None if the config has no such entry."""
    return getattr(model.get_text_config(), "max_position_embeddings", None)


def shown(model: NetworkConfig) -> str:
    """Returns the network as error messages name it: model.path and model.override_config."""
    name = f"model.path={model.path!r}"
    if model.override_config:
        name += f" with model.override_config={dict(model.override_config)}"
    return name


def count_parameters(model: NetworkConfig) -> int:
    """Counts the parameters of a causal language model, from its config alone; tied parameters count once."""
    network = empty_network(model)
    return sum(parameter.numel() for parameter in network.parameters())


def count_trained(model: NetworkConfig) -> int:
    """Counts the trained parameters, which are the adapter's if there is one, from the config alone.

    Raises:
        UserError: `model.target_modules` names no layer of the network.
    """
    return count_trained_parameters(empty_network(model), model)


def packing_note(model: NetworkConfig) -> str:
    """Returns a line for the user if `model.use_remove_padding` is set and this network cannot be packed; otherwise an
    empty string."""
    if not model.use_remove_padding:
        return ""
    return unpacked_note(empty_network(model))


def check_sequence_parallel(model: NetworkConfig, role: str, size: int) -> None:
    """Raises UserError if the model cannot be trained with this many ranks per sequence. Reads only its config.

    Args:
        model: the network.
        role: prefix of the option, such as "actor.".
        size: number of ranks that share the tokens of a row.
    """
    if size == 1:
        return
    problem = sharding_problem(empty_network(model), model, size)
    if problem is not None:
        raise UserError(f"{role}ulysses_sequence_parallel_size={size} with model.path={model.path!r}: {problem}")


def empty_network(model: NetworkConfig) -> PreTrainedModel:
    """Returns the causal language model on the meta device, built from its config alone.

    Raises:
        UserError: it cannot be built.
    """
    config = load_model_config(model)
    remedy = "its config.json must describe a causal language model; correct it or the entries of model.override_config"
    with user_error_on_failure(f"{shown(model)} cannot be built", remedy), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)


def build_network(auto_class: AutoClass, spec: NetworkSpec, *, new_head: bool = False) -> PreTrainedModel:
    """Builds a network of a transformers Auto class, with dropout and other noise disabled.

    Args:
        auto_class: the Auto class.
        spec: the network's specification.
        new_head: the head may be missing from the checkpoint and is then initialised with zeros.

    Raises:
        UserError: the checkpoint lacks other weights, which transformers would initialise at random.
    """
    disable_progress_bar()
    if spec.with_weights or spec.is_empty:
        network = _load_network(auto_class, spec, new_head)
    else:
        network = _network_of_config(auto_class, spec)
        # as on rank 0, whose parameters have the same names then
        network.tie_weights()

    # a policy gradient needs the log-probs of the policy that sampled
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # jitter_noise: noise on the inputs of routers
        for noise in ("attention_dropout", "jitter_noise"):
            if isinstance(getattr(module, noise, None), float):
                vars(module)[noise] = 0.0
    return network


def _network_of_config(auto_class: AutoClass, spec: NetworkSpec) -> PreTrainedModel:
    """Builds a network whose buffers are set and whose parameters are uninitialised.

    They need no time, and no memory until they are written.
    """
    with no_init_weights():
        return auto_class.from_config(spec.config, dtype=spec.dtype, trust_remote_code=spec.model.trust_remote_code)


def build_with_label(kind: str, spec: NetworkSpec, refusal: str) -> PreTrainedModel:
    """Builds a network with one label from a saved one, or from a causal language model with a new head of zeros.

    Args:
        kind: see `workers.policy.classifier`.
        spec: the network's specification. Its config gets one label and the class of the network.
        refusal: message of the UserError for a saved network with several labels; has the fields {path} and {labels}.
    """
    config = spec.config
    auto_class = classifier_of(kind, config)
    has_head = any(kind in name for name in config.architectures or ())
    if has_head and config.num_labels != 1:
        raise UserError(refusal.format(path=spec.model.path, labels=config.num_labels))
    config.num_labels = 1
    network = build_network(auto_class, spec, new_head=not has_head)
    # the class that loads its checkpoints
    config.architectures = [type(network).__name__]
    return network


def _load_network(auto_class: AutoClass, spec: NetworkSpec, new_head: bool) -> PreTrainedModel:
    """Builds the network and loads the checkpoint's weights. Arguments as in `build_network`."""
    # transformers reads it with the weights, and does not name the file in its error
    generation_config(str(spec.model.path))
    # suppresses transformers' report of differences, of which `require_fitting_weights` decides
    verbosity = get_verbosity()
    set_verbosity_error()
    remedy = "its weights must be complete and fit its config.json and model.override_config"
    try:
        with user_error_on_failure(f"{shown(spec.model)}: the weights cannot be loaded", remedy):
            network, report = auto_class.from_pretrained(
                str(spec.model.path),
                config=spec.config,
                dtype=spec.dtype,
                device_map="meta" if spec.is_empty else None,
                ignore_mismatched_sizes=True,  # they are refused below
                trust_remote_code=spec.model.trust_remote_code,
                output_loading_info=True,
            )
    finally:
        set_verbosity(verbosity)

    # a new head is what is missing outside of the backbone
    backbone = f"{network.base_model_prefix}."
    head_parameters: set[str] = set()
    if new_head:
        head_parameters = {name for name in report["missing_keys"] if not name.startswith(backbone)}
    unread_parts = _unread_parts(network, spec, report)
    require_fitting_weights(network, report, shown(spec.model), may_lack=head_parameters, may_have=unread_parts)
    _require_tied_as_configured(network, spec)
    with torch.no_grad():
        for name in head_parameters:
            network.get_parameter(name).zero_()
    if not spec.is_empty:
        _set_computed_buffers(network, auto_class, spec)
    return network


def _set_computed_buffers(network: PreTrainedModel, auto_class: AutoClass, spec: NetworkSpec) -> None:
    """Sets the buffers that no weight file contains, in a loaded network whose code comes with the model.

    transformers creates the network without memory, and afterwards computes such buffers for the modules that it knows.
    All others, such as the frequencies of an own rotary embedding, would be what the memory held before.
    """
    if type(network).__module__.startswith("transformers.models."):
        return
    saved_names = network.state_dict().keys()
    computed = {name: buffer for name, buffer in network.named_buffers() if name not in saved_names}
    if not computed:
        return
    # as on the other ranks
    buffers = dict(_network_of_config(auto_class, spec).named_buffers())
    for name, buffer in computed.items():
        buffer.copy_(buffers[name])


def _require_tied_as_configured(network: PreTrainedModel, spec: NetworkSpec) -> None:
    """Raises UserError if transformers untied an output layer that `load_model_config` did not: the other ranks and the
    rollout engine would have another network. Only models with code of their own can get here."""
    head = network.get_output_embeddings()
    if spec.is_empty or head is None or not getattr(spec.config, "tie_word_embeddings", False):
        return
    embedding = network.get_input_embeddings()
    if head.weight is not embedding.weight and not torch.equal(head.weight, embedding.weight):
        raise UserError(
            f"{shown(spec.model)}: its config has tie_word_embeddings=true, but its weights have an output layer that "
            "differs from the embedding; set tie_word_embeddings to false in its config.json"
        )


def _unread_parts(network: PreTrainedModel, spec: NetworkSpec, report: LoadingReport) -> Collection[str]:
    """Returns the beginnings of the names of weights that a network leaves in its files by intention."""
    model = spec.model
    whole_config = AutoConfig.from_pretrained(str(model.path), trust_remote_code=model.trust_remote_code)
    # the other parts of a multimodal model
    if type(whole_config) is not type(spec.config):
        return ("",)
    # layers that the user removes
    if "num_hidden_layers" in model.override_config:
        return ("",)
    # a critic or reward model, made from a model with another head
    if network.get_output_embeddings() is None:
        backbone = f"{network.base_model_prefix}."
        return [name for name in report["unexpected_keys"] if not name.startswith(backbone)]
    return ()
