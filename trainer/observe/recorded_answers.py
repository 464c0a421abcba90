"""Reads the samples of a run folder (`trainer.validation.sample_files`) for display.

Samples are read lazily: first their scores, then only the requested rows. A run without text samples (reward flow) has
none. The files may come from another user: values of a wrong type count as missing, and texts and trees are cut.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow
import pyarrow.parquet

from trainer.observe.final_report import shortened
from trainer.validation.sample import valid_image_names
from trainer.validation.sample_files import FOLDER, IMAGES, JSON, REWARD, TRAIN, VAL, as_text, step_of
from verl_lite.json_types import JsonObject

Kind = TypeVar("Kind")
Default = TypeVar("Default")
Messages = tuple[tuple[str, str], ...]
"""(role, content) of each message of a conversation."""

# limits of an episode's tree
MAX_REQUESTS = 200
MAX_MESSAGES = 50  # of a request
MAX_DEPTH = 8
MAX_FACTS = 300  # characters of a request's facts
MAX_TREE = 60_000  # characters of all messages
MAX_IMAGES = 50  # of a prompt

_REQUESTS = f"requests{JSON}"


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
    """The samples of one step and kind.

    Attributes:
        file: The file of the samples.
        kind: `train`, `val` or `val greedy`.
        step: The training step.
        uids: Identifier of the prompt of each row.
        scores: Score of each row; None if the reward failed.
    """

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

        # of the columns with json text, only the requests are shown
        columns = []
        for name in table.column_names:
            if name == _REQUESTS or not name.endswith(JSON):
                columns.append(name)
        selected = table.select(columns).take(list(rows))
        run_dir = self.file.parent.parent.parent
        answers = []
        for row in selected.to_pylist():
            answers.append(_answer(row, self.kind, self.step, run_dir))
        return answers


def groups(run_dir: Path) -> Iterator[RecordedGroup]:
    """Yields all groups of samples of a run in the order of steps, training before validation."""
    files = []
    for split in (TRAIN, VAL):
        folder = run_dir / FOLDER / split
        for file in folder.glob("*.parquet"):
            files.append((step_of(file), split, file))

    for step, split, file in sorted(files):
        # the texts, which are much larger, are read only for the chosen rows
        table = _table(file, ["uid", "score"])
        if table is None:
            continue
        suffix = file.stem.partition("-")[2]  # `greedy`, or empty
        kind = f"{split} {suffix}".strip()
        uids = table["uid"].to_pylist()
        scores = table["score"].to_pylist()
        yield RecordedGroup(file, kind, step, uids, scores)


def chosen(folder: Path, order: str, text: str, count: int) -> tuple[list[RecordedAnswer], int]:
    """Returns up to `count` answers, and the number of all answers that match.

    Args:
        folder: The run folder.
        order: `best`, `worst` (failed rewards first), or any other text for the latest first.
        text: Required part of the prompt, answer, ground truth or uid; upper and lower case are equal.
        count: Maximum number of answers.
    """
    word = text.lower()
    matches: list[_Match] = []
    for group in groups(folder):
        for row in _matching_rows(group, word):
            rank = _rank(group.scores[row], order)
            match = _Match(rank, -group.step, row, group)
            matches.append(match)

    # a group has no order, and the sort keeps the order of groups with the same step
    matches.sort(key=lambda match: match[:3])
    answers: list[RecordedAnswer] = []
    for match in matches[:count]:
        answers += match.group.read([match.row])
    return answers, len(matches)


class _Match(NamedTuple):
    """An answer that matches, with its sort keys: the rank by score, then the latest step, then the row."""

    rank: float
    negative_step: int
    row: int
    group: RecordedGroup


def _rank(score: float | None, order: str) -> float:
    """Returns the first sort key of an answer; a failed reward counts as the lowest score."""
    if order not in ("best", "worst"):
        return 0.0
    # NaN, which other programs write for a failed reward, has no place in an order
    if score is None or math.isnan(score):
        score = -math.inf
    return -score if order == "best" else score


def _matching_rows(group: RecordedGroup, word: str) -> Sequence[int]:
    """Returns the rows whose texts contain a word in lower case. Without a word, the file is not read."""
    all_rows = range(len(group.uids))
    if not word:
        return all_rows

    rows = []
    for row, answer in enumerate(group.read(all_rows)):
        texts = [answer.output, answer.gts, answer.uid]
        for _, content in answer.prompt:
            texts.append(content)
        # joined by a line break, so that no match spans two of them
        searched = "\n".join(texts).lower()
        if word in searched:
            rows.append(row)
    return rows


def _table(file: Path, columns: list[str] | None = None) -> pyarrow.Table | None:
    try:
        return pyarrow.parquet.read_table(file, columns=columns)
    except (FileNotFoundError, pyarrow.ArrowInvalid):
        # the run has deleted the file in the meantime, to keep the folder below its limit, or the file is damaged
        return None


def _answer(row: JsonObject, kind: str, step: int, run_dir: Path) -> RecordedAnswer:
    """Returns a row of a samples file as an answer for display."""
    prompt = []
    for message in row["prompt"]:
        prompt.append((message["role"], message["content"]))
    # a sample can lack the messages; it always has the text of the last one
    if not prompt:
        prompt = [("user", row["input"])]
    parts = {}
    for name, value in row.items():
        if name.startswith(REWARD) and value is not None:
            parts[name.removeprefix(REWARD)] = value
    requests, total_requests = request_tree(row.get(_REQUESTS))

    images = []
    for name in valid_image_names(row.get("images"))[:MAX_IMAGES]:
        image = f"{FOLDER}/{IMAGES}/{name}"
        file = run_dir / image
        # a link could show a file of another folder
        if file.is_file() and not file.is_symlink():
            images.append(image)

    return RecordedAnswer(
        kind=kind,
        step=step,
        uid=row["uid"],
        data_source=row["data_source"],
        prompt=tuple(prompt),
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
    entries, total = _request_entries(text)
    message_count = 0
    roots: list[int] = []
    children: list[list[int]] = []
    for number, entry in enumerate(entries):
        children.append([])
        parent = _typed(entry, "parent", int, -1)
        if 0 <= parent < number:
            children[parent].append(number)
        else:
            roots.append(number)
        messages = _typed(entry, "messages", list, [])
        # the answer is one more
        message_count += len(messages[:MAX_MESSAGES]) + 1
    # at least 20 messages share the limit, so that an episode of one request does not use all of it
    most_characters = MAX_TREE // max(20, message_count)

    # depth first, without recursion, because a conversation can be longer than Python's stack
    requests: list[RecordedRequest] = []
    waiting: list[tuple[int, int, str]] = []
    for root in reversed(roots):
        waiting.append((root, 0, "new conversation"))
    while waiting:
        number, depth, start = waiting.pop()
        request = _request(number, depth, start, entries[number], most_characters)
        requests.append(request)
        child_depth = depth
        child_start = ""
        if len(children[number]) > 1:
            child_depth = min(depth + 1, MAX_DEPTH)
            child_start = f"continues #{number}"
        # reversed, because the last entry is taken first
        for child in reversed(children[number]):
            waiting.append((child, child_depth, child_start))
    return tuple(requests), total


def _request_entries(text: str | None) -> tuple[list[Mapping[str, object]], int]:
    """Returns the first `MAX_REQUESTS` requests in a json text, and the number of all."""
    try:
        values = json.loads(text or "[]")
    except (TypeError, ValueError, RecursionError):
        return [], 0
    if not isinstance(values, list):
        return [], 0

    entries: list[Mapping[str, object]] = []
    for value in values[:MAX_REQUESTS]:
        # an empty entry keeps the numbers of the others, which name their parents
        entries.append(value if isinstance(value, dict) else {})
    return entries, len(values)


def _request(number: int, depth: int, start: str, entry: Mapping[str, object], most_characters: int) -> RecordedRequest:
    """Returns a request for display.

    Args:
        number, depth, start: See `RecordedRequest`.
        entry: The request in the samples file.
        most_characters: Maximum number of characters of each message.
    """
    messages = _typed(entry, "messages", list, [])
    row = _typed(entry, "row", int, None)
    discarded = as_text(entry.get("discarded") or "")
    if not discarded and row is None:
        discarded = "no reason is recorded"
    facts = _request_facts(entry, messages, row)

    short_messages = []
    for message in messages[:MAX_MESSAGES]:
        if isinstance(message, dict):
            role = message.get("role")
            content = message.get("content")
            short_messages.append(_short_message(role, content, most_characters))
    answer = _short_message("answer", entry.get("text"), most_characters)
    short_messages.append(answer)

    return RecordedRequest(
        number=number,
        depth=depth,
        start=start,
        facts=shortened(facts, MAX_FACTS),
        discarded=shortened(discarded, MAX_FACTS),
        messages=tuple(short_messages),
    )


def _short_message(role: object, content: object, most_characters: int) -> tuple[str, str]:
    """Returns role and content of a message as text, and cut."""
    role_text = as_text(role or "")
    content_text = as_text(content or "")
    return role_text[:40], shortened(content_text, most_characters)


def _request_facts(entry: Mapping[str, object], messages: Sequence[object], row: int | None) -> str:
    """Returns one line about a request: tokens, versions of the weights, row, reason of the end, and tools."""
    prompt_tokens = _typed(entry, "prompt_tokens", int, 0)
    sampled_tokens = _typed(entry, "tokens", int, 0)
    facts = [f"{prompt_tokens:,} prompt + {sampled_tokens:,} sampled tokens"]

    versions = _versions(entry)
    if versions:
        facts.append(f"weights {' to '.join(versions)}")
    if row is not None:
        facts.append(f"row {row}")
    finish_reason = as_text(entry.get("finish_reason") or "")
    if finish_reason:
        facts.append(finish_reason)

    tool_calls = _typed(entry, "tool_calls", list, [])
    tool_names = ", ".join(map(as_text, tool_calls))
    if tool_names:
        facts.append(f"calls {tool_names}")
    if len(messages) > MAX_MESSAGES:
        facts.append(f"the first {MAX_MESSAGES} of {len(messages)} messages")
    return ", ".join(facts)


def _versions(entry: Mapping[str, object]) -> list[str]:
    """Returns the distinct versions of the weights that sampled the tokens of a request, as text."""
    versions: list[str] = []
    for version in _typed(entry, "versions", list, []):
        # -1: no token
        is_version = type(version) is int and version >= 0
        if is_version and str(version) not in versions:
            versions.append(str(version))
    return versions


def _typed(entry: Mapping[str, object], name: str, kind: type[Kind], default: Default) -> Kind | Default:
    """Returns an entry of this type, else the default. A bool does not count as an int."""
    value = entry.get(name)
    # `isinstance` is for the type checker; alone it would accept True as an int
    if isinstance(value, kind) and type(value) is kind:
        return value
    return default
