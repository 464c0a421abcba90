"""A Hugging Face token-classification model with one label as a value function: the expected return at each token.

The checkpoint is such a model with its head, or a causal language model, whose backbone gets a new head of zeros. All
first values are then 0 for every seed. A random head would produce values as large as the returns, with arbitrary
differences between tokens that would enter the first advantages. A head of zeros can be trained: its gradient is that
of a linear regression on the hidden states, so it changes in the first step and the backbone in the second.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from workers.engine.packing import ModelInputs
from workers.policy.loading import NetworkSpec, Policy, build_with_label


class ValuePolicy(Policy):
    """The value network.

    Args:
        model: a `...ForTokenClassification` with one label. Its own dropout layer is not applied.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        # `score` in most families, `classifier` in some
        linear_layers = []
        for name, child in model.named_children():
            if isinstance(child, nn.Linear):
                linear_layers.append(name)
        [self.head_name] = linear_layers

    def forward(self, inputs: ModelInputs) -> dict[str, torch.Tensor]:
        """Computes values (b, R) of the state before each response token; fp32, 0 elsewhere."""
        head = self.model.get_submodule(self.head_name)
        assert isinstance(head, nn.Linear)
        return {"values": self.label_of(head, inputs)}


def value_head(spec: NetworkSpec) -> ValuePolicy:
    """Builds a `ValuePolicy` from a causal language model or from a saved value network.

    Raises:
        UserError: the checkpoint is a token-classification model with more than one label.
    """
    refusal = (
        "critic.model.path={path!r}: a token-classification model with {labels} labels; a critic has one label, the "
        "value. Set the path of a causal language model or of a saved critic"
    )
    network = build_with_label("TokenClassification", spec, refusal)
    return ValuePolicy(network)
