"""Shape of a decoder-only language model from its config.json: parameters, KV cache, arithmetic and layer widths.

All counts are numbers of elements, not bytes. The formulas follow the transformers implementations of Llama, Mistral,
Qwen2, Qwen3 and their mixture-of-experts variants. The parameters of other models are counted on the meta device, and
their activations are assumed to equal Llama's. Tests compare the counts with published numbers and with the modules.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from trainer.planner.vision_tower import TowerShape, num_elements, tower_of
from verl_lite.config import NetworkConfig, did_you_mean
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject

WITH_BIAS = ("qwen2", "qwen2_moe", "qwen2_5_vl_text")  # bias on query, key and value
WITH_HEAD_NORMS = ("qwen3", "qwen3_moe", "qwen3_vl_text")
KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer, as in its config.

    Attributes:
        inner: Width of the MLP, or of one expert.
        tied: Whether the output layer is the embedding.
        qkv_bias: Whether the projections to queries, keys and values have a bias.
        head_norms: Whether the queries and keys of each head are normalized.
        experts: Number of experts, of which each token uses `experts_per_token`; 0 for one MLP.
        uncounted: Parameters that the formulas do not cover.
        has_head: True for an output layer over the vocabulary, False for one output number.
        is_packed: Whether answers can share a prompt in a packed row (`workers.policy.token_mixing`).
        is_lean: Whether the hf engine decodes on a CPU with joined projections
            (`workers.engines.lean_decoder.LeanDecoder`).
        tower: The vision tower of a vision-language model.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    head_norms: bool = False
    experts: int = 0
    experts_per_token: int = 0
    uncounted: int = 0
    has_head: bool = True
    is_packed: bool = True
    is_lean: bool = False
    tower: TowerShape | None = None

    @property
    def query(self) -> int:
        """Total width of a token's queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Total width of a token's keys, which equals the width of its values."""
        return self.kv_heads * self.head_dim

    @property
    def active_inner(self) -> int:
        """Total inner width of the MLPs that process a token."""
        return self.inner * max(1, self.experts_per_token)

    @property
    def kv_per_token(self) -> int:
        """Elements of the KV cache per token."""
        return 2 * self.layers * self.kv

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, the unit that FSDP gathers."""
        # the projections to query and output, and to key and value
        attention = 2 * self.hidden * (self.query + self.kv)
        if self.qkv_bias:
            attention += self.query + 2 * self.kv
        if self.head_norms:
            attention += 2 * self.head_dim

        # gate, up and down projection
        mlp = 3 * self.hidden * self.inner
        mlps = max(1, self.experts) * mlp
        router = self.experts * self.hidden
        layer_norms = 2 * self.hidden
        return attention + mlps + router + layer_norms

    @property
    def matrix_parameters(self) -> int:
        """Weights of the layers' linear modules, without those of experts, which are stacked."""
        # the projections to query and output, and to key and value
        attention = 2 * (self.query + self.kv)
        mlp = 0 if self.experts else 3 * self.inner
        return self.layers * self.hidden * (attention + mlp)

    @property
    def projections(self) -> tuple[int, ...]:
        """Number of weights in each matrix product of a decode step with joined projections."""
        qkv = self.hidden * (self.query + 2 * self.kv)
        attention_output = self.query * self.hidden
        gate_and_up = 2 * self.hidden * self.inner
        down = self.inner * self.hidden
        output_layer = self.embedding
        products_of_layer = (qkv, attention_output, gate_and_up, down)
        return products_of_layer * self.layers + (output_layer,)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and also of an untied output layer."""
        return self.vocab * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, output layer, last norm and `uncounted`, without a vision tower."""
        last_norm = self.hidden
        # the weights of one output number
        head = self.hidden
        if self.has_head:
            head = 0 if self.tied else self.embedding
        return self.embedding + head + last_norm + self.uncounted

    @property
    def parameters(self) -> int:
        """Number of parameters; tied parameters count once."""
        language_model = self.layers * self.layer_parameters + self.root_parameters
        if self.tower is None:
            return language_model
        return language_model + self.tower.parameters

    @property
    def multiplied(self) -> int:
        """Weights that each token is multiplied with: no embedding, and only the experts that the token uses."""
        attention = 2 * (self.query + self.kv)
        mlps_and_router = 3 * self.active_inner + self.experts
        layer = self.hidden * (attention + mlps_and_router)
        head = self.embedding if self.has_head else self.hidden
        return self.layers * layer + head

    def adapter_parameters(self, rank: int) -> int:
        """Returns the parameters of an all-linear LoRA adapter of this rank. Output layer and experts have none."""
        # an adapter of a matrix has `rank` parameters for each of its inputs and outputs
        query_and_output = 2 * (self.hidden + self.query)
        key_and_value = 2 * (self.hidden + self.kv)
        # peft adapts linear modules, and the stacked matrices of experts are none
        mlp = 0 if self.experts else 3 * (self.hidden + self.inner)
        inputs_and_outputs = query_and_output + key_and_value + mlp
        return self.layers * rank * inputs_and_outputs

    def as_scorer(self) -> ModelShape:
        """Returns the shape with one output number instead of an output layer, as for a critic or reward model."""
        return replace(self, has_head=False, tied=False)


