"""Episodes as a person would read them: who said what, what each action was worth, and how it ended.

Takes the rows of a batch; gives `Episode`s, which go to the console as text, to `trainer.rollout_data_dir` and
`trainer.validation_data_dir` as jsonl, and to trackers and the final report as `Sample`s. What validation
episodes looked like goes to files, too: an animated GIF of RGB frames, or text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.evaluate.sample import Sample
from trainer.final_report import printable
from verl_lite.protocol import DataProto

Message = Mapping[str, Any]
TEXT_SHOWN = 600
_ROLE_WIDTH = 10


@dataclass(frozen=True)
class Episode:
    """One episode.

    rewards: of each action. score: their sum, None where the environment or the engine failed; error says why.
    messages: the conversation; where each step has a prompt of its own, those of all steps one after the other.
    response_length: tokens that the policy wrote. stop: why it ended (`workers.rollout.episodes.Trajectory`).
    """

    step: int
    traj_id: str
    traj_group_id: str
    tag: str
    score: float | None
    rewards: list[float]
    num_turns: int
    response_length: int
    stop: str
    policy_version: int
    metrics: dict[str, float]
    messages: list[dict[str, str]]
    error: str | None = None


def episodes_of(batch: DataProto, step: int) -> list[Episode]:
    """The episodes of a batch in the order of their first rows, those that failed too."""
    by_episode: dict[str, list[int]] = {}
    for row, name in enumerate(batch.non_tensor_batch["traj_id"]):
        by_episode.setdefault(name, []).append(row)
    places = column_of(batch, "step", np.ones(len(batch)))
    return [_episode(batch, sorted(rows, key=lambda row: places[row]), step) for rows in by_episode.values()]


def _episode(batch: DataProto, rows: list[int], step: int) -> Episode:
    """rows: of one episode, in the order of its steps."""
    columns, tensors = batch.non_tensor_batch, batch.batch
    first, last = rows[0], rows[-1]
    messages: list[dict[str, str]] = []
    for row in rows:
        told = [_plain(message) for message in columns["messages"][row]]
        messages += [message for message in told if row == first or message["role"] != "system"]
    metrics = columns["env_metrics"][last] if "env_metrics" in columns else None
    return Episode(
        step=step,
        traj_id=columns["traj_id"][first],
        traj_group_id=columns["uid"][first],
        tag=columns["tags"][first],
        score=None if columns["reward_failed"][last] else float(column_of(batch, "episode_scores")[first]),
        rewards=[float(reward) for row in rows for reward in np.atleast_1d(columns["step_scores"][row])],
        num_turns=int(column_of(batch, "num_turns")[first]),
        response_length=int((tensors["response_mask"][rows] != 0).sum()),
        stop=columns["stop"][last],
        policy_version=int(tensors["policy_version"][first]),
        metrics={name: float(value) for name, value in (metrics or {}).items()},
        messages=messages,
        error=columns["env_error"][last],
    )


def column_of(batch: DataProto, name: str, default: np.ndarray | None = None) -> np.ndarray:
    """A column as an array, wherever it is kept. ValueError where it is missing and has no default."""
    if name in batch:
        return batch.non_tensor_batch[name] if name in batch.non_tensor_batch else batch.batch[name].numpy()
    if default is None:
        raise ValueError(f"episodes: column {name!r} is missing; workers/rollout/trajectories.py writes it.")
    return default


def _plain(message: Message) -> dict[str, str]:
    return {"role": str(message["role"]), "content": str(message["content"])}


def readable(episode: Episode, limit: int = TEXT_SHOWN) -> str:
    """The episode as text: a head line, then a paragraph for each message; after an action its reward.

    limit: characters shown of a message. Control characters of what a model wrote become `\\N{REPLACEMENT CHARACTER}`.
    """
    score = "failed" if episode.score is None else f"score {episode.score:g}"
    told = "".join(f", {name} {value:.3g}" for name, value in episode.metrics.items())
    lines = [f"episode {episode.traj_id}: {score}, {episode.num_turns} turns, {episode.stop}{told}"]
    rewards = iter(episode.rewards)
    for message in episode.messages:
        lines += _paragraph(message["role"], message["content"], limit)
        if message["role"] == "assistant":
            reward = next(rewards, None)
            lines += [] if reward is None else [f"  {'':<{_ROLE_WIDTH}} -> reward {reward:g}"]
    lines += [] if episode.error is None else _paragraph("error", episode.error, limit)
    return "\n".join(lines)


def _paragraph(role: str, text: str, limit: int | None) -> list[str]:
    """`role  text`, further lines of the text under the first. limit: characters of the text; None = all."""
    shown = printable(text, limit).plain
    first, *others = shown.strip("\n").split("\n")
    return [f"  {role:<{_ROLE_WIDTH}} {first}", *(f"  {'':<{_ROLE_WIDTH}} {line}" for line in others)]


def sample_of(episode: Episode, limit: int | None = TEXT_SHOWN) -> Sample:
    """The episode as trackers, the run folder and the final report have samples: what it was asked first, and all that
    followed. limit: characters of a message; None = all."""
    asked = next((place for place, message in enumerate(episode.messages) if message["role"] != "system"), 0)
    followed = [line for m in episode.messages[asked + 1 :] for line in _paragraph(m["role"], m["content"], limit)]
    return Sample(
        step=episode.step,
        uid=episode.traj_group_id,
        data_source=episode.tag,
        input=episode.messages[asked]["content"] if episode.messages else "",
        output="\n".join(line.strip() for line in followed),
        gts="",
        score=episode.score,
        response_length=episode.response_length,
        finish_reason=episode.stop,
        policy_version=episode.policy_version,
        extra=dict(episode.metrics),
    )


def write_episodes(folder: str | None, episodes: Sequence[Episode], step: int) -> None:
    """Appends to FOLDER/{step}.jsonl, an episode a line. Nothing without a folder."""
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / f"{step}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(episode)) + "\n" for episode in episodes)


MILLISECONDS_PER_FRAME = 200
"""ROLL's."""


