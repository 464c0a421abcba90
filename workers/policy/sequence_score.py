"""A Hugging Face sequence-classification model with one label as a reward model: one score for each row of tokens.

The score equals that of transformers' own forward on the row alone: the label's logit at the row's last token that is
not the model's pad token. The engine returns outputs at positions that predict a response token. Therefore
`scored_rows` widens the rows by one column and sets response_mask to 1 only at the token after that position.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from verl_lite.errors import UserError
from workers.engine.packing import ModelInputs
from workers.policy.classifier import classifier_of
from workers.policy.loading import NetworkSpec, Policy, build_network, build_with_label

HEAD = "score"  # name of the linear layer on the last token in every sequence-classification decoder of transformers
_REMEDY = "give a model that was trained to score and saved as ...ForSequenceClassification with one label"


class SequenceScorePolicy(Policy):
    """The network of a reward model.

    Args:
        model: a decoder's `...ForSequenceClassification` with one label.
        option: the key of the model's path, for messages.

    Raises:
        UserError: the model has no linear layer on its last token, such as an encoder with a pooler.
    """

    def __init__(self, model: PreTrainedModel, option: str = "reward_model.model.path") -> None:
        super().__init__()
        # a head of several layers, or on a pooled state, would need more than the state of one token
        if not isinstance(getattr(model, HEAD, None), nn.Linear):
            raise UserError(
                f"{option}: a {type(model).__name__} does not score by a linear layer on its last "
                f"token; {_REMEDY}, made from a causal language model"
            )
        self.model = model

    def forward(self, inputs: ModelInputs) -> dict[str, torch.Tensor]:
        """Computes scores (b, R), the label's logit at each predicting position, in the column of the predicted token;
        fp32, 0 elsewhere."""
        return {"scores": self.label_of(getattr(self.model, HEAD), inputs)}


def sequence_score(spec: NetworkSpec) -> SequenceScorePolicy:
    """Builds a `SequenceScorePolicy` from a saved reward model.

    Raises:
        UserError: the checkpoint has no trained head with one label.
    """
    check_sequence_classifier(spec.config, str(spec.model.path))
    try:
        network = build_network(classifier_of("SequenceClassification", spec.config), spec)
    except UserError as error:
        # its message begins with the key model.path
        raise UserError(f"reward_model.{error}; {_REMEDY}") from error
    return SequenceScorePolicy(network)


def new_sequence_score(spec: NetworkSpec) -> SequenceScorePolicy:
    """Builds a `SequenceScorePolicy` for training, from a causal language model or from a saved reward model.

    A head that is missing from the checkpoint is initialised with zeros, for the reason in `workers.policy.value_head`.

    Raises:
        UserError: the checkpoint is a sequence-classification model with several labels.
    """
    refusal = (
        "model.path={path!r}: a sequence-classification model with {labels} labels; a reward model has one, the score. "
        "Set the path of a causal language model or of a saved reward model"
    )
    network = build_with_label("SequenceClassification", spec, refusal)
    return SequenceScorePolicy(network, "model.path")


def check_sequence_classifier(config: PretrainedConfig, path: str) -> None:
    """Raises UserError unless the config belongs to a sequence-classification model with one label.

    A causal language model would get a head of random numbers, whose scores are meaningless.

    Args:
        config: the config of the checkpoint.
        path: path of the checkpoint, for messages.
    """
    class_names = config.architectures or []
    if class_names and not any("SequenceClassification" in name for name in class_names):
        raise UserError(
            f"reward_model.model.path={path!r}: it contains a {class_names[0]}, which has no trained head for scores; "
            f"{_REMEDY}"
        )
    if config.num_labels != 1:
        raise UserError(
            f"reward_model.model.path={path!r}: it has {config.num_labels} labels, and no config entry identifies the "
            f"score; {_REMEDY}"
        )


def scored_rows(columns: Mapping[str, torch.Tensor], pad_token_id: int | None) -> dict[str, torch.Tensor]:
    """Widens the token columns of a batch by one column and sets response_mask to 1 at a single column of each row.

    That column follows the last real token of the answer that is not the pad token. If the answer has no such token, it
    is the first column, which the last token of the prompt predicts. A row with an empty response_mask keeps it empty.

    Args:
        columns: input_ids, attention_mask, position_ids (b, P+R), responses, response_mask (b, R).
        pad_token_id: pad token of the model; None if it has none.
    """
    responses = columns["responses"]
    response_width = responses.shape[1]
    is_scored = columns["attention_mask"][:, -response_width:] != 0
    if pad_token_id is not None:
        is_scored = is_scored & (responses != pad_token_id)
    next_columns = torch.arange(1, response_width + 1, device=is_scored.device)
    # (b,)
    column_after_last = (next_columns * is_scored).amax(1)

    original_mask = columns["response_mask"]
    has_response = original_mask.any(1)
    empty_mask = torch.zeros_like(original_mask)
    response_mask = F.pad(empty_mask, (0, 1))
    rows = torch.arange(len(response_mask), device=response_mask.device)
    response_mask[rows, column_after_last] = has_response.to(response_mask.dtype)

    # the added column is only predicted, so that its content does not matter
    widened = {"response_mask": response_mask}
    for name in ("input_ids", "attention_mask", "position_ids", "responses"):
        widened[name] = F.pad(columns[name], (0, 1))
    return widened
