"""Shape of a decoder-only language model from its config.json: parameters, KV cache, arithmetic and layer widths.

All counts are numbers of elements, not bytes. The formulas follow the transformers implementations of Llama, Mistral,
Qwen2, Qwen3 and their mixture-of-experts variants. The parameters of other models are counted on the meta device, and
their activations are assumed to equal Llama's. Tests compare the counts with published numbers and with the modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.planner.vision_tower import TowerShape, tower_of
from verl_lite.config import NetworkConfig, did_you_mean
from verl_lite.errors import UserError

WITH_BIAS = ("qwen2", "qwen2_moe", "qwen2_5_vl_text")  # bias on query, key and value
WITH_HEAD_NORMS = ("qwen3", "qwen3_moe", "qwen3_vl_text")
KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer, as in its config.

    experts: number of experts, of which each token uses experts_per_token; 0 for one MLP. uncounted: parameters that
    the formulas do not cover. has_head: True for an output layer over the vocabulary, False for one output number.
    is_packed: True if answers can share a prompt in a packed row (`workers.policy.token_mixing`). is_lean: True if the
    hf engine decodes on a CPU with joined projections (`workers.rollout.lean_decoder.LeanDecoder`). tower: the vision
    tower of a vision-language model.
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
        attention = 2 * self.hidden * (self.query + self.kv) + self.qkv_bias * (self.query + 2 * self.kv)
        mlps = max(1, self.experts) * 3 * self.hidden * self.inner + self.experts * self.hidden
        return attention + self.head_norms * 2 * self.head_dim + mlps + 2 * self.hidden

    @property
    def matrix_parameters(self) -> int:
        """Weights of the layers' linear modules, without those of experts, which are stacked."""
        mlp = 0 if self.experts else 3 * self.inner
        return self.layers * self.hidden * (2 * (self.query + self.kv) + mlp)

    @property
    def projections(self) -> tuple[int, ...]:
        """Weights of each product of a decode step with joined projections: in every layer those of queries, keys and
        values, of the attention's output, of gate and up, and of the MLP's output; and the output layer."""
        attention = self.hidden * (self.query + 2 * self.kv), self.query * self.hidden
        mlp = 2 * self.hidden * self.inner, self.inner * self.hidden
        return (attention + mlp) * self.layers + (self.embedding,)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and also of an untied output layer."""
        return self.vocab * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, output layer, last norm and `uncounted`, without a vision tower."""
        head = (self.embedding if not self.tied else 0) if self.has_head else self.hidden
        return self.embedding + head + self.hidden + self.uncounted

    @property
    def parameters(self) -> int:
        """Number of parameters; tied parameters count once."""
        tower = 0 if self.tower is None else self.tower.parameters
        return self.layers * self.layer_parameters + self.root_parameters + tower

    @property
    def multiplied(self) -> int:
        """Weights that each token is multiplied with: no embedding, and only the experts that the token uses."""
        attention = 2 * (self.query + self.kv)
        mlps = 3 * self.active_inner + self.experts
        return self.layers * self.hidden * (attention + mlps) + (self.embedding if self.has_head else self.hidden)

    def adapter_parameters(self, rank: int) -> int:
        """Returns the parameters of an all-linear LoRA adapter of this rank. Output layer and experts have none."""
        mlp = 0 if self.experts else 3 * (self.hidden + self.inner)
        return self.layers * rank * (2 * (2 * self.hidden + self.query + self.kv) + mlp)

    def as_scorer(self) -> ModelShape:
        """Returns the shape with one output number instead of an output layer, as for a critic or reward model."""
        return replace(self, has_head=False, tied=False)


