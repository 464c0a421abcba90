"""`python -m tests.workers.family_table`: the table of model families in workers/policy/README.md, as it is found."""

from __future__ import annotations

from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel

from tests.workers.model_families import FAMILIES, tiny_network
from tests.workers.rollout.test_vllm_families import NOT_ON_CPU
from workers.policy.token_mixing import mixing_layers, state_layers
from workers.rollout.hf_engine import check_layers

HEAD = """\
| family | forward of training | shared prompts | hf engine | vLLM on a CPU | critic, reward model |
|---|---|---|---|---|---|"""
HEADS = (AutoModelForTokenClassification, AutoModelForSequenceClassification)


def family_table() -> str:
    """One line for each family of `FAMILIES`."""
    return "\n".join([HEAD, *(_line(family, tiny_network(family)) for family in FAMILIES)])


def _line(family: str, network: PreTrainedModel) -> str:
    mixing, states = mixing_layers(network), state_layers(network)
    form = "packed; " + ", ".join(sorted(states)) + " by sequence" if states else "packed"
    if mixing:
        form = "rows of their own, for " + ", ".join(mixing)
    heads = ", ".join("yes" if type(network.config) in kind._model_mapping else "no" for kind in HEADS)
    vllm = "no" if family in NOT_ON_CPU else "yes"
    return f"| {family} | {form} | {'no' if mixing else 'yes'} | {_hf_engine(network)} | {vllm} | {heads} |"


def _hf_engine(network: PreTrainedModel) -> str:
    try:
        check_layers(network)
    except ValueError:
        return "refused"
    has_window = getattr(network.config, "sliding_window", None) is not None
    return "within its window" if has_window else "yes"


if __name__ == "__main__":
    print(family_table())
