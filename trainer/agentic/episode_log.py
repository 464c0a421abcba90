"""Episodes as readable text: the messages, the reward of each action, and how the episode ended.

Turns the rows of a batch into one `Sample` per episode. Like all samples, they are written to the run folder, the
user's folders, trackers, the console and the final report.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from trainer.validation.sample import Sample, plain_value
from verl_lite.errors import printable
from verl_lite.json_types import ChatMessage
from verl_lite.protocol import DataProto

TEXT_SHOWN = 2_000
"""Number of characters of an episode that the console shows."""
_ROLE_WIDTH = 10
"""Width of the column of roles: that of the longest role, assistant, and a blank."""


def samples_of(batch: DataProto, step: int) -> list[Sample]:
    """Returns the episodes of a batch in the order of their first rows, including failed episodes.

    Fields of a sample that differ from those of an answer to a prompt:
        uid: the group.
        data_source: the tag.
        input: the first message that is not a system message.
        output: all later messages, one paragraph each; the reward follows each action, and the error of a failed
            episode comes last.
        extra: metrics of the environment.
        response_length: number of tokens that the policy sampled.
        requests: those of the episode's program, if there is one.
    """
    all_rows = range(len(batch))
    return [_sample(batch, rows, step) for rows in rows_by_episode(batch, all_rows)]


def rows_by_episode(batch: DataProto, among: Iterable[int]) -> list[list[int]]:
    """Groups the rows `among` by episode; the rows of each episode are in the order of its steps."""
    episode_of_row = batch.non_tensor_batch["traj_id"]
    by_episode: dict[str, list[int]] = {}
    for row in among:
        episode = episode_of_row[row]
        by_episode.setdefault(episode, []).append(int(row))

    # without steps an episode is one row
    step_of_row = column_of(batch, "step", np.ones(len(batch)))
    for rows in by_episode.values():
        rows.sort(key=lambda row: step_of_row[row])
    return list(by_episode.values())


def _sample(batch: DataProto, rows: list[int], step: int) -> Sample:
    """Returns the sample of one episode.

    Args:
        batch: the batch.
        rows: the rows of the episode in the batch, in the order of its steps.
        step: the training step.
    """
    columns = batch.non_tensor_batch
    first = rows[0]
    last = rows[-1]
    messages = _messages_of(columns["messages"], rows)
    rewards: list[float] = []
    for row in rows:
        rewards += map(float, np.atleast_1d(columns["step_scores"][row]))

    # one message is the input, and all later ones are the output
    input_number = _number_of_input(messages)
    input_text = ""
    if messages:
        input_text = str(messages[input_number]["content"])
    lines = _output_lines(messages, rewards, input_number)
    error = columns["env_error"][last]
    if error is not None:
        lines += _paragraph("error", error)

    none_of_rows = np.full(len(batch), None)
    metrics = column_of(batch, "env_metrics", none_of_rows)[last] or {}
    requests = column_of(batch, "requests", none_of_rows)[first]
    score = None
    # a failed episode has no score, although its rows have 0
    if not columns["reward_failed"][last]:
        score = float(column_of(batch, "episode_scores")[first])
    return Sample(
        step=step,
        uid=columns["uid"][first],
        data_source=columns["tags"][first],
        input=input_text,
        output="\n".join(lines),
        gts="",
        score=score,
        response_length=int((batch.batch["response_mask"][rows] != 0).sum()),
        finish_reason=columns["stop"][last],
        policy_version=int(batch.batch["policy_version"][first]),
        extra={name: float(value) for name, value in metrics.items()},
        requests=plain_value(requests) or [],
    )


def _number_of_input(messages: Sequence[ChatMessage]) -> int:
    """Returns the number of the first message that is not a system message; 0 if there is none."""
    for number, message in enumerate(messages):
        if message["role"] != "system":
            return number
    return 0


def _messages_of(messages_of_row: np.ndarray, rows: Sequence[int]) -> list[ChatMessage]:
    """Returns the messages of an episode. With one row per step, every row repeats the system message."""
    messages = list(messages_of_row[rows[0]])
    for row in rows[1:]:
        messages += [message for message in messages_of_row[row] if message["role"] != "system"]
    return messages


def _output_lines(messages: Sequence[ChatMessage], rewards: Sequence[float], input_number: int) -> list[str]:
    """Returns the lines of the messages after the input; the reward of each action follows the action."""
    rewards_left = iter(rewards)
    lines: list[str] = []
    for number, message in enumerate(messages):
        role = message["role"]
        reward = None
        if role == "assistant":
            reward = next(rewards_left, None)
        if number <= input_number:
            continue
        lines += _paragraph(str(role), str(message["content"]))
        if reward is not None:
            lines.append(f"{'':<{_ROLE_WIDTH}} -> reward {reward:g}")
    return lines


def _paragraph(role: str, text: str) -> list[str]:
    """Returns the lines of `role  text`, with further lines of the text aligned below and control characters
    escaped."""
    first, *others = printable(text).strip("\n").split("\n")
    lines = [f"{role:<{_ROLE_WIDTH}} {first}"]
    for line in others:
        lines.append(f"{'':<{_ROLE_WIDTH}} {line}")
    return lines


def readable(sample: Sample) -> str:
    """Returns an episode for the console: a summary line and the beginning of its messages."""
    score = "failed"
    if sample.score is not None:
        score = f"score {sample.score:g}"
    facts = [score, str(sample.finish_reason)]
    for name, value in sample.extra.items():
        facts.append(f"{name} {value:.3g}")
    head = f"episode of {sample.uid}: {', '.join(facts)}"
    lines = [head, *_paragraph("asked", sample.input), sample.output]
    return "\n".join(lines)[:TEXT_SHOWN]


def column_of(batch: DataProto, name: str, default: np.ndarray | None = None) -> np.ndarray:
    """Returns a tensor or non-tensor column as an array. Raises ValueError if it is missing and has no default."""
    if name in batch:
        if name in batch.non_tensor_batch:
            return batch.non_tensor_batch[name]
        return batch.batch[name].numpy()
    if default is None:
        raise ValueError(f"episodes: column {name!r} is missing; workers/agents/trajectories.py writes it.")
    return default
