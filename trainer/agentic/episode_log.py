"""Episodes as readable text: the messages, the reward of each action, and how the episode ended.

Turns the rows of a batch into one `Sample` per episode. Like all samples, they are written to the run folder, the
user's folders, trackers, the console and the final report.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainer.validation.sample import Sample, plain_value
from verl_lite.errors import printable
from verl_lite.protocol import DataProto

TEXT_SHOWN = 2_000
_ROLE_WIDTH = 10


def samples_of(batch: DataProto, step: int) -> list[Sample]:
    """Returns the episodes of a batch in the order of their first rows, including failed episodes.

    uid: the group. data_source: the tag. input: the first message that is not a system message. output: all later
    messages, one paragraph each; the reward follows each action, and the error of a failed episode comes last. extra:
    metrics of the environment. response_length: number of tokens that the policy sampled. requests: those of the
    episode's program, if there is one.
    """
    return [_sample(batch, rows, step) for rows in rows_by_episode(batch, range(len(batch)))]


def rows_by_episode(batch: DataProto, among: Iterable[int]) -> list[list[int]]:
    """Groups the rows `among` by episode; the rows of each episode are in the order of its steps."""
    by_episode: dict[str, list[int]] = {}
    for row in among:
        by_episode.setdefault(batch.non_tensor_batch["traj_id"][row], []).append(int(row))
    places = column_of(batch, "step", np.ones(len(batch)))
    return [sorted(rows, key=lambda row: places[row]) for rows in by_episode.values()]


def _sample(batch: DataProto, rows: list[int], step: int) -> Sample:
    """Returns the sample of one episode. rows: its rows in the batch, in the order of its steps."""
    columns, tensors = batch.non_tensor_batch, batch.batch
    first, last = rows[0], rows[-1]
    messages: list[Mapping[str, Any]] = []
    for row in rows:
        messages += [each for each in columns["messages"][row] if row == first or each["role"] != "system"]
    rewards = iter([float(reward) for row in rows for reward in np.atleast_1d(columns["step_scores"][row])])
    asked = next((place for place, message in enumerate(messages) if message["role"] != "system"), 0)
    lines: list[str] = []
    for place, message in enumerate(messages):
        reward = next(rewards, None) if message["role"] == "assistant" else None
        if place > asked:
            lines += _paragraph(str(message["role"]), str(message["content"]))
            lines += [] if reward is None else [f"{'':<{_ROLE_WIDTH}} -> reward {reward:g}"]
    error = columns["env_error"][last]
    lines += [] if error is None else _paragraph("error", error)
    metrics = columns["env_metrics"][last] if "env_metrics" in columns else None
    return Sample(
        step=step,
        uid=columns["uid"][first],
        data_source=columns["tags"][first],
        input=str(messages[asked]["content"]) if messages else "",
        output="\n".join(lines),
        gts="",
        score=None if columns["reward_failed"][last] else float(column_of(batch, "episode_scores")[first]),
        response_length=int((tensors["response_mask"][rows] != 0).sum()),
        finish_reason=columns["stop"][last],
        policy_version=int(tensors["policy_version"][first]),
        extra={name: float(value) for name, value in (metrics or {}).items()},
        requests=plain_value(column_of(batch, "requests", np.full(len(batch), None))[first]) or [],
    )


def _paragraph(role: str, text: str) -> list[str]:
    """Returns the lines of `role  text`, with further lines of the text aligned below and control characters
    escaped."""
    first, *others = printable(text).strip("\n").split("\n")
    return [f"{role:<{_ROLE_WIDTH}} {first}", *(f"{'':<{_ROLE_WIDTH}} {line}" for line in others)]


def readable(sample: Sample) -> str:
    """Returns an episode for the console: a summary line and the beginning of its messages."""
    score = "failed" if sample.score is None else f"score {sample.score:g}"
    metrics = "".join(f", {name} {value:.3g}" for name, value in sample.extra.items())
    head = f"episode of {sample.uid}: {score}, {sample.finish_reason}{metrics}"
    return "\n".join([head, *_paragraph("asked", sample.input), sample.output])[:TEXT_SHOWN]


def column_of(batch: DataProto, name: str, default: np.ndarray | None = None) -> np.ndarray:
    """Returns a tensor or non-tensor column as an array. Raises ValueError if it is missing and has no default."""
    if name in batch:
        return batch.non_tensor_batch[name] if name in batch.non_tensor_batch else batch.batch[name].numpy()
    if default is None:
        raise ValueError(f"episodes: column {name!r} is missing; workers/agents/trajectories.py writes it.")
    return default
