"""`python -m tests.workers.family_table`: the table of model families in workers/policy/README.md, as it is found."""

from __future__ import annotations

import textwrap

from transformers import PreTrainedModel

from tests.workers.engines.test_vllm_families import NOT_ON_CPU
from tests.workers.model_families import FAMILIES, FURTHER, tiny_network
from tests.workers.policy.test_family_roles import REFUSED
from workers.engines.slot_cache import check_layers
from workers.policy.classifier import KINDS
from workers.policy.token_mixing import mixing_layers, state_layers

HEAD = """\
| family | forward of training | shared prompts | hf engine | vLLM on a CPU | critic, reward model |
|---|---|---|---|---|---|"""


def family_table() -> str:
    """One line for each family of `FAMILIES`."""
    return "\n".join([HEAD, *(_line(family, tiny_network(family)) for family in FAMILIES)])


def _line(family: str, network: PreTrainedModel) -> str:
    mixing, states = mixing_layers(network), state_layers(network)
    form = "packed; " + ", ".join(sorted(states)) + " by sequence" if states else "packed"
    if mixing:
        form = "rows of their own, for " + ", ".join(mixing)
    named = [network.config.model_type in auto_class._model_mapping._model_mapping for auto_class, _ in KINDS.values()]
    heads = "no, no" if (family, 0) in REFUSED else ", ".join("yes" if known else "here" for known in named)
    vllm = "no" if family in NOT_ON_CPU else "yes"
    return f"| {family} | {form} | {'no' if mixing else 'yes'} | {_hf_engine(network)} | {vllm} | {heads} |"


def _hf_engine(network: PreTrainedModel) -> str:
    try:
        check_layers(network)
    except ValueError:
        return "refused"
    has_window = getattr(network.config, "sliding_window", None) is not None
    return "within its window" if has_window else "yes"


def further_families() -> str:
    """The families that are packed and are not in the table."""
    return textwrap.fill(", ".join(sorted(FURTHER)), 120)


if __name__ == "__main__":
    print(family_table())
    print(further_families())
