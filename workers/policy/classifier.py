"""Networks with labels in the place of logits, for every family of causal language models: critics, reward models.

Where transformers has no such network of a family, it is made as transformers makes most of them, of the family's
decoder and a linear layer `score` behind it, and is known to the Auto class in this process. Saved, it has the names
that transformers would give it, and is loaded here; `AutoModelFor...` elsewhere does not know it.
"""

from typing import Any

import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from verl_lite.errors import UserError

KINDS: dict[str, tuple[Any, type]] = {
    "TokenClassification": (AutoModelForTokenClassification, GenericForTokenClassification),  # a critic
    "SequenceClassification": (AutoModelForSequenceClassification, GenericForSequenceClassification),  # a reward model
}


def classifier_of(kind: str, config: PretrainedConfig) -> Any:
    """The Auto class of a kind of `KINDS`, which knows the family of `config`. UserError for one without a causal
    language model."""
    auto_class, layers = KINDS[kind]
    with_code = getattr(config, "auto_map", None) or {}  # that comes with the model
    if type(config) in auto_class._model_mapping or auto_class.__name__ in with_code:
        return auto_class
    causal: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if causal is None:
        raise UserError(
            f"model.path: transformers has neither a For{kind} nor a ForCausalLM network of the family "
            f"{config.model_type}; choose a model of one in workers/policy/README.md"
        )
    base = next(known for known in causal.__mro__[1:] if issubclass(known, PreTrainedModel))
    entries = {name: getattr(causal, name) for name in ("config_class", "base_model_prefix", "__module__")}
    name = causal.config_class.__name__.removesuffix("Config")
    made = type(f"{name}For{kind}", (layers, base), entries)
    auto_class._model_mapping.register(type(config), made, exist_ok=True)
    return auto_class


def is_of_transformers(network: PreTrainedModel) -> bool:
    """Whether transformers itself has the class."""
    return getattr(transformers, type(network).__name__, None) is type(network)