def _config(
    family: JsonObject,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    tied: bool = False,
) -> JsonObject:
    """Returns the config.json of a model.

    Args:
        family: Entries that all models of its family share.
        hidden, layers, heads, kv_heads, inner, tied: See `ModelShape`.
    """
    config = family | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "tie_word_embeddings": tied,
    }
    if "vision_config" in family:
        config["vision_config"] = family["vision_config"] | {"out_hidden_size": hidden}
    return config


# entries of config.json on the Hugging Face hub that the counts depend on
_POSITIONS = "max_position_embeddings"
_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    _POSITIONS: 32768,
}
_LARGE_QWEN2 = _QWEN2 | {"vocab_size": 152064, _POSITIONS: 131072}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "head_dim": 128,
    _POSITIONS: 131072,
}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    _POSITIONS: 40960,
}
_128_EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_TOWER = {
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_VISION = {
    "model_type": "qwen2_5_vl",
    _POSITIONS: 128000,
    "vision_config": _TOWER,
}
_VISION_3B = _VISION | {"vocab_size": 151936}
_VISION_7B = _VISION | {"vocab_size": 152064}
_CONFIGS: dict[str, JsonObject] = {
    "qwen2.5-0.5b": _config(_QWEN2, hidden=896, layers=24, heads=14, kv_heads=2, inner=4864, tied=True),
    "qwen2.5-1.5b": _config(_QWEN2, hidden=1536, layers=28, heads=12, kv_heads=2, inner=8960, tied=True),
    "qwen2.5-3b": _config(_QWEN2, hidden=2048, layers=36, heads=16, kv_heads=2, inner=11008, tied=True),
    "qwen2.5-7b": _config(_LARGE_QWEN2, hidden=3584, layers=28, heads=28, kv_heads=4, inner=18944),
    "qwen2.5-14b": _config(_LARGE_QWEN2, hidden=5120, layers=48, heads=40, kv_heads=8, inner=13824),
    "qwen2.5-32b": _config(_LARGE_QWEN2, hidden=5120, layers=64, heads=40, kv_heads=8, inner=27648),
    "qwen2.5-72b": _config(_LARGE_QWEN2, hidden=8192, layers=80, heads=64, kv_heads=8, inner=29568),
    "qwen2.5-vl-3b": _config(_VISION_3B, hidden=2048, layers=36, heads=16, kv_heads=2, inner=11008, tied=True),
    "qwen2.5-vl-7b": _config(_VISION_7B, hidden=3584, layers=28, heads=28, kv_heads=4, inner=18944),
    "qwen3-0.6b": _config(_QWEN3, hidden=1024, layers=28, heads=16, kv_heads=8, inner=3072, tied=True),
    "qwen3-8b": _config(_QWEN3, hidden=4096, layers=36, heads=32, kv_heads=8, inner=12288),
    "qwen3-30b-a3b": _config(_QWEN3 | _128_EXPERTS, hidden=2048, layers=48, heads=32, kv_heads=4, inner=6144),
    "llama-3.1-8b": _config(_LLAMA, hidden=4096, layers=32, heads=32, kv_heads=8, inner=14336),
    "llama-3.1-70b": _config(_LLAMA, hidden=8192, layers=80, heads=64, kv_heads=8, inner=28672),
}
LIKE = tuple(_CONFIGS)


def config_like(name: str) -> JsonObject:
    """Returns the config.json of a published model, one of `LIKE`."""
    return copy.deepcopy(_CONFIGS[name])


def shape_of(config: JsonObject) -> ModelShape:
    """Returns the shape that a config.json describes. Raises UserError if it lacks a size."""
    from workers.engines.lean_decoder import has_lean_layers

    model_type = str(config.get("model_type", "llama"))
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    missing = [name for name in required if not config.get(name)]
    if missing:
        raise UserError(
            f"model.path: its config.json (model_type={model_type}) has no {', '.join(missing)}; plan with the most "
            f"similar model: --like {' | '.join(LIKE)}"
        )

    hidden = int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    inner = config["intermediate_size"]
    experts_per_token = 0
    if experts:
        # Mixtral has only intermediate_size
        inner = config.get("moe_intermediate_size") or inner
        experts_per_token = int(config.get("num_experts_per_tok") or 0)

    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    has_head_norms = model_type in WITH_HEAD_NORMS
    has_bias_option = bool(config.get("attention_bias", False)) and not has_head_norms
    # the type of the text part of a vision-language model ends so
    text_type = model_type.removesuffix("_text")
    return ModelShape(
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        inner=int(inner),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type in WITH_BIAS or has_bias_option,
        head_norms=has_head_norms,
        experts=experts,
        experts_per_token=experts_per_token,
        is_lean=has_lean_layers(text_type, config.get("rope_parameters")),
    )


def read_shape(network: NetworkConfig, name: str = "model.path") -> ModelShape:
    """Reads the shape of a network from its config.json, in a folder or the hub's cache, and applies override_config.

    Args:
        network: Options of the network.
        name: Configuration key of the network's path, for messages.

    Raises:
        UserError: If there is no config.json.
    """
    from workers.policy.loading import empty_network, load_model_config
    from workers.policy.token_mixing import mixing_layers
    from workers.policy.vision import has_vision

    if network.path is None:
        raise UserError(f"{name}=null: expected a folder with config.json, or --like {' | '.join(LIKE)}")
    try:
        model_config = load_model_config(network)
        text_config = model_config.get_text_config().to_dict()
    except UserError as error:
        _, _, folder_name = str(network.path).rpartition("/")
        similar = did_you_mean(folder_name.lower(), LIKE)
        raise UserError(f"{name}={network.path!r}: {error}; or plan with --like {' | '.join(LIKE)}{similar}") from None

    if has_vision(model_config):
        # tie_word_embeddings is an option of the whole model
        text_config["tie_word_embeddings"] = model_config.tie_word_embeddings
        shape = shape_of(text_config)
        return replace(shape, tower=tower_of(empty_network(network)))

    shape = shape_of(text_config)
    if text_config.get("model_type") in KNOWN:
        return shape
    # the formulas of Llama miss parameters of other families: count all of them on the meta device
    empty = empty_network(network)
    uncounted = num_elements(empty) - shape.parameters
    return replace(shape, uncounted=uncounted, is_packed=not mixing_layers(empty))
