"""The data of the report page as json values of bounded size: charts, findings, configurations and samples.

Input are `RecordedRun`s, and for a sweep its study. Curves of long runs are thinned out, samples are selected evenly
over the steps, and long texts are cut. The page shows `notes` about what was left out. `page_charts.py` makes the
charts.
"""

from __future__ import annotations

import base64
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import overload

from trainer.observe.console import format_seconds
from trainer.observe.health import findings_of
from trainer.observe.health_checks import BAD, LOOK, Finding
from trainer.observe.metric_docs import find
from trainer.observe.page_charts import (
    COLORS,
    MAX_TEXT,
    Json,
    charts_of,
    compact,
    compared_metrics,
    panels_of,
    without_tags,
)
from trainer.observe.recorded_answers import Messages, RecordedAnswer, RecordedGroup, groups
from trainer.observe.run_data import RecordedRun, run_titles

MAX_POINTS = 1500  # of a curve
MAX_PICTURE_BYTES = 1_500_000
SAMPLE_BYTES = IMAGE_BYTES = 5_000_000  # of all runs together
PUBLIC_SAMPLE_BYTES = 150_000
MAX_SAMPLES = 8000
_FOLDERS = re.compile(r"(?<![\w/:.…])~?/(?:[^\s/,;:'\"()\[\]{}=]+/)+")
"""The folders of an absolute path. A path within a URL or after another folder does not match."""
_ANSWER_FIELDS = [field.name for field in fields(RecordedAnswer)]


