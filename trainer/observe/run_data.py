"""Reads a run folder: metrics by step, the configuration with the source of each value, the run's state and samples.

The run may be active, killed or finished, of any command that writes metrics.jsonl. This module only reads files: it
takes no lock, loads no model, and does not disturb the run. Samples (`trainer.validation.sample_files`) are read
lazily: first their scores, then only the requested rows. A run without text samples (reward flow) has none.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet

from trainer.observe.final_report import read_early_end, shortened
from trainer.observe.tracking import METRICS, read_metrics
from trainer.validation.sample import valid_image_names
from trainer.validation.sample_files import FOLDER, IMAGES, JSON, REWARD, TRAIN, VAL, as_text, step_of
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject

Points = list[tuple[int, float]]
Steps = Mapping[int, Mapping[str, float]]
Kind = TypeVar("Kind")
Default = TypeVar("Default")
Messages = tuple[tuple[str, str], ...]
"""(role, content) of each message of a conversation."""

STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")
"""The stages of a training step, in order."""
OUTSIDE = ("testing", "save_checkpoint")
"""Stages that timing_s/step does not include."""
MAX_REQUESTS, MAX_MESSAGES, MAX_DEPTH, MAX_FACTS, MAX_TREE = 200, 50, 8, 300, 60_000
"""Limits of an episode's tree: requests, messages of a request, depth, and characters of a request's facts and of all
messages."""
MAX_IMAGES = 50  # of a prompt

_REQUESTS = f"requests{JSON}"
_OPTION = re.compile(r"(?P<indent> *)(?P<key>[^\s#:][^:]*):(?: (?P<value>.*?)(?: +# (?P<source>[^#]*))?)?")


@dataclass(frozen=True)
class ConfigValue:
    """The value of one option in a run.

    Attributes:
        value: Text in the file.
        source: `default`, `command line`, or the recipe or file that sets the option.
    """

    value: str
    source: str


@dataclass(frozen=True)
class RecordedRun:
    """The contents of a run folder.

    Attributes:
        folder: The run folder.
        steps: Metrics by step, in order of steps.
        config: The options of the run by dotted key.
        notes: Notes in the saved configuration.
        total_steps: Number of training steps, or None if it is not configured.
        is_running: True if the process of the run still exists.
        modified: Time of the last metrics, in seconds since the epoch.
        early_end: Step after which a callback ended the run, or None.
    """

    folder: Path
    steps: Steps
    config: Mapping[str, ConfigValue] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    total_steps: int | None = None
    is_running: bool = False
    modified: float = 0.0
    early_end: int | None = None

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def state(self) -> str:
        """`running`, `finished`, `ended early` (by a callback, such as early stopping), `stopped` (by the user or a
        failure), or `not running` if total_steps is unknown."""
        if self.is_running:
            return "running"
        if self.early_end is not None and self.last_step == self.early_end:
            return "ended early"
        if self.total_steps is None:
            return "not running"
        return "finished" if self.last_step >= self.total_steps else "stopped"

    def series(self) -> dict[str, Points]:
        """Returns the (step, value) points of all metrics, in order of first appearance."""
        points_by_metric: dict[str, Points] = {}
        for step, metrics in self.steps.items():
            for name, value in metrics.items():
                points_by_metric.setdefault(name, []).append((step, value))
        return points_by_metric

    def seconds(self) -> float:
        """Returns the logged time of all steps in seconds, including validation and saving."""
        times = []
        for metrics in self.steps.values():
            times += [metrics.get(f"timing_s/{stage}", 0.0) for stage in ("step", *OUTSIDE)]
        return sum(times)


def read_run(folder: Path) -> RecordedRun:
    """Reads a run folder.

    Raises:
        UserError: If the folder has no metrics. The message names runs below the folder.
    """
    folder = Path(folder).expanduser().resolve()
    metrics_file = folder / METRICS
    if not metrics_file.is_file():
        runs_below = _runs_below(folder)
        message = f"{folder}: no {METRICS} in it"
        if runs_below:
            message += "; these subfolders have one:" + "".join(f"\n  {run}" for run in runs_below[:5])
        raise UserError(message)

    metrics = read_metrics(metrics_file)
    steps = {}
    for step in sorted(metrics):
        steps[step] = {name: float(value) for name, value in metrics[step].items()}

    config, notes = read_config(folder / "config.yaml")
    total_steps_option = config.get("trainer.total_training_steps")
    total_steps = None
    if total_steps_option is not None and total_steps_option.value.isdigit():
        total_steps = int(total_steps_option.value)

    return RecordedRun(
        folder=folder,
        steps=steps,
        config=config,
        notes=notes,
        total_steps=total_steps,
        is_running=_is_held(folder / "in_use"),
        modified=metrics_file.stat().st_mtime,
        early_end=read_early_end(folder),
    )


def _runs_below(folder: Path) -> list[Path]:
    """Returns the runs at most three levels below a folder, which may be a home folder with millions of files."""
    runs: list[Path] = []
    for levels in ("*", "*/*", "*/*/*"):
        # such as a folder of another user
        with contextlib.suppress(OSError):
            runs += [path.parent for path in folder.glob(f"{levels}/{METRICS}")]
    return sorted(runs)


def read_config(path: Path) -> tuple[dict[str, ConfigValue], tuple[str, ...]]:
    """Returns the options of a saved configuration (`config.save_config`) by dotted key, and its notes. Both are empty
    if the file is missing."""
    if not path.is_file():
        return {}, ()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()

    options: dict[str, ConfigValue] = {}
    keys_above: list[str] = []
    for line in lines:
        match = _OPTION.fullmatch(line)
        if match is None:
            continue
        depth = len(match["indent"]) // 2
        keys_above[depth:] = [match["key"]]
        if match["value"] is not None:
            value = match["value"].strip()
            source = (match["source"] or "").strip()
            options[".".join(keys_above)] = ConfigValue(value, source)

    notes = tuple(line.removeprefix("# ") for line in lines if line.startswith("# "))
    return options, notes


def run_titles(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns a title for each run: its folder name, with as many parent folders as needed to distinguish the runs.

    Folders of a sweep's runs are named after their seeds, so their titles always include the number of the trial.
    """
    folders = {run.folder for run in runs}
    is_of_sweep = any((folder.parent.parent.parent / "study.json").is_file() for folder in folders)
    for depth in range(2 if is_of_sweep else 1, 99):
        titles = ["/".join(run.folder.parts[-depth:]) for run in runs]
        if len(set(titles)) == len(folders):
            break
    return titles


