"""Turns episodes into training samples: one row per trajectory, or one row per turn.

The row of a trajectory has the first prompt as its prompt and everything after it as its response: sampled turns (mask
1) and the text between them (mask 0). The reward of a turn is on its last sampled token. Each segment of the mask is
therefore one turn, which is all that estimators for turns need. trainer/AGENTIC.md has a drawing.
"""

from collections import Counter, defaultdict
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
        trajectory: The episode.
        step: Number of the row in its trajectory.
        state_hash: Hash of the state before the first turn.
        prompt_ids: Tokens of the prompt.
        raw_prompt: Messages of the prompt.
        messages: The whole conversation, or with one row per turn that of the turn.
        step_scores: Reward of each turn; with one row per turn, a number.
        finish_reason: Why the last turn ended.
        extra: See `Completion.extra`.
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
        trajectories: The episodes.
        pad_token_id: Token of the padding.
        prompt_length: Width P of the columns of prompts; the runner's limits keep within it.
        response_length: Width R of the columns of responses, likewise.
        extra_outputs: Extra outputs of the engine that sampled the turns.
    """
    rows: list[_Row] = []
    for trajectory in trajectories:
        if not trajectory.is_kept:
            continue
        for step, turns in enumerate(_turns_of_rows(trajectory)):
            rows.append(_row(trajectory, turns, step))

    responses = []
    for row in rows:
        # the first prompt of a program's conversation may be longer than the column; see `Trace.rows`
        excess = len(row.prompt_ids) - prompt_length
        if row.response_ids and excess > 0:
            _move_to_response(row, excess)
        responses.append(
            Response(row.response_ids, row.response_mask, row.log_probs, row.versions, row.finish_reason, row.extra)
        )

    prompt_ids = [row.prompt_ids for row in rows]
    prompts, prompt_mask = left_padded(prompt_ids, prompt_length, pad_token_id)
    batch = write_rows(prompts, prompt_mask, responses, response_length, pad_token_id, extra_outputs)
    tensors = {"prompt_mask": prompt_mask} | _number_columns(rows, response_length)
    return batch | DataProto.from_dict(tensors=tensors, non_tensors=_object_columns(rows))


def _turns_of_rows(trajectory: Trajectory) -> Sequence[Sequence[Turn]]:
    """Returns the turns of each row of an episode; one row without turns if there is nothing to train on."""
    if trajectory.stop == "failed" or not trajectory.turns:
        return [[]]
    # the trace of a program has decided which requests share a row
    if trajectory.rows:
        return trajectory.rows
    if trajectory.by_step:
        return [[turn] for turn in trajectory.turns]
    return [trajectory.turns]


def _row(trajectory: Trajectory, turns: Sequence[Turn], step: int) -> _Row:
    """Returns the row of these turns. A row without turns has no token to train on."""
    rewards = [turn.reward for turn in turns]
    step_scores: float | list[float] = sum(rewards, 0.0) if trajectory.by_step else rewards
    finish_reason = _finish_reason(trajectory, turns)
    # with several rows, each has the messages of its own turns
    if trajectory.rows or (trajectory.by_step and turns):
        messages = messages_of(turns)
    else:
        messages = trajectory.messages
    # a failed episode has no turns in its row, but its first turn still names the state in which it began
    first_turns = turns or trajectory.turns
    row = _Row(
        trajectory,
        step,
        state_hash=first_turns[0].state_hash if first_turns else "",
        prompt_ids=trajectory.prompt_ids,
        raw_prompt=trajectory.prompt_messages,
        messages=messages,
        step_scores=step_scores,
        finish_reason=finish_reason,
        extra=_joined_extra(turns),
    )
    if turns:
        row.prompt_ids = turns[0].prompt_ids
        row.raw_prompt = turns[0].messages

    for number, turn in enumerate(turns):
        # the tokens before the first turn are the prompt of the row, and those before a later turn part of its response
        joined = turn.prompt_ids if number else ()
        num_joined = len(joined)
        num_sampled = len(turn.response_ids)
        row.response_ids += [*joined, *turn.response_ids]
        row.response_mask += [0] * num_joined + [1] * num_sampled
        row.log_probs += [0.0] * num_joined + turn.log_probs
        # only sampled tokens have a version
        row.versions += [-1] * num_joined + turn.versions
        row.scores += [0.0] * (num_joined + num_sampled - 1) + [turn.reward]
    return row


def _finish_reason(trajectory: Trajectory, turns: Sequence[Turn]) -> str:
    """Returns the reason for the end of a row: `Completion.finish_reason` of its last turn, or that of the episode."""
    if trajectory.stop == "failed":
        return "abort"
    # the next turn did not fit: with one row per turn, this does not concern the turns before it
    is_cut = trajectory.stop == "max_length" and not trajectory.by_step
    if not turns or is_cut:
        return "length"
    return turns[-1].finish_reason


def _joined_extra(turns: Sequence[Turn]) -> dict[str, torch.Tensor]:
    """Returns the extra outputs of a row: of the last turn for columns (B, P+R, ...), of all turns for (B, R, ...)."""
    if not turns:
        return {}
    parts: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for number, turn in enumerate(turns):
        # tokens between two turns have no values
        num_joined = len(turn.prompt_ids) if number else 0
        end = num_joined + len(turn.response_ids)
        for name, values in of_response(turn.extra, num_joined).items():
            parts[name].append(values[:end])

    # the engine sampled the last turn after all others, so its values of (B, P+R, ...) cover the whole row
    extra = dict(turns[-1].extra)
    for name, values_of_turns in parts.items():
        extra[name] = torch.cat(values_of_turns)
    return extra


def _move_to_response(row: _Row, excess: int) -> None:
    """Moves the last `excess` tokens of the prompt to the response, where they have mask 0, no version and no score."""
    moved = row.prompt_ids[-excess:]
    row.prompt_ids = row.prompt_ids[:-excess]
    row.response_ids = [*moved, *row.response_ids]
    row.response_mask = [0] * excess + row.response_mask
    row.log_probs = [0.0] * excess + row.log_probs
    row.versions = [-1] * excess + row.versions
    row.scores = [0.0] * excess + row.scores
    row.extra = {**row.extra, **of_response(row.extra, excess)}


def _number_columns(rows: list[_Row], response_length: int) -> dict[str, torch.Tensor]:
    """Returns the columns of scores and counts."""
    scores = [row.scores for row in rows]
    episode_scores = [row.trajectory.score for row in rows]
    start_steps = [row.trajectory.spec.start_step for row in rows]
    num_turns = [len(row.trajectory.turns) for row in rows]
    return {
        "token_level_scores": right_padded(scores, response_length, dtype=torch.float32),
        "step": torch.tensor([row.step for row in rows]),
        "start_step": torch.tensor(start_steps),
        "num_turns": torch.tensor(num_turns),
        "episode_scores": torch.tensor(episode_scores, dtype=torch.float32),
    }


def _object_columns(rows: list[_Row]) -> dict[str, np.ndarray]:
    """Returns the columns that are not tensors."""
    trajectories = [row.trajectory for row in rows]
    specs = [trajectory.spec for trajectory in trajectories]
    # an episode may have several rows, and each sample needs a name of its own
    num_rows: Counter[str] = Counter()
    sample_ids = []
    for spec in specs:
        sample_ids.append(f"{spec.traj_id}/{num_rows[spec.traj_id]}")
        num_rows[spec.traj_id] += 1
    columns: dict[str, Sequence[object]] = {
        "uid": [spec.traj_group_id for spec in specs],
        "traj_id": [spec.traj_id for spec in specs],
        "sample_id": sample_ids,
        "state_hash": [row.state_hash for row in rows],
        # both names: rewards and validation read verl's column, the metrics of agents ROLL's
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
        reward_models = []
        for task in tasks:
            # rewards read a ground truth, which a task of a program need not have
            reward_models.append({"ground_truth": "", **task.get("reward_model", {})})
        return {
            "reward_model": reward_models,
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
