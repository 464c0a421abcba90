"""Reads a run folder: metrics by step, the configuration with the source of each value, the run's state and samples.

The run may be active, killed or finished, of any command that writes metrics.jsonl. This module only reads files: it
takes no lock, loads no model, and does not disturb the run. Samples (`trainer.validation.sample_files`) are read
lazily: first their scores, then only the requested rows. A run without text samples (reward flow) has none.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet

from trainer.final_report import read_early_end, shortened
from trainer.tracking import METRICS, read_metrics
from trainer.validation.sample import valid_image_names
from trainer.validation.sample_files import FOLDER, IMAGES, JSON, REWARD, TRAIN, VAL, as_text, step_of
from verl_lite.errors import UserError

Points = list[tuple[int, float]]
Steps = Mapping[int, Mapping[str, float]]

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
    """The value of one option in a run. value: text in the file. source: `default`, `command line`, recipe or file."""

    value: str
    source: str


@dataclass(frozen=True)
class Run:
    """The contents of a run folder. modified: time of the last metrics, in seconds since the epoch. total_steps: number
    of training steps, or None if it is not configured. notes: notes in the saved configuration. early_end: step after
    which a callback ended the run, or None."""

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
        found: dict[str, Points] = {}
        for step, metrics in self.steps.items():
            for name, value in metrics.items():
                found.setdefault(name, []).append((step, value))
        return found

    def seconds(self) -> float:
        """Returns the logged time of all steps in seconds, including validation and saving."""
        names = [f"timing_s/{name}" for name in ("step", *OUTSIDE)]
        return sum(metrics.get(name, 0.0) for metrics in self.steps.values() for name in names)


def read_run(folder: Path) -> Run:
    """Reads a run folder. Raises UserError if it has no metrics; the message names runs below the folder."""
    folder = Path(folder).expanduser().resolve()
    source = folder / METRICS
    if not source.is_file():
        below = "".join(f"\n  {path.parent}" for path in sorted(folder.glob(f"*/**/{METRICS}"))[:5])
        raise UserError(f"{folder}: no {METRICS} in it" + (f"; these subfolders have one:{below}" if below else ""))
    metrics = read_metrics(source)
    config, notes = read_config(folder / "config.yaml")
    total = config.get("trainer.total_training_steps", ConfigValue("", "")).value
    return Run(
        folder,
        {step: {name: float(x) for name, x in metrics[step].items()} for step in sorted(metrics)},
        config,
        notes,
        int(total) if total.isdigit() else None,
        _is_held(folder / "in_use"),
        source.stat().st_mtime,
        read_early_end(folder),
    )


def read_config(path: Path) -> tuple[dict[str, ConfigValue], tuple[str, ...]]:
    """Returns the options of a saved configuration (`config.save_config`) by dotted key, and its notes. Both are empty
    if the file is missing."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    found: dict[str, ConfigValue] = {}
    above: list[str] = []
    for match in filter(None, map(_OPTION.fullmatch, lines)):
        above[len(match["indent"]) // 2 :] = [match["key"]]
        if match["value"] is not None:
            found[".".join(above)] = ConfigValue(match["value"].strip(), (match["source"] or "").strip())
    return found, tuple(line.removeprefix("# ") for line in lines if line.startswith("# "))


def run_titles(runs: Sequence[Run]) -> list[str]:
    """Returns a title for each run: its folder name, with as many parent folders as needed to distinguish the runs.

    Folders of a sweep's runs are named after their seeds, so their titles always include the number of the trial.
    """
    is_of_sweep = any((run.folder.parent.parent.parent / "study.json").is_file() for run in runs)
    for depth in range(1 + is_of_sweep, 99):
        titles = ["/".join(run.folder.parts[-depth:]) for run in runs]
        if len(set(titles)) == len({run.folder for run in runs}):
            break
    return titles


def stage_seconds(steps: Steps, most: int) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the time of the steps by stage, for a bar chart.

    The result is the positions of at most `most` bars, which are means over adjacent steps, and the seconds at each
    position for each stage and for `other`. Stages with a negligible time are left out.
    """
    timed = {step: metrics for step, metrics in steps.items() if "timing_s/step" in metrics}
    if not timed:
        return [], {}
    names = {name.removeprefix("timing_s/") for metrics in timed.values() for name in metrics if "timing_s/" in name}
    own = sorted(names - {"step"}, key=lambda name: (STAGES.index(name) if name in STAGES else 99, name))
    of = {name: np.array([metrics.get(f"timing_s/{name}", 0.0) for metrics in timed.values()]) for name in own}
    whole = np.array([metrics["timing_s/step"] for metrics in timed.values()])
    of["other"] = np.clip(whole - sum(seconds for name, seconds in of.items() if name not in OUTSIDE), 0.0, None)
    places = np.array_split(np.array(list(timed), dtype=float), min(most, len(timed)))
    bars = {name: [float(x.mean()) for x in np.array_split(seconds, len(places))] for name, seconds in of.items()}
    return [float(x.mean()) for x in places], {x: y for x, y in bars.items() if of[x].sum() > 0.005 * whole.sum()}


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
class Request:
    """One request of an episode's program, for display. depth: number of branchings above it. start: the beginning of a
    conversation or branch; empty for a request that continues the one before it. discarded: reason why nothing trains
    on its tokens. messages: (role, content) of the messages that it added, and of its answer."""

    number: int
    depth: int
    start: str
    facts: str
    discarded: str
    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Answer:
    """One answer for display. kind: `train`, `val` or `val greedy`. prompt: (role, content) of each message.
    score: None if the reward failed. parts: additional entries of the reward's result. requests: for an episode of a
    program, the first of its total_requests requests in the order of `request_tree`. images: existing files with the
    images of the prompt, as paths relative to the run folder."""

    kind: str
    step: int
    uid: str
    data_source: str
    prompt: tuple[tuple[str, str], ...]
    output: str
    gts: str
    score: float | None
    parts: dict[str, float | str]
    response_length: int
    finish_reason: str
    policy_version: int
    timed_out: bool
    requests: tuple[Request, ...] = ()
    total_requests: int = 0
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """The samples of one step and kind. uids, scores: values of each row; a score is None if the reward failed."""

    file: Path
    kind: str
    step: int
    uids: list[str]
    scores: list[float | None]

    def read(self, rows: Sequence[int]) -> list[Answer]:
        """Reads the answers in these rows; returns none if the run has deleted the file in the meantime."""
        if (table := _table(self.file)) is None:
            return []
        names = [name for name in table.column_names if not name.endswith(JSON) or name == _REQUESTS]
        shown = table.select(names).take(list(rows))
        run_dir = self.file.parent.parent.parent
        return [_answer(row, self.kind, self.step, run_dir) for row in shown.to_pylist()]


def groups(run_dir: Path) -> Iterator[Group]:
    """Yields all groups of samples of a run in the order of steps, training before validation."""
    files = [(step_of(x), kind, x) for kind in (TRAIN, VAL) for x in (run_dir / FOLDER / kind).glob("*.parquet")]
    for number, kind, file in sorted(files):
        if (table := _table(file, ["uid", "score"])) is not None:
            uids, scores = (table[name].to_pylist() for name in ("uid", "score"))
            yield Group(file, f"{kind} {file.stem.partition('-')[2]}".strip(), number, uids, scores)


def chosen(folder: Path, order: str, text: str, count: int) -> tuple[list[Answer], int]:
    """Returns up to `count` answers, and the number of all answers that match.

    Args:
        order: `best`, `worst` (failed rewards first), or any other text for the latest first.
        text: Required part of the prompt, answer, ground truth or uid; upper and lower case are equal.
    """
    sign, word = {"best": -1, "worst": 1}.get(order, 0), text.lower()
    found: list[tuple[float, int, int, Group]] = []
    for group in groups(folder):
        rows: Sequence[int] = range(len(group.uids))
        if word:
            searched = [[x.output, x.gts, x.uid, *(content for _, content in x.prompt)] for x in group.read(rows)]
            rows = [row for row, texts in enumerate(searched) if word in "\n".join(texts).lower()]
        for row in rows:
            score = group.scores[row]
            rank = sign * (-math.inf if score is None else score) if sign else 0.0
            found.append((rank, -group.step, row, group))
    found.sort(key=lambda one: one[:3])
    return [answer for *_, row, group in found[:count] for answer in group.read([row])], len(found)


def _table(file: Path, columns: list[str] | None = None) -> pyarrow.Table | None:
    try:
        return pyarrow.parquet.read_table(file, columns=columns)
    except (FileNotFoundError, pyarrow.ArrowInvalid):
        return None  # the run has deleted the file in the meantime, or the file is damaged


def _answer(row: dict[str, Any], kind: str, step: int, run_dir: Path) -> Answer:
    messages = tuple((x["role"], x["content"]) for x in row["prompt"]) or (("user", row["input"]),)
    parts = {name.removeprefix(REWARD): x for name, x in row.items() if name.startswith(REWARD) and x is not None}
    names = ("uid", "data_source", "output", "gts", "score", "response_length", "finish_reason", "policy_version")
    own: dict[str, Any] = {name: row[name] for name in (*names, "timed_out")}
    own["requests"], own["total_requests"] = request_tree(row.get(_REQUESTS))
    images = [f"{FOLDER}/{IMAGES}/{name}" for name in valid_image_names(row.get("images"))[:MAX_IMAGES]]
    # a link could show a file of another folder
    own["images"] = tuple(x for x in images if (run_dir / x).is_file() and not (run_dir / x).is_symlink())
    return Answer(kind=kind, step=step, prompt=messages, parts=parts, **own)


def request_tree(text: str | None) -> tuple[tuple[Request, ...], int]:
    """Returns the first requests of an episode, each after the request that it continues, and the number of all.

    text: json text of the requests. If several requests continue a request, each begins a branch one level deeper.
    Values of a wrong type count as missing. A parent that does not come before its request is ignored, so that there
    are no cycles.
    """
    try:
        found = json.loads(text or "[]")
    except (TypeError, ValueError, RecursionError):
        found = []
    entries = [x if isinstance(x, dict) else {} for x in (found if isinstance(found, list) else [])]
    shown = entries[:MAX_REQUESTS]
    below: dict[int | None, list[int]] = {}
    for number, entry in enumerate(shown):
        parent = _typed(entry, "parent", int, -1)
        below.setdefault(parent if 0 <= parent < number else None, []).append(number)
    limit = MAX_TREE // max(20, sum(1 + len(_typed(x, "messages", list, [])[:MAX_MESSAGES]) for x in shown))
    waiting = [(number, 0, "new conversation") for number in below.get(None, [])[::-1]]
    requests: list[Request] = []
    while waiting:
        number, depth, start = waiting.pop()
        requests.append(_request(number, depth, start, shown[number], limit))
        after = below.get(number, [])
        depth, start = (min(depth + 1, MAX_DEPTH), f"continues #{number}") if len(after) > 1 else (depth, "")
        waiting += [(each, depth, start) for each in after[::-1]]
    return tuple(requests), len(entries)


def _request(number: int, depth: int, start: str, entry: Mapping[str, Any], limit: int) -> Request:
    """Returns a request for display. limit: maximum number of characters of each message."""
    prompt, sampled = (_typed(entry, name, int, 0) for name in ("prompt_tokens", "tokens"))
    versions = [str(x) for x in _typed(entry, "versions", list, []) if type(x) is int and x >= 0]  # -1: no token
    messages, tools = (_typed(entry, name, list, []) for name in ("messages", "tool_calls"))
    row = _typed(entry, "row", int, None)
    weights, calls = " to ".join(dict.fromkeys(versions)), ", ".join(map(as_text, tools))
    facts = [f"{prompt:,} prompt + {sampled:,} sampled tokens", f"weights {weights}" * bool(weights)]
    facts += ["" if row is None else f"row {row}", as_text(entry.get("finish_reason") or "")]
    facts += [f"calls {calls}" * bool(calls)]
    facts += [f"the first {MAX_MESSAGES} of {len(messages)} messages" * (len(messages) > MAX_MESSAGES)]
    reason = as_text(entry.get("discarded") or ("no reason is recorded" if row is None else ""))
    texts = [(x.get("role"), x.get("content")) for x in messages[:MAX_MESSAGES] if isinstance(x, dict)]
    texts += [("answer", entry.get("text"))]
    cut = tuple((as_text(role or "")[:40], shortened(as_text(content or ""), limit)) for role, content in texts)
    facts_text, reason = (shortened(text, MAX_FACTS) for text in (", ".join(filter(None, facts)), reason))
    return Request(number, depth, start, facts_text, reason, cut)


def _typed(entry: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """Returns an entry of this type, else the default."""
    return entry[name] if type(entry.get(name)) is kind else default