def page_data(runs: Sequence[RecordedRun], study: Json | None = None, sample_bytes: int = SAMPLE_BYTES) -> Json:
    """Returns all data of the page.

    Args:
        runs: Runs to show or to compare.
        study: Result of `trainer.sweeps.study_page.read_study` if these are the best runs of a sweep, else None.
        sample_bytes: Approximate limit for the texts of all samples, in bytes.
    """
    samples = _SampleRows()
    run_entries: list[Json] = []
    # the runs share the limits equally, so that a comparison shows samples of all of them
    run_count = len(runs)
    most_bytes = sample_bytes // run_count
    most_samples = MAX_SAMPLES // run_count
    for run, title in zip(runs, run_titles(runs), strict=True):
        total_answers, answers = _samples(run.folder, most_bytes, most_samples)
        images, total_images = _images(run.folder, answers, IMAGE_BYTES // run_count)
        samples.add(len(run_entries), answers)

        notes = _notes_on_samples(run, len(answers), total_answers, len(images), total_images)
        entry = _run(run, title, notes)
        entry["images"] = images
        run_entries.append(entry)

    logged_metrics: dict[str, None] = {}  # in order of first appearance
    for entry in run_entries:
        logged_metrics |= dict.fromkeys(entry["series"])
    metric_names = list(logged_metrics)
    panels = panels_of(metric_names)

    return {
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "colors": COLORS,
        "runs": run_entries,
        "study": study,
        "metrics": metric_names,
        "docs": _docs(metric_names),
        "charts": charts_of(runs, run_entries, panels),
        "compared": compared_metrics(metric_names, panels),
        "prompts": samples.prompts(),
        "fields": ["run", *_ANSWER_FIELDS],
        "samples": samples.rows,
    }


class _SampleRows:
    """The samples of the page as rows: the number of the run, and the fields of a `RecordedAnswer`.

    A row names its prompt by number, because the answers of a group share it.
    """

    def __init__(self) -> None:
        self.rows: list[list[object]] = []
        self._prompt_numbers: dict[Messages, int] = {}

    def add(self, run_number: int, answers: Iterable[RecordedAnswer]) -> None:
        """Adds the answers of a run."""
        for answer in answers:
            next_number = len(self._prompt_numbers)
            values = asdict(answer)
            values["prompt"] = self._prompt_numbers.setdefault(answer.prompt, next_number)
            # in the order of `fields`, which the page's script reads
            row: list[object] = [run_number]
            for name in _ANSWER_FIELDS:
                row.append(compact(values[name]))
            self.rows.append(row)

    def prompts(self) -> list[object]:
        """Returns the prompts by their number, each as a list of role and content."""
        prompts: list[object] = []
        for prompt in self._prompt_numbers:
            messages = [[role, compact(content)] for role, content in prompt]
            prompts.append(messages)
        return prompts


def _notes_on_samples(run: RecordedRun, answers: int, total_answers: int, images: int, total_images: int) -> list[str]:
    """Returns sentences about the samples and images that the page leaves out.

    Args:
        run: The run.
        answers, images: Numbers of those on the page.
        total_answers, total_images: Numbers of all.
    """
    notes = []
    if answers < total_answers:
        folder = run.folder / "samples"
        notes.append(
            f"{answers:,} of {total_answers:,} samples are on this page (for each step the best, the worst, and "
            f"repeated prompts); all are in {folder}"
        )
    if images < total_images:
        notes.append(f"{images:,} of {total_images:,} images of these samples are on this page")
    return notes


def _docs(metric_names: Sequence[str]) -> dict[str, Json]:
    """Returns the explanations of trainer/METRICS.md by metric. A user's own metrics have none."""
    docs = {}
    for name in metric_names:
        doc = find(name)
        if doc is not None:
            docs[name] = {
                "formula": doc.formula,
                "unit": doc.unit,
                "healthy": doc.healthy,
            }
    return docs


def _run(run: RecordedRun, title: str, notes: list[str]) -> Json:
    """Returns the page's entry of a run.

    Args:
        run: The run.
        title: Its title on the page.
        notes: Sentences about the samples that the page leaves out.
    """
    steps = list(run.steps)
    stride = math.ceil(len(steps) / MAX_POINTS)
    if stride > 1:
        # the last step is always drawn, because the facts name it
        steps = [*steps[:-1:stride], run.last_step]
        notes = [f"the curves show one in {stride} steps, and the last step", *notes]

    series = {}
    for name, points in run.series().items():
        series[name] = _series_values(dict(points), steps)
    config = {}
    for key, option in run.config.items():
        config[key] = [option.value, option.source]
    findings = findings_of(run)
    return {
        "title": without_tags(title),
        "folder": str(run.folder),
        "facts": _facts(run, findings),
        "notes": [*run.notes, *notes],
        "steps": steps,
        "series": series,
        "findings": [asdict(finding) for finding in findings],
        "config": config,
        "pictures": _pictures(run.folder),
    }


def _facts(run: RecordedRun, findings: Sequence[Finding]) -> dict[str, str]:
    """Returns the rows of the table about a run."""
    steps_text = str(run.last_step)
    if run.total_steps is not None:
        steps_text += f" of {run.total_steps}"
    grade_counts = Counter(finding.grade for finding in findings)
    grade_texts = []
    for grade in (BAD, LOOK):
        if grade_counts[grade]:
            grade_texts.append(f"{grade_counts[grade]} {grade}")

    modified = time.localtime(run.modified)
    return {
        "State": run.state,
        "Steps": steps_text,
        "Time in steps": format_seconds(run.seconds()),
        "Last written": time.strftime("%Y-%m-%d %H:%M", modified),
        "Findings": ", ".join(grade_texts) or "all ok",
    }


def _pictures(run_dir: Path) -> list[Json]:
    """Returns the pictures of images before and after training. A picture that is too large for a page is left out."""
    pictures = []
    for kind in ("png", "gif"):
        file = run_dir / f"before_after.{kind}"
        if file.is_file() and file.stat().st_size <= MAX_PICTURE_BYTES:
            uri = _data_uri(file, kind)
            pictures.append({"name": file.name, "src": uri})
    return pictures


def _data_uri(file: Path, kind: str) -> str:
    """Returns a file as a URI that contains it, so that the page is a single file."""
    encoded = base64.b64encode(file.read_bytes()).decode()
    return f"data:image/{kind};base64,{encoded}"


def _series_values(value_by_step: Mapping[int, float], steps: Sequence[int]) -> list[object]:
    """Returns a metric's values as the page reads them.

    The result is [values] with one value or None for each of `steps`, or [steps, values] for a metric that is logged
    at few steps, which is never thinned out.
    """
    # with fewer values than gaps, the steps of the values take less room than a None for each gap
    if len(value_by_step) <= len(steps) // 2:
        logged_steps = list(value_by_step)
        logged_values = list(value_by_step.values())
        return [logged_steps, compact(logged_values)]
    values = [value_by_step.get(step) for step in steps]
    return [compact(values)]


@overload
def without_folders(value: str, folders: Sequence[str] = ()) -> str: ...
@overload
def without_folders(value: object, folders: Sequence[str] = ()) -> object: ...
def without_folders(value: object, folders: Sequence[str] = ()) -> object:
    """Replaces each absolute path by `…/` and its last part in all texts of a JSON-compatible value.

    Args:
        value: A text, or lists and dicts of texts. Other values are returned as they are.
        folders: Folders that are replaced as a whole, because their names can contain spaces; longest first.
    """
    if isinstance(value, str):
        for folder in folders:
            value = value.replace(f"{folder}/", "…/")
        return _FOLDERS.sub("…/", value)
    if isinstance(value, list):
        return [without_folders(entry, folders) for entry in value]
    if isinstance(value, dict):
        return {key: without_folders(entry, folders) for key, entry in value.items()}
    return value


def known_folders(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns the folders that contain the runs and the paths in their options, and the home folder; longest first."""
    folders = {str(Path.home())}
    for run in runs:
        run_dir = run.folder.absolute()
        folders.add(str(run_dir.parent))
        for option in run.config.values():
            if option.value.startswith("/"):
                path = Path(option.value)
                folders.add(str(path.parent))
    # every path begins with this one
    folders.discard("/")
    # a folder within another one must be replaced before it
    return sorted(folders, key=len, reverse=True)


def _samples(run_dir: Path, most_bytes: int, most_rows: int) -> tuple[int, list[RecordedAnswer]]:
    """Selects the samples of a run for the page, evenly over the steps.

    Args:
        run_dir: The run folder.
        most_bytes: Limit for the texts of the samples. The trees of requests have a second limit of this size, and a
            tree that exceeds it is left out.
        most_rows: Limit for the number of samples.

    Returns:
        The number of all samples of the run, and the selected ones.
    """
    all_groups = list(groups(run_dir))
    total = sum(len(group.uids) for group in all_groups)
    if not all_groups:
        return 0, []
    # each step that is read has room for 2 rows, the best and the worst
    most_steps = max(1, most_rows // 2)
    stride = math.ceil(len(all_groups) / most_steps)
    # a step that is read also has the room of the steps that are left out after it
    bytes_of_step = stride * most_bytes // len(all_groups)
    rows_of_step = max(2, stride * most_rows // len(all_groups))

    answers: list[RecordedAnswer] = []
    # room that a step does not use is left to the next steps, because a tree may need more than that of a step
    tree_room = 0
    for group in all_groups[::stride]:
        text_room = bytes_of_step
        tree_room += bytes_of_step
        rows = _rows_by_interest(group)[:rows_of_step]
        for rank, answer in enumerate(group.read(rows)):
            text_room -= _size_on_page(answer)
            # the best and the worst are shown even if they are long
            if text_room < 0 and rank >= 2:
                break
            tree_size = len(str(answer.requests))
            if tree_size <= tree_room:
                tree_room -= tree_size
            else:
                answer = replace(answer, requests=())
            answers.append(answer)
    return total, answers


def _size_on_page(answer: RecordedAnswer) -> int:
    """Estimates the bytes of an answer on the page, without its tree. All other fields together count as 120."""
    _, last_message = answer.prompt[-1]
    size = 120
    for text in (answer.output, last_message):
        size += len(text[:MAX_TEXT].encode())
    return size


def _rows_by_interest(group: RecordedGroup) -> list[int]:
    """Returns all rows of a group: the best, the worst and a failed sample, then the others by prompt."""
    scored_rows: list[tuple[float, int]] = []
    failed_rows: list[int] = []
    for row, score in enumerate(group.scores):
        if score is None or math.isnan(score):
            failed_rows.append(row)
        else:
            scored_rows.append((score, row))

    rows = []
    if scored_rows:
        _, best_row = max(scored_rows)
        _, worst_row = min(scored_rows)
        rows += [best_row, worst_row]
    rows += failed_rows[:1]

    # the order by checksum is the same in all steps, so that the page shows the same prompts over the training
    checksums = [zlib.crc32(uid.encode()) for uid in group.uids]
    rows_by_prompt = sorted(range(len(checksums)), key=checksums.__getitem__)
    rows += rows_by_prompt
    # a row is already in the list if it is the best, the worst or the failed one
    return list(dict.fromkeys(rows))


def _images(run_dir: Path, answers: Sequence[RecordedAnswer], room: int) -> tuple[dict[str, str], int]:
    """Returns the data URIs of images by path, and the number of all images of the answers.

    Args:
        run_dir: The run folder.
        answers: The answers on the page.
        room: Limit for all URIs together, in bytes. Images that many answers have in common are taken first.
    """
    counts: Counter[str] = Counter()
    for answer in answers:
        counts.update(answer.images)
    # names are digests, so ties mix the steps
    paths = sorted(counts, key=lambda path: (-counts[path], path))

    uri_by_path = {}
    for path in paths:
        # the run has deleted the file in the meantime
        with suppress(FileNotFoundError):
            file = run_dir / path
            # base64 writes 4 characters for 3 bytes
            encoded_size = file.stat().st_size * 4 // 3
            if encoded_size <= room:
                uri_by_path[path] = _data_uri(file, "jpeg")
                room -= encoded_size
    return uri_by_path, len(counts)