def save_renders(folder: str, batch: DataProto, step: int) -> list[Path]:
    """Writes FOLDER/step_{step}/{env_id}_{tag}_{score}.gif, or .txt, for each episode that has frames.

    Reads frames, traj_id, env_ids, tags and episode_scores. Rows of one episode share their frames. Episodes of one
    environment after the first have their traj_id in the name too.
    """
    columns = batch.non_tensor_batch
    if "frames" not in columns:
        return []
    target = Path(folder) / f"step_{step}"
    written: dict[str, Path] = {}
    for row, name in enumerate(columns["traj_id"]):
        frames = columns["frames"][row]
        if frames is None or not len(frames) or name in written:
            continue
        score = float(column_of(batch, "episode_scores")[row])
        stem = _file_name(f"{columns['env_ids'][row]}_{columns['tags'][row]}_{score:.1f}")
        if any(path.stem == stem for path in written.values()):
            stem = f"{stem}_{_file_name(name)}"
        target.mkdir(parents=True, exist_ok=True)
        written[name] = _save(frames, target / stem)
    return list(written.values())


def _save(frames: Sequence[Any], path: Path) -> Path:
    """Writes the frames, and gives the path with its ending."""
    pictures = [np.asarray(frame) for frame in frames if not isinstance(frame, str)]
    if not pictures:
        text = path.with_name(path.name + ".txt")
        numbered = (f"frame {number}\n{frame}\n" for number, frame in enumerate(frames))
        text.write_text("\n".join(numbered), encoding="utf-8")
        return text
    from PIL import Image

    gif = path.with_name(path.name + ".gif")
    images = [Image.fromarray(picture.astype(np.uint8)) for picture in pictures]
    images[0].save(gif, save_all=True, append_images=images[1:], duration=MILLISECONDS_PER_FRAME, loop=0)
    return gif


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.+-]", "_", text)
