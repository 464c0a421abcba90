"""The token columns of sampled rows. Answers and episodes write them with the same function."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from verl_lite.protocol import DataProto
from verl_lite.schema import SAMPLING_CANDIDATES, column
from workers.engines.base import ExtraOutputs


class Response(NamedTuple):
    """The part of a row that follows its prompt. token_ids, mask, log_probs and versions have equal length.

    Attributes:
        token_ids: The tokens, those between two turns included.
        mask: 1 on tokens that the policy sampled.
        log_probs: Log-probs of the engine; 0 for tokens that it did not sample.
        versions: Versions of the weights that sampled each token; -1 for other tokens.
        finish_reason: Why the response ended.
        extra: See `Completion.extra`.
    """

    token_ids: Sequence[int]
    mask: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str
    extra: Mapping[str, torch.Tensor]


def write_rows(
    prompts: torch.Tensor,
    prompt_mask: torch.Tensor,
    responses: Sequence[Response],
    response_length: int,
    pad_token_id: int,
    extra_outputs: ExtraOutputs,
) -> DataProto:
    """Builds the token columns of a rollout (`prompts`, `responses`, `response_mask`, ...); `verl_lite/schema.py` lists
    them.

    Args:
        prompts: Token ids (B, P), padded on the left.
        prompt_mask: 1 on the tokens of the prompts (B, P).
        responses: One per row, padded on the right to `response_length`.
        response_length: Width R of the columns of the responses.
        pad_token_id: Token of the padding.
        extra_outputs: Extra outputs of the engine that sampled the rows.
    """
    token_ids = [response.token_ids for response in responses]
    masks = [response.mask for response in responses]
    log_probs = [response.log_probs for response in responses]
    versions = [response.versions for response in responses]
    oldest_versions = [_oldest_version(response) for response in responses]
    padded = right_padded(token_ids, response_length, pad_token_id)

    # the attention mask also has the tokens that the policy did not sample, such as the replies of an environment
    is_token = right_padded([[1] * len(tokens) for tokens in token_ids], response_length)
    attention_mask = torch.cat([prompt_mask.long(), is_token], dim=1)
    # positions count from the first token of the prompt, behind its padding
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    tensors = {
        "prompts": prompts,
        "responses": padded,
        "response_mask": right_padded(masks, response_length),
        "input_ids": torch.cat([prompts, padded], dim=1),
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "rollout_log_probs": right_padded(log_probs, response_length, dtype=torch.float32),
        "rollout_versions": right_padded(versions, response_length, fill=-1, dtype=torch.int32),
        "policy_version": torch.tensor(oldest_versions),
        **_extra_columns(extra_outputs, prompt_mask, responses, response_length),
    }
    finish_reasons = np.array([response.finish_reason for response in responses], dtype=object)
    return DataProto.from_dict(tensors, {"finish_reason": finish_reasons})


def _oldest_version(response: Response) -> int:
    """Returns the oldest version of the weights that sampled a response; -1 without sampled tokens."""
    return min((version for version in response.versions if version >= 0), default=-1)


def _extra_columns(
    outputs: ExtraOutputs, prompt_mask: torch.Tensor, responses: Sequence[Response], response_length: int
) -> dict[str, torch.Tensor]:
    """Returns the columns of an engine's extra outputs.

    Raises:
        ValueError: A response has other candidates than one set per token, or a token outside its set.
    """
    prompt_length = prompt_mask.shape[1]
    # first token of each prompt, after its padding
    prompt_starts = (prompt_length - prompt_mask.sum(1)).tolist()
    columns = {}
    for name, size in outputs.items():
        entry = column(name)
        width = response_length if entry.is_of_response else prompt_length + response_length
        shape = (len(responses), width, *size)
        dtype = getattr(torch, entry.dtype)
        values = torch.full(shape, entry.absent or 0, dtype=dtype)
        for row, prompt_start, response in zip(values, prompt_starts, responses, strict=True):
            # rows without a sampled token have no outputs
            if name not in response.extra:
                continue
            token_values = response.extra[name]
            if name == SAMPLING_CANDIDATES:
                _check_candidates(token_values, response.token_ids)
            # columns (B, P+R, ...) begin with the prompt, columns (B, R, ...) with the response
            first = 0 if entry.is_of_response else prompt_start
            # `row` is a view of `values`
            row[first : first + len(token_values)] = token_values
        columns[name] = values
    return columns


def _check_candidates(candidates: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Raises ValueError unless there is one set of candidates per token, which contains the token.

    Args:
        candidates: (tokens, K) token ids, filled up with -1.
        token_ids: The tokens of a response.
    """
    if len(candidates) != len(token_ids):
        raise ValueError(f"rollout engine: {len(candidates)} sets of candidates for {len(token_ids)} tokens")
    tokens = torch.tensor(token_ids)
    is_member = (candidates == tokens[:, None]).any(1)
    # the token was sampled from the whole vocabulary
    has_no_set = (candidates < 0).all(1)
    is_valid = is_member | has_no_set
    if is_valid.all():
        return
    # `argmin` of 0 and 1 is the position of the first 0
    position = int(is_valid.int().argmin())
    raise ValueError(
        f"rollout engine: token {token_ids[position]} at position {position} of a response is not among its "
        f"{SAMPLING_CANDIDATES} {candidates[position].tolist()[:8]}..., so its log-prob would be that of another "
        "set"
    )


def of_response(extra: Mapping[str, torch.Tensor], before: int = 0) -> dict[str, torch.Tensor]:
    """Returns the extra outputs of a turn that are columns (B, R, ...), with one row per response token.

    Args:
        extra: Extra outputs of the turn; see `Completion.extra`.
        before: Number of tokens without a value that precede the sampled ones in the response.
    """
    columns = {}
    for name, values in extra.items():
        entry = column(name)
        if not entry.is_of_response:
            continue
        size = values.shape[1:]
        absent = values.new_full((before, *size), entry.absent or 0)
        columns[name] = torch.cat([absent, values])
    return columns


def left_padded(
    prompts: Sequence[Sequence[int]], prompt_length: int, pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and mask of the prompts, both (B, prompt_length). Of a longer prompt, the end is kept."""
    ids = torch.full((len(prompts), prompt_length), pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        # an environment that failed before its first observation leaves no prompt; a sequence needs a token
        tokens = list(prompt[-prompt_length:]) or [pad_token_id]
        start = prompt_length - len(tokens)
        ids[row, start:] = torch.tensor(tokens)
        mask[row, start:] = 1
    return ids, mask


def right_padded(
    rows: Sequence[Sequence[float]], width: int, fill: int = 0, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """Returns a tensor (B, width) of rows with at most `width` entries each."""
    result = torch.full((len(rows), width), fill, dtype=dtype)
    for row, values in enumerate(rows):
        result[row, : len(values)] = torch.tensor(values, dtype=dtype)
    return result
