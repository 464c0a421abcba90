"""The families of transformers' models that are packed, and how their layers treat the sequences of a packed row.

A packed row gives correct results only if no layer except attention mixes tokens, and if attention is computed by the
function of `workers.engine.packed_attention`, which gets the sequence boundaries. A class does not show whether that is
the case, so this table lists the families for which a test has shown it: `tests/workers/policy/test_model_families.py`
compares log-probs, entropies and every gradient of a packed batch with those of single rows, also with sliding windows
where an entry says so. To add a family, add an entry here and a tiny config in `tests/workers/model_families.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedModel


@dataclass(frozen=True)
class Family:
    """How the layers of a family treat the sequences of a packed row.

    Attributes:
        passes_window: True if attention passes its sliding window to the attention function. Otherwise only the mask,
            which a packed row lacks, contains the window, or the forward pass of transformers does not use it.
        state_layers: by class name of a stateful layer, the boundaries (entries of `PackedSequences.borders`) that its
            kernels take.
        mixing_layers: class names of layers that ignore the boundaries. A family with such layers is not packed.
    """

    passes_window: bool = False
    state_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixing_layers: tuple[str, ...] = ()


_FULL_ATTENTION = """
apertus arcee aria_text axk1 bitnet cohere deepseek_v2 deepseek_v3 diffllama ernie4_5 ernie4_5_moe flex_olmo gemma glm
glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe llama longcat_flash minimax_m2 minimax_m3_vl_text
nanochat olmo olmo2 olmoe persimmon phi phimoe qwen2_5_vl_text qwen2_moe qwen3_vl_text seed_oss solar_open youtu
"""
_WINDOWS = """
afmoe cohere2 cohere2_moe cwm dots1 exaone4 exaone_moe gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text
gpt_oss granite_swa granitemoe_swa laguna mellum mimo_v2_flash ministral ministral3 mistral mixtral olmo3 phi3 qwen2
qwen3 qwen3_moe smollm3 starcoder2 vaultgemma
"""

# the kernels of mamba-ssm and causal-conv1d, and those of flash-linear-attention that transformers names itself
_MAMBA_BORDERS = ("seq_idx", "cu_seqlens")
_DELTA_BORDERS = ("seq_idx", "cu_seq_lens_q")
_CONVOLUTION_BORDERS = ("seq_idx",)

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(_FULL_ATTENTION.split(), Family()),
    **dict.fromkeys(_WINDOWS.split(), Family(passes_window=True)),
    "bamba": Family(state_layers={"BambaMixer": _MAMBA_BORDERS}),
    "falcon_h1": Family(state_layers={"FalconH1Mixer": _MAMBA_BORDERS}),
    "granitemoehybrid": Family(state_layers={"GraniteMoeHybridMambaLayer": _MAMBA_BORDERS}),
    "jamba": Family(state_layers={"JambaMambaMixer": _MAMBA_BORDERS}),
    "kimi_linear": Family(state_layers={"KimiLinearDeltaAttention": _MAMBA_BORDERS}),
    "lfm2": Family(state_layers={"Lfm2ShortConv": _CONVOLUTION_BORDERS}),
    "lfm2_moe": Family(state_layers={"Lfm2MoeShortConv": _CONVOLUTION_BORDERS}),
    "mamba2": Family(state_layers={"Mamba2Mixer": _MAMBA_BORDERS}),
    "minimax": Family(passes_window=True, state_layers={"MiniMaxLightningAttention": _MAMBA_BORDERS}),
    "nemotron_h": Family(state_layers={"NemotronHMamba2Mixer": _MAMBA_BORDERS}),
    "olmo_hybrid": Family(state_layers={"OlmoHybridGatedDeltaNet": _DELTA_BORDERS}),
    "qwen3_5_text": Family(state_layers={"Qwen3_5GatedDeltaNet": _DELTA_BORDERS}),
    "qwen3_5_moe_text": Family(state_layers={"Qwen3_5MoeGatedDeltaNet": _DELTA_BORDERS}),
    "qwen3_next": Family(state_layers={"Qwen3NextGatedDeltaNet": _DELTA_BORDERS}),
    "zamba2": Family(state_layers={"Zamba2MambaMixer": _MAMBA_BORDERS}),
    # not packed; listed so that messages name the layer
    "bloom": Family(mixing_layers=("BloomAttention",)),
    "deepseek_v32": Family(mixing_layers=("DeepseekV32Indexer",)),
    "mamba": Family(mixing_layers=("MambaMixer",)),
    "recurrent_gemma": Family(mixing_layers=("Conv1d", "RecurrentGemmaRglru")),
    "stablelm": Family(mixing_layers=("StableLmAttention",)),
}
"""By model_type of the config of the text model."""


def family_of(model: PreTrainedModel) -> Family | None:
    """Returns the table's entry for a model, or None.

    Code that comes with a model may have the model_type of a family and other layers, so it has no entry.
    """
    # the code of a folder is imported as transformers_modules
    decoder = model.get_decoder()
    if not type(decoder).__module__.startswith("transformers.models."):
        return None
    text_config = model.config.get_text_config()
    return FAMILIES.get(text_config.model_type)