def stage_seconds(steps: Steps, most: int) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the time of the steps by stage, for a bar chart.

    Args:
        steps: Metrics by step. Steps without a time are left out.
        most: Maximum number of bars. If there are more steps, each bar is a mean over adjacent steps.

    Returns:
        The positions of the bars, and the seconds at each position for each stage and for `other`. Stages with a
        negligible time are left out.
    """
    timed_steps = {step: metrics for step, metrics in steps.items() if "timing_s/step" in metrics}
    if not timed_steps:
        return [], {}

    stages = _timed_stages(timed_steps)
    seconds_by_stage = {}
    for stage in stages:
        seconds_by_stage[stage] = np.array([metrics.get(f"timing_s/{stage}", 0.0) for metrics in timed_steps.values()])
    step_seconds = np.array([metrics["timing_s/step"] for metrics in timed_steps.values()])
    measured_seconds = sum(seconds_by_stage[stage] for stage in stages if stage not in OUTSIDE)
    seconds_by_stage["other"] = np.clip(step_seconds - measured_seconds, 0.0, None)

    bar_count = min(most, len(timed_steps))
    positions = _means_of_parts(np.array(list(timed_steps), dtype=float), bar_count)
    bars = {}
    for stage, seconds in seconds_by_stage.items():
        if seconds.sum() > 0.005 * step_seconds.sum():
            bars[stage] = _means_of_parts(seconds, bar_count)
    return positions, bars


def _timed_stages(steps: Steps) -> list[str]:
    """Returns the stages whose time was logged: those of `STAGES` in their order, then the others by name."""
    stages: set[str] = set()
    for metrics in steps.values():
        stages.update(name.removeprefix("timing_s/") for name in metrics if "timing_s/" in name)
    stages.discard("step")
    others = sorted(stages - set(STAGES))
    return [stage for stage in STAGES if stage in stages] + others


def _means_of_parts(values: np.ndarray, count: int) -> list[float]:
    return [float(part.mean()) for part in np.array_split(values, count)]


def _is_held(path: Path) -> bool:
    """Returns True if the process recorded in the lock file still exists on this machine.

    A process that started after the file was written only reuses the id. The lock itself is not tested, because that
    would take it for a moment.
    """
    try:
        process = psutil.Process(int(path.read_text(encoding="utf-8").split()[1]))
        return process.create_time() <= path.stat().st_mtime + 1.0
    except (OSError, ValueError, IndexError, psutil.Error):
        return False


@dataclass(frozen=True)
class RecordedRequest:
    """One request of an episode's program, for display.

    Attributes:
        number: Position in the order of the requests.
        depth: Number of branchings above the request.
        start: The beginning of a conversation or branch; empty for a request that continues the one before it.
        facts: Numbers of tokens, versions of the weights, and the like.
        discarded: Reason why nothing trains on its tokens.
        messages: (role, content) of the messages that it added, and of its answer.
    """

    number: int
    depth: int
    start: str
    facts: str
    discarded: str
    messages: Messages


@dataclass(frozen=True)
class RecordedAnswer:
    """One answer for display.

    Attributes:
        kind: `train`, `val` or `val greedy`.
        prompt: (role, content) of each message.
        score: None if the reward failed.
        parts: Additional entries of the reward's result.
        requests: For an episode of a program, the first of its `total_requests` requests, in the order of
            `request_tree`.
        images: Existing files with the images of the prompt, as paths relative to the run folder.
    """

    kind: str
    step: int
    uid: str
    data_source: str
    prompt: Messages
    output: str
    gts: str
    score: float | None
    parts: dict[str, float | str]
    response_length: int
    finish_reason: str
    policy_version: int
    timed_out: bool
    requests: tuple[RecordedRequest, ...] = ()
    total_requests: int = 0
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordedGroup:
    """The samples of one step and kind. uids, scores: values of each row; a score is None if the reward failed."""

    file: Path
    kind: str
    step: int
    uids: list[str]
    scores: list[float | None]

    def read(self, rows: Sequence[int]) -> list[RecordedAnswer]:
        """Reads the answers in these rows; returns none if the run has deleted the file in the meantime."""
        table = _table(self.file)
        if table is None:
            return []
        columns = [name for name in table.column_names if not name.endswith(JSON) or name == _REQUESTS]
        selected = table.select(columns).take(list(rows))
        run_dir = self.file.parent.parent.parent
        return [_answer(row, self.kind, self.step, run_dir) for row in selected.to_pylist()]


def groups(run_dir: Path) -> Iterator[RecordedGroup]:
    """Yields all groups of samples of a run in the order of steps, training before validation."""
    files = []
    for kind in (TRAIN, VAL):
        for file in (run_dir / FOLDER / kind).glob("*.parquet"):
            files.append((step_of(file), kind, file))

    for step, kind, file in sorted(files):
        table = _table(file, ["uid", "score"])
        if table is None:
            continue
        suffix = file.stem.partition("-")[2]  # `greedy`, or empty
        yield RecordedGroup(
            file, f"{kind} {suffix}".strip(), step, table["uid"].to_pylist(), table["score"].to_pylist()
        )


def chosen(folder: Path, order: str, text: str, count: int) -> tuple[list[RecordedAnswer], int]:
    """Returns up to `count` answers, and the number of all answers that match.

    Args:
        folder: The run folder.
        order: `best`, `worst` (failed rewards first), or any other text for the latest first.
        text: Required part of the prompt, answer, ground truth or uid; upper and lower case are equal.
        count: Maximum number of answers.
    """
    matches: list[tuple[float, int, int, RecordedGroup]] = []
    for group in groups(folder):
        for row in _matching_rows(group, text.lower()):
            score = group.scores[row]
            score_or_least = -math.inf if score is None else score
            if order == "best":
                rank = -score_or_least
            elif order == "worst":
                rank = score_or_least
            else:
                rank = 0.0
            matches.append((rank, -group.step, row, group))

    # a group has no order, and the sort keeps the order of groups with the same step
    matches.sort(key=lambda match: match[:3])
    answers: list[RecordedAnswer] = []
    for *_, row, group in matches[:count]:
        answers += group.read([row])
    return answers, len(matches)


def _matching_rows(group: RecordedGroup, word: str) -> Sequence[int]:
    """Returns the rows whose texts contain a word in lower case. Without a word, the file is not read."""
    all_rows = range(len(group.uids))
    if not word:
        return all_rows
    rows = []
    for row, answer in enumerate(group.read(all_rows)):
        contents = [content for _, content in answer.prompt]
        searched = "\n".join([answer.output, answer.gts, answer.uid, *contents])
        if word in searched.lower():
            rows.append(row)
    return rows


def _table(file: Path, columns: list[str] | None = None) -> pyarrow.Table | None:
    try:
        return pyarrow.parquet.read_table(file, columns=columns)
    except (FileNotFoundError, pyarrow.ArrowInvalid):
        return None  # the run has deleted the file in the meantime, or the file is damaged


def _answer(row: JsonObject, kind: str, step: int, run_dir: Path) -> RecordedAnswer:
    """Returns a row of a samples file as an answer for display."""
    messages = tuple((message["role"], message["content"]) for message in row["prompt"])
    parts = {}
    for name, value in row.items():
        if name.startswith(REWARD) and value is not None:
            parts[name.removeprefix(REWARD)] = value
    requests, total_requests = request_tree(row.get(_REQUESTS))

    images = []
    for name in valid_image_names(row.get("images"))[:MAX_IMAGES]:
        path = f"{FOLDER}/{IMAGES}/{name}"
        # a link could show a file of another folder
        if (run_dir / path).is_file() and not (run_dir / path).is_symlink():
            images.append(path)

    return RecordedAnswer(
        kind=kind,
        step=step,
        uid=row["uid"],
        data_source=row["data_source"],
        prompt=messages or (("user", row["input"]),),
        output=row["output"],
        gts=row["gts"],
        score=row["score"],
        parts=parts,
        response_length=row["response_length"],
        finish_reason=row["finish_reason"],
        policy_version=row["policy_version"],
        timed_out=row["timed_out"],
        requests=requests,
        total_requests=total_requests,
        images=tuple(images),
    )


def request_tree(text: str | None) -> tuple[tuple[RecordedRequest, ...], int]:
    """Reads the requests of an episode for display.

    If several requests continue a request, each begins a branch one level deeper. Values of a wrong type count as
    missing. A parent that does not come before its request is ignored, so that there are no cycles.

    Args:
        text: Json text of the requests.

    Returns:
        The first requests of the episode, each after the request that it continues, and the number of all.
    """
    try:
        values = json.loads(text or "[]")
    except (TypeError, ValueError, RecursionError):
        values = []
    if not isinstance(values, list):
        values = []
    entries = [value if isinstance(value, dict) else {} for value in values[:MAX_REQUESTS]]

    message_count = 0
    children: dict[int | None, list[int]] = {}
    for number, entry in enumerate(entries):
        parent = _typed(entry, "parent", int, -1)
        children.setdefault(parent if 0 <= parent < number else None, []).append(number)
        message_count += 1 + len(_typed(entry, "messages", list, [])[:MAX_MESSAGES])  # 1: the answer
    most_characters = MAX_TREE // max(20, message_count)

    # depth first, without recursion, because a conversation can be longer than Python's stack
    requests: list[RecordedRequest] = []
    waiting = [(number, 0, "new conversation") for number in reversed(children.get(None, []))]
    while waiting:
        number, depth, start = waiting.pop()
        requests.append(_request(number, depth, start, entries[number], most_characters))
        continuing = children.get(number, [])
        if len(continuing) > 1:
            child_depth = min(depth + 1, MAX_DEPTH)
            child_start = f"continues #{number}"
        else:
            child_depth = depth
            child_start = ""
        waiting += [(child, child_depth, child_start) for child in reversed(continuing)]
    return tuple(requests), len(values)


def _request(number: int, depth: int, start: str, entry: Mapping[str, object], most_characters: int) -> RecordedRequest:
    """Returns a request for display.

    Args:
        number, depth, start: See `RecordedRequest`.
        entry: The request in the samples file.
        most_characters: Maximum number of characters of each message.
    """
    messages = _typed(entry, "messages", list, [])
    row = _typed(entry, "row", int, None)

    reason = as_text(entry.get("discarded") or "")
    if not reason and row is None:
        reason = "no reason is recorded"

    texts = []
    for message in messages[:MAX_MESSAGES]:
        if isinstance(message, dict):
            texts.append((message.get("role"), message.get("content")))
    texts.append(("answer", entry.get("text")))
    short_texts = []
    for role, content in texts:
        short_texts.append((as_text(role or "")[:40], shortened(as_text(content or ""), most_characters)))

    return RecordedRequest(
        number=number,
        depth=depth,
        start=start,
        facts=shortened(_request_facts(entry, messages, row), MAX_FACTS),
        discarded=shortened(reason, MAX_FACTS),
        messages=tuple(short_texts),
    )


def _request_facts(entry: Mapping[str, object], messages: Sequence[object], row: int | None) -> str:
    prompt_tokens = _typed(entry, "prompt_tokens", int, 0)
    sampled_tokens = _typed(entry, "tokens", int, 0)
    facts = [f"{prompt_tokens:,} prompt + {sampled_tokens:,} sampled tokens"]

    versions = _typed(entry, "versions", list, [])
    version_texts = [str(version) for version in versions if type(version) is int and version >= 0]  # -1: no token
    if version_texts:
        facts.append(f"weights {' to '.join(dict.fromkeys(version_texts))}")
    if row is not None:
        facts.append(f"row {row}")
    finish_reason = as_text(entry.get("finish_reason") or "")
    if finish_reason:
        facts.append(finish_reason)
    tool_names = ", ".join(as_text(name) for name in _typed(entry, "tool_calls", list, []))
    if tool_names:
        facts.append(f"calls {tool_names}")
    if len(messages) > MAX_MESSAGES:
        facts.append(f"the first {MAX_MESSAGES} of {len(messages)} messages")
    return ", ".join(facts)


def _typed(entry: Mapping[str, object], name: str, kind: type[Kind], default: Default) -> Kind | Default:
    """Returns an entry of this type, else the default. A bool does not count as an int."""
    value = entry.get(name)
    if isinstance(value, kind) and type(value) is kind:
        return value
    return default
