"""Classification networks for every family of causal language models, used as critics and reward models.

If transformers has no such class for a family, this module creates one as transformers does for most families, from the
family's decoder and a linear layer `score`, and registers it with the Auto class in this process. A saved network has
the names that transformers would use, but only verl_lite can load it; `AutoModelFor...` elsewhere has no such class.
"""

from typing import TypeAlias

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
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from verl_lite.errors import UserError

AutoClass: TypeAlias = type[_BaseAutoModelClass]
"""An Auto class of transformers, such as AutoModelForCausalLM, which chooses a network's class by its config."""

KINDS: dict[str, tuple[AutoClass, type]] = {
    "TokenClassification": (AutoModelForTokenClassification, GenericForTokenClassification),  # a critic
    "SequenceClassification": (AutoModelForSequenceClassification, GenericForSequenceClassification),  # a reward model
}


def classifier_of(kind: str, config: PretrainedConfig) -> AutoClass:
    """Returns the Auto class of a kind of `KINDS`, after registering a class for the family of `config` if needed.

    Raises:
        UserError: the family has no causal language model from which the class could be made.
    """
    auto_class, layers = KINDS[kind]
    # their code comes with the model
    classes_with_code = getattr(config, "auto_map", None) or {}
    if type(config) in auto_class._model_mapping or auto_class.__name__ in classes_with_code:
        return auto_class
    causal_lm_class = causal_lm_class_of(config)
    if causal_lm_class is None:
        raise UserError(
            f"model.path: transformers has neither a For{kind} nor a ForCausalLM network of the family "
            f"{config.model_type}; choose a model of a family in workers/policy/README.md"
        )

    # the class `...PreTrainedModel` of the family, from which its networks derive
    bases = causal_lm_class.__mro__[1:]
    family_base = next(base for base in bases if issubclass(base, PreTrainedModel))
    entries = {
        "config_class": causal_lm_class.config_class,
        "base_model_prefix": causal_lm_class.base_model_prefix,
        "__module__": causal_lm_class.__module__,
    }
    family = causal_lm_class.config_class.__name__.removesuffix("Config")
    classifier = type(f"{family}For{kind}", (layers, family_base), entries)
    auto_class._model_mapping.register(type(config), classifier, exist_ok=True)
    # transformers finds the names of weights in files by the name of the class
    renamings = get_checkpoint_conversion_mapping(causal_lm_class.__name__)
    if renamings is not None:
        register_checkpoint_conversion_mapping(classifier.__name__, renamings, overwrite=True)
    return auto_class


def causal_lm_class_of(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """Returns the class of the causal language model that transformers has for a config; None if it has none."""
    return AutoModelForCausalLM._model_mapping.get(type(config), None)


def is_of_transformers(network: PreTrainedModel) -> bool:
    """Returns True if the network's class is part of transformers."""
    own_class = type(network)
    # code that comes with a model may have a class of the same name
    return getattr(transformers, own_class.__name__, None) is own_class


def config_has_code(config: PretrainedConfig) -> bool:
    """Returns True if the classes of a model come with it as Python code (`auto_map`)."""
    return bool(getattr(config, "auto_map", None))