# entries of config.json on the Hugging Face hub that the counts depend on
_POSITIONS = "max_position_embeddings"
_QWEN2 = {"model_type": "qwen2", "vocab_size": 151936, _POSITIONS: 32768}
_LARGE_QWEN2 = _QWEN2 | {"vocab_size": 152064, _POSITIONS: 131072}
_LLAMA = {"model_type": "llama", "vocab_size": 128256, "head_dim": 128, _POSITIONS: 131072}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, _POSITIONS: 40960}
_128_EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_TOWER = {"hidden_size": 1280, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
_VISION = {"model_type": "qwen2_5_vl", _POSITIONS: 128000, "vision_config": _TOWER | {"intermediate_size": 3420}}
_SIZES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, int, bool]]] = {
    "qwen2.5-0.5b": (_QWEN2, (896, 24, 14, 2, 4864, True)),
    "qwen2.5-1.5b": (_QWEN2, (1536, 28, 12, 2, 8960, True)),
    "qwen2.5-3b": (_QWEN2, (2048, 36, 16, 2, 11008, True)),
    "qwen2.5-7b": (_LARGE_QWEN2, (3584, 28, 28, 4, 18944, False)),
    "qwen2.5-14b": (_LARGE_QWEN2, (5120, 48, 40, 8, 13824, False)),
    "qwen2.5-32b": (_LARGE_QWEN2, (5120, 64, 40, 8, 27648, False)),
    "qwen2.5-72b": (_LARGE_QWEN2, (8192, 80, 64, 8, 29568, False)),
    "qwen2.5-vl-3b": (_VISION | {"vocab_size": 151936}, (2048, 36, 16, 2, 11008, True)),
    "qwen2.5-vl-7b": (_VISION | {"vocab_size": 152064}, (3584, 28, 28, 4, 18944, False)),
    "qwen3-0.6b": (_QWEN3, (1024, 28, 16, 8, 3072, True)),
    "qwen3-8b": (_QWEN3, (4096, 36, 32, 8, 12288, False)),
    "qwen3-30b-a3b": (_QWEN3 | _128_EXPERTS, (2048, 48, 32, 4, 6144, False)),
    "llama-3.1-8b": (_LLAMA, (4096, 32, 32, 8, 14336, False)),
    "llama-3.1-70b": (_LLAMA, (8192, 80, 64, 8, 28672, False)),
}
LIKE = tuple(_SIZES)


def config_like(name: str) -> dict[str, Any]:
    """Returns the config.json of a published model, one of `LIKE`."""
    common, sizes = _SIZES[name]
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    found = common | dict(zip(names, sizes[:5], strict=True)) | {"tie_word_embeddings": sizes[5]}
    if "vision_config" in common:
        found["vision_config"] = common["vision_config"] | {"out_hidden_size": sizes[0]}
    return found


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape that a config.json describes. Raises UserError if it lacks a size."""
    from workers.rollout.lean_decoder import has_lean_layers

    kind = str(config.get("model_type", "llama"))
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    missing = [name for name in names if not config.get(name)]
    if missing:
        raise UserError(
            f"model.path: its config.json (model_type={kind}) has no {', '.join(missing)}; plan with the most similar "
            f"model: --like {' | '.join(LIKE)}"
        )
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    return ModelShape(
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        inner=int((experts and config.get("moe_intermediate_size")) or config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind in WITH_BIAS or bool(config.get("attention_bias", False) and kind not in WITH_HEAD_NORMS),
        head_norms=kind in WITH_HEAD_NORMS,
        experts=experts,
        experts_per_token=int(config.get("num_experts_per_tok") or 0) if experts else 0,
        is_lean=has_lean_layers(kind.removesuffix("_text"), config.get("rope_parameters")),
    )


def read_shape(network: NetworkConfig, name: str = "model.path") -> ModelShape:
    """Reads the shape of a network from its config.json, in a folder or the hub's cache, and applies override_config.

    name: the configuration key of the network's path, for messages. Raises UserError if there is no config.json.
    """
    from workers.policy.loading import empty_network, load_model_config
    from workers.policy.token_mixing import mixing_layers
    from workers.policy.vision import has_vision

    if network.path is None:
        raise UserError(f"{name}=null: expected a folder with config.json, or --like {' | '.join(LIKE)}")
    try:
        whole = load_model_config(network)
        config = whole.get_text_config().to_dict()
    except UserError as error:
        near = did_you_mean(str(network.path).rpartition("/")[2].lower(), LIKE)
        raise UserError(f"{name}={network.path!r}: {error}; or plan with --like {' | '.join(LIKE)}{near}") from None
    if has_vision(whole):
        found = shape_of(config | {"tie_word_embeddings": whole.tie_word_embeddings})
        return replace(found, tower=tower_of(empty_network(network)))
    found = shape_of(config)
    if config.get("model_type") in KNOWN:
        return found
    empty = empty_network(network)
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    return replace(found, uncounted=parameters - found.parameters, is_packed=not mixing_layers(empty))
