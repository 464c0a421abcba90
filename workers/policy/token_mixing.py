"""Which layers of a network carry something from token to token, and so in which form it may be given a micro-batch.

A packed row is right only where nothing but attention looks at other tokens, and where this attention is the function
of `workers.engine.packing`, which knows where each sequence begins. Linear attention, convolutions, state-space layers
and attention that chooses its tokens by itself know no such borders: one sequence would leak into the next, and nothing
would say so. So a network is packed only if every one of its modules is known: attention by transformers' interface, or
a kind of module that looks at one token at a time. What is not known gets the aligned form, which is exact for every
causal network.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError
from workers.engine.packing import PACKED_ATTENTION, ModelInputs, align, pack, pad

Arrangement = Callable[[Mapping[str, torch.Tensor]], ModelInputs]

# Modules that look at one token at a time, or hold others: of torch, of transformers and peft, by where they live, and
# the parts of transformers' models by how their classes are called there.
ONE_TOKEN_PACKAGES = re.compile(
    r"torch\.nn\.(modules\.(activation|container|dropout|linear|normalization|sparse)|utils\.parametrize)"
    r"|transformers\.(activations|pytorch_utils)|peft\..*"
)
ONE_TOKEN_CLASSES = re.compile(
    r".*(Activation|AltUp|Embeddings?|Experts|FeedForward|Gate|Gating|Linear|Mlp|MLP|MoA|Moe|MoE|Norm|Router|Scaling"
    r"|Statics)|.*(Block|Decoder|Encoder|ForCausalLM|Layer|Model)"
)
STATEFUL_WORDS = re.compile("Conv|Delta|LSTM|Lightning|Mamba|Recurrent|Retention|Rwkv")


def mixing_layers(model: PreTrainedModel) -> list[str]:
    """Class names of the modules that keep a network from being packed; none = it may be.

    Raises UserError for attention that is not causal: the log-prob of a token would depend on what follows it.
    """
    decoder = model.get_decoder()
    causal = {type(module).__name__: module.is_causal is True for module in decoder.modules() if _is_attention(module)}
    if causal and not any(causal.values()):
        raise UserError(
            f"model.path: a {type(model).__name__} has attention ({', '.join(causal)}) that is not causal, so that the "
            "log-prob of a token depends on the tokens after it: choose a causal language model"
        )
    unknown: dict[str, None] = {}
    waiting: list[nn.Module] = [decoder]
    while waiting:
        module = waiting.pop()
        if _is_attention(module) or _looks_at_one_token(type(module)):
            waiting += list(module.children())[::-1]
        else:
            unknown[type(module).__name__] = None
    if model._supports_attention_backend:  # else the borders do not reach attention either
        return list(unknown) + [name for name, is_causal in causal.items() if not is_causal]
    return list(unknown) or list(causal)


def _is_attention(module: nn.Module) -> bool:
    """Attention by transformers' interface, which calls the function that is set."""
    code = inspect.unwrap(type(module).forward).__code__
    return "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "is_causal")


def _looks_at_one_token(kind: type[nn.Module]) -> bool:
    if ONE_TOKEN_PACKAGES.fullmatch(kind.__module__):
        return kind is not nn.MultiheadAttention
    if STATEFUL_WORDS.search(kind.__name__) and not kind.__name__.endswith(("DecoderLayer", "Model", "Block")):
        return False
    return ONE_TOKEN_CLASSES.fullmatch(kind.__name__) is not None


def arrangement_of(model: PreTrainedModel, network: NetworkConfig) -> Arrangement:
    """The form of a micro-batch that `model` gets, with the attention function that belongs to it set."""
    mixing = mixing_layers(model)
    if network.use_remove_padding and not mixing:
        model.set_attn_implementation(PACKED_ATTENTION)
        return pack
    # transformers' own call of SDPA leaves soft-capping out without a word
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    return align if mixing else pad
