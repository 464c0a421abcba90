"""A Hugging Face token-classification model with one label as a value function: the expected return at each token.

The checkpoint may be such a model, with its head, or a causal language model, which gives the backbone; the head then
starts as zeros. So the first values are 0 everywhere, whatever the seed: a random head would give values as large as
the returns that differ from token to token for no reason, and those differences would stand in the first advantages.
The head's gradient is that of a linear regression on the hidden states, so it leaves 0 with the first step, and the
backbone follows with the second.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from workers.engine.packing import ModelInputs
from workers.policy.loading import NetworkSpec, Policy, build_with_label


class ValuePolicy(Policy):
    """The value network.

    model: a `...ForTokenClassification` with one label. Its own dropout layer is left out.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        [self.head_name] = [name for name, child in model.named_children() if isinstance(child, nn.Linear)]

    def forward(self, inputs: ModelInputs) -> dict[str, torch.Tensor]:
        """values (b, R): of the state before each response token, so of the token before it; fp32, 0 elsewhere."""
        head = self.model.get_submodule(self.head_name)
        assert isinstance(head, nn.Linear)
        return {"values": self.label_of(head, inputs)}


def value_head(spec: NetworkSpec) -> ValuePolicy:
    """Builds a `ValuePolicy` from a causal language model or from a saved value network.

    Raises UserError if the checkpoint is a token-classification model with more than one label.
    """
    refusal = (
        "critic.model.path={path!r}: a token-classification model with {labels} labels; a critic has one label, the "
        "value. Give a causal language model, or a saved critic"
    )
    return ValuePolicy(build_with_label("TokenClassification", spec, refusal))
