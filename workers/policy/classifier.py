"""Classification networks for every family of causal language models, used as critics and reward models.

If transformers has no such class for a family, this module creates one as transformers does for most families, from the
family's decoder and a linear layer `score`, and registers it with the Auto class in this process. A saved network has
the names that transformers would use, but only verl_lite can load it; `AutoModelFor...` elsewhere has no such class.
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
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from verl_lite.errors import UserError

KINDS: dict[str, tuple[Any, type]] = {
    "TokenClassification": (AutoModelForTokenClassification, GenericForTokenClassification),  # a critic
    "SequenceClassification": (AutoModelForSequenceClassification, GenericForSequenceClassification),  # a reward model
}


def classifier_of(kind: str, config: PretrainedConfig) -> Any:
    """Returns the Auto class of a kind of `KINDS`, after registering a class for the family of `config` if needed.

    Raises UserError for a family without a causal language model.
    """
    auto_class, layers = KINDS[kind]
    with_code = getattr(config, "auto_map", None) or {}  # classes whose code comes with the model
    if type(config) in auto_class._model_mapping or auto_class.__name__ in with_code:
        return auto_class
    causal: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if causal is None:
        raise UserError(
            f"model.path: transformers has neither a For{kind} nor a ForCausalLM network of the family "
            f"{config.model_type}; choose a model of a family in workers/policy/README.md"
        )
    base = next(known for known in causal.__mro__[1:] if issubclass(known, PreTrainedModel))
    entries = {name: getattr(causal, name) for name in ("config_class", "base_model_prefix", "__module__")}
    name = causal.config_class.__name__.removesuffix("Config")
    made = type(f"{name}For{kind}", (layers, base), entries)
    auto_class._model_mapping.register(type(config), made, exist_ok=True)
    # transformers finds the names of weights in files by the name of the class
    if (renamings := get_checkpoint_conversion_mapping(causal.__name__)) is not None:
        register_checkpoint_conversion_mapping(made.__name__, renamings, overwrite=True)
    return auto_class


def is_of_transformers(network: PreTrainedModel) -> bool:
    """True if the network's class is part of transformers."""
    return getattr(transformers, type(network).__name__, None) is type(network)


def config_has_code(config: PretrainedConfig) -> bool:
    """True if the classes of a model come with it as Python code (`auto_map`)."""
    return bool(getattr(config, "auto_map", None))
