"""A Hugging Face sequence-classification model with one label as a judge of answers: one number for each row of tokens.

The number is that of transformers' own forward on the row alone: the label's logit at the row's last token that is not
the model's pad token. The engine gives outputs at positions that predict a response token, so `scored_rows` lets this
position predict one: rows get room for one more token, and response_mask is 1 on the token after that position alone.
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

HEAD = "score"  # the linear layer on the last token, in every decoder of transformers
_REMEDY = "give a model that was trained to score and saved as ...ForSequenceClassification with one label"


class SequenceScorePolicy(Policy):
    """The scoring network.

    model: a decoder's `...ForSequenceClassification` with one label. Raises UserError for one that does not read its
    last token through a linear layer, such as an encoder with a pooler. option: the key that named it.
    """

    def __init__(self, model: PreTrainedModel, option: str = "reward_model.model.path") -> None:
        super().__init__()
        if not isinstance(getattr(model, HEAD, None), nn.Linear):
            raise UserError(
                f"{option}: a {type(model).__name__} does not score by a linear layer on its last "
                f"token; {_REMEDY}, made from a causal language model"
            )
        self.model = model

    def forward(self, inputs: ModelInputs) -> dict[str, torch.Tensor]:
        """scores (b, R): the label's logit at each position that predicts, at the column it predicts; fp32, 0
        elsewhere."""
        return {"scores": self.label_of(getattr(self.model, HEAD), inputs)}


def sequence_score(spec: NetworkSpec) -> SequenceScorePolicy:
    """Builds a `SequenceScorePolicy`. UserError for a checkpoint without a trained head of one label."""
    check_sequence_classifier(spec.config, str(spec.model.path))
    try:
        network = build_network(classifier_of("SequenceClassification", spec.config), spec)
    except UserError as error:
        raise UserError(f"reward_model.{error}; {_REMEDY}") from error
    return SequenceScorePolicy(network)


def new_sequence_score(spec: NetworkSpec) -> SequenceScorePolicy:
    """Builds a `SequenceScorePolicy` to be trained, from a causal language model or from a saved reward model.

    A head that the checkpoint lacks starts as zeros (the reason is that of `workers.policy.value_head`). Raises
    UserError for a sequence-classification model of several labels.
    """
    refusal = (
        "model.path={path!r}: a sequence-classification model with {labels} labels; a reward model has one, the score. "
        "Give a causal language model, or a saved reward model"
    )
    return SequenceScorePolicy(build_with_label("SequenceClassification", spec, refusal), "model.path")


def check_sequence_classifier(config: PretrainedConfig, path: str) -> None:
    """Raises UserError unless the checkpoint's config is that of a sequence-classification model with one label.

    path: of the checkpoint, for the message. A causal language model would get a head of random numbers, and its scores
    would teach nothing.
    """
    kinds = config.architectures or []
    if kinds and not any("SequenceClassification" in kind for kind in kinds):
        raise UserError(
            f"reward_model.model.path={path!r}: its weights are those of a {kinds[0]}, which has no trained head that "
            f"scores an answer; {_REMEDY}"
        )
    if config.num_labels != 1:
        raise UserError(
            f"reward_model.model.path={path!r}: it has {config.num_labels} labels, and which of them would be the "
            f"score is not known; {_REMEDY}"
        )


def scored_rows(columns: Mapping[str, torch.Tensor], pad_token_id: int | None) -> dict[str, torch.Tensor]:
    """The token columns of a batch, one column wider, with a response_mask that is 1 at one place in each row.

    columns: input_ids, attention_mask, position_ids (b, P+R), responses, response_mask (b, R). pad_token_id: of the
    model; None = it has none. The place is the one after the answer's last real token that is not the pad token; where
    the answer has no such token, the first, which the prompt's last token predicts. An empty response_mask stays empty.
    """
    answers = columns["responses"]
    real = columns["attention_mask"][:, -answers.shape[1] :] != 0
    if pad_token_id is not None:
        real = real & (answers != pad_token_id)
    place = (torch.arange(1, answers.shape[1] + 1, device=real.device) * real).amax(1)  # (b,) of the last one, plus 1
    mask = F.pad(torch.zeros_like(columns["response_mask"]), (0, 1))
    mask[torch.arange(len(mask), device=mask.device), place] = columns["response_mask"].any(1).to(mask.dtype)
    tokens = ("input_ids", "attention_mask", "position_ids", "responses")
    return {name: F.pad(columns[name], (0, 1)) for name in tokens} | {"response_mask": mask}
