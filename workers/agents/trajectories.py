"""Turns episodes into training samples: one row per trajectory, or one row per turn.

The row of a trajectory has the first prompt as its prompt and everything after it as its response: sampled turns (mask
1) and the text between them (mask 0). The reward of a turn is on its last sampled token. Each segment of the mask is
therefore one turn, which is all that estimators for turns need. trainer/AGENTIC.md has a drawing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from verl_lite.protocol import DataProto, as_column
from workers.agents.conversation import Message
from workers.agents.episodes import Trajectory, messages_of
from workers.agents.turns import Turn
from workers.engines.base import ExtraOutputs
from workers.rollout.rows import Response, left_padded, of_response, right_padded, write_rows
from workers.rollout.specs import EpisodeSpec, ProgramSpec


@dataclass
class _Row:
    """One row. response_ids, response_mask, log_probs, versions and scores have equal length.

    Attributes:
        step: number of the row in its trajectory.
        raw_prompt: messages of the prompt.
        messages: the whole conversation, or with one row per turn that of the turn.
        step_scores: reward of each turn; with one row per turn, a number.
        extra: see `Completion.extra`.
    """

    trajectory: Trajectory
    step: int
    state_hash: str
    prompt_ids: Sequence[int]
    raw_prompt: list[Message]
    messages: list[Message]
    step_scores: float | list[float]
    finish_reason: str
    extra: Mapping[str, torch.Tensor]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


def trajectory_rows(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    prompt_length: int,
    response_length: int,
    extra_outputs: ExtraOutputs,
) -> DataProto:
    """Returns the rows of the kept trajectories in order, with the columns of `rows.write_rows` and those that
    verl_lite/schema.py assigns to this file.

    A trajectory that failed or has no turn is one row without a sampled token, marked reward_failed.

    Args:
        prompt_length, response_length: widths P and R of the columns; the runner's limits keep within them.
        extra_outputs: extra outputs of the engine that sampled the turns.
    """
    rows: list[_Row] = []
    for trajectory in trajectories:
        if not trajectory.is_kept:
            continue
        if trajectory.stop == "failed" or not trajectory.turns:
            rows.append(_row(trajectory, []))
            continue
        if trajectory.rows:
            turns_of_rows = trajectory.rows
        elif trajectory.by_step:
            turns_of_rows = [[turn] for turn in trajectory.turns]
        else:
            turns_of_rows = [trajectory.turns]
        rows += [_row(trajectory, turns, step) for step, turns in enumerate(turns_of_rows)]
    for row in rows:
        excess = len(row.prompt_ids) - prompt_length
        # the first prompt of a program's conversation may be longer than the column; see `Trace.rows`
        if row.response_ids and excess > 0:
            _move_to_response(row, excess)

    prompts, prompt_mask = left_padded([row.prompt_ids for row in rows], prompt_length, pad_token_id)
    responses = [
        Response(row.response_ids, row.response_mask, row.log_probs, row.versions, row.finish_reason, row.extra)
        for row in rows
    ]
    batch = write_rows(prompts, prompt_mask, responses, response_length, pad_token_id, extra_outputs)
    tensors = {"prompt_mask": prompt_mask} | _numbers(rows, response_length)
    return batch | DataProto.from_dict(tensors=tensors, non_tensors=_names(rows))


def _row(trajectory: Trajectory, turns: Sequence[Turn], step: int = 0) -> _Row:
    """Returns the row of these turns. A row without turns has no token to train on."""
    of_step = bool(turns) and trajectory.by_step
    first_turns = turns or trajectory.turns
    if trajectory.stop == "failed":
        finish_reason = "abort"
    else:
        is_cut = not turns or (trajectory.stop == "max_length" and not of_step)
        finish_reason = "length" if is_cut else turns[-1].finish_reason
    rewards = [turn.reward for turn in turns]
    row = _Row(
        trajectory,
        step=step,
        state_hash=first_turns[0].state_hash if first_turns else "",
        prompt_ids=turns[0].prompt_ids if turns else trajectory.prompt_ids,
        raw_prompt=turns[0].messages if turns else trajectory.prompt_messages,
        messages=messages_of(turns) if of_step or trajectory.rows else trajectory.messages,
        step_scores=sum(rewards, 0.0) if trajectory.by_step else rewards,
        finish_reason=finish_reason,
        extra=_joined_extra(turns),
    )
    for number, turn in enumerate(turns):
        joined = turn.prompt_ids if number else ()
        row.response_ids += [*joined, *turn.response_ids]
        row.response_mask += [0] * len(joined) + [1] * len(turn.response_ids)
        row.log_probs += [0.0] * len(joined) + turn.log_probs
        row.versions += [-1] * len(joined) + turn.versions
        row.scores += [0.0] * (len(joined) + len(turn.response_ids) - 1) + [turn.reward]
    return row


def _joined_extra(turns: Sequence[Turn]) -> dict[str, torch.Tensor]:
    """Returns the extra outputs of a row: of the last turn for columns (B, P+R, ...), of all turns for (B, R, ...)."""
    parts: dict[str, list[torch.Tensor]] = {}
    for number, turn in enumerate(turns):
        sampled = {name: values[: len(turn.response_ids)] for name, values in of_response(turn.extra).items()}
        num_joined = len(turn.prompt_ids) if number else 0  # tokens between two turns have no values
        for name, values in of_response(sampled, num_joined).items():
            parts.setdefault(name, []).append(values)

    extra = dict(turns[-1].extra) if turns else {}
    for name, values_of_turns in parts.items():
        extra[name] = torch.cat(values_of_turns)
    return extra


def _move_to_response(row: _Row, excess: int) -> None:
    """Moves the last `excess` tokens of the prompt to the response, where they have mask 0."""
    moved = row.prompt_ids[-excess:]
    row.prompt_ids = row.prompt_ids[:-excess]
    row.response_ids = [*moved, *row.response_ids]
    row.response_mask = [0] * excess + row.response_mask
    row.log_probs = [0.0] * excess + row.log_probs
    row.versions = [-1] * excess + row.versions
    row.scores = [0.0] * excess + row.scores
    row.extra = {**row.extra, **of_response(row.extra, excess)}


def _numbers(rows: list[_Row], response_length: int) -> dict[str, torch.Tensor]:
    """Returns the columns of scores and counts."""
    numbers = {
        "step": [row.step for row in rows],
        "start_step": [row.trajectory.spec.start_step for row in rows],
        "num_turns": [len(row.trajectory.turns) for row in rows],
    }
    scores = [row.scores for row in rows]
    columns = {"token_level_scores": right_padded(scores, response_length, dtype=torch.float32)}
    columns |= {name: torch.tensor(values) for name, values in numbers.items()}
    columns["episode_scores"] = torch.tensor([row.trajectory.score for row in rows], dtype=torch.float32)
    return columns


def _names(rows: list[_Row]) -> dict[str, np.ndarray]:
    """Returns the columns that are not tensors."""
    trajectories = [row.trajectory for row in rows]
    specs = [trajectory.spec for trajectory in trajectories]
    numbers: dict[str, int] = {}
    sample_ids = []
    for spec in specs:
        numbers[spec.traj_id] = numbers.get(spec.traj_id, -1) + 1
        sample_ids.append(f"{spec.traj_id}/{numbers[spec.traj_id]}")
    columns: dict[str, Sequence[object]] = {
        "uid": [spec.traj_group_id for spec in specs],
        "traj_id": [spec.traj_id for spec in specs],
        "sample_id": sample_ids,
        "state_hash": [row.state_hash for row in rows],
        "data_source": [spec.tag for spec in specs],
        "tags": [spec.tag for spec in specs],
        "raw_prompt": [row.raw_prompt for row in rows],
        "messages": [row.messages for row in rows],
        "step_scores": [row.step_scores for row in rows],
        "env_metrics": [trajectory.metrics for trajectory in trajectories],
        "reward_failed": [not row.response_ids for row in rows],
        "stop": [trajectory.stop for trajectory in trajectories],
        "env_error": [trajectory.error for trajectory in trajectories],
        "env_timeout": [trajectory.is_timeout for trajectory in trajectories],
        **_columns_of_kind(trajectories),
    }
    return {name: as_column(values) for name, values in columns.items()}


def _columns_of_kind(trajectories: Sequence[Trajectory]) -> dict[str, Sequence[object]]:
    """Returns the columns that come from the specification: of a program's task, or of an environment."""
    tasks = [trajectory.spec.row for trajectory in trajectories if isinstance(trajectory.spec, ProgramSpec)]
    if tasks:
        return {
            "reward_model": [{"ground_truth": "", **task.get("reward_model", {})} for task in tasks],
            "extra_info": [task.get("extra_info") or {} for task in tasks],
            "requests": [trajectory.requests for trajectory in trajectories],
        }
    specs = [trajectory.spec for trajectory in trajectories if isinstance(trajectory.spec, EpisodeSpec)]
    return {
        "reward_model": [{"ground_truth": ""} for _ in specs],
        "extra_info": [{} for _ in specs],
        "env_ids": [spec.env_id for spec in specs],
        "group_ids": [spec.group_id for spec in specs],
    }
