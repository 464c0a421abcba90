"""Saved answers of `trainer.score`: files of a run, of `trainer.main_generate`, or of another program.

A row was written by `trainer.validation.sample_files` or `trainer.main_generate`, or has an answer (`output`,
`response`, or a list `responses`), a `data_source`, and a ground truth (`ground_truth`, `reward_model` with that entry,
or `gts`). Optional entries are prompt, extra_info, uid, step, score and images.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.data.sources import Row, parse_json, read_json_text, read_rows
from trainer.validation.sample import valid_image_names
from trainer.validation.sample_files import FOLDER, IMAGES, TRAIN, VAL, decoded_columns
from verl_lite.config import PPOConfig, ScoreConfig
from verl_lite.errors import UserError
from verl_lite.rewards import RewardItem

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class SavedAnswer:
    """A saved answer.

    Attributes:
        item: Input of the reward function; its key is the index of the answer. Its images are the copies in
            samples/images of the run, of at most 512 x 512 pixels, or none if one was deleted.
        uid: Identifier of the prompt.
        step: Training step that sampled the answer, if it is saved.
        score: The saved score; None if there is none or the reward failed.
    """

    item: RewardItem
    uid: str
    step: int | None
    score: float | None


def read_saved(target: Path, run: PPOConfig | None, config: ScoreConfig) -> list[SavedAnswer]:
    """Reads the saved answers of a file, a folder of files or a run folder.

    Args:
        target: the file or folder.
        run: configuration of the run, if `target` is a run folder.
        config: options of the command.

    Raises:
        UserError: for unreadable files, and for rows without answer or data_source; the message names the row.
    """
    answers: list[SavedAnswer] = []
    for file in _files(target, run):
        # samples/images next to samples/train and samples/val; absent for other files
        images = file.parent.parent / IMAGES
        for number, row in enumerate(_rows(file)):
            answers += _answers_of_row(row, len(answers), f"row {number} of {file}", config, images)
    if not answers:
        raise UserError(f"{target} contains no answers")
    return answers


def _files(target: Path, run: PPOConfig | None) -> list[Path]:
    """Returns the files to read. Files that are named by step are in the order of steps."""
    if target.is_file() and target.suffix in SUFFIXES:
        return [target]

    folders = [target]
    if run is not None:
        folders = _folders_of_run(target, run)
    for folder in folders:
        files = []
        for file in folder.glob("*"):
            # without earlier results of this command
            if file.suffix in SUFFIXES and "-scored-" not in file.name:
                files.append(file)
        if files:
            return sorted(files, key=_step_and_name)
    raise UserError(
        f"{target} contains no saved answers: give a .jsonl or .parquet file, a folder of them, or a run folder (a run "
        "keeps its answers unless trainer.samples_max_mb=0 and no trainer.rollout_data_dir=FOLDER is set)"
    )


def _folders_of_run(run_dir: Path, run: PPOConfig) -> list[Path]:
    """Returns the folders in which a run saves answers, of which the first with files is read."""
    folders = []
    # the jsonl folders keep all steps and come before the samples, which are thinned
    for folder in (run.trainer.rollout_data_dir, run.trainer.validation_data_dir):
        if folder:
            folders.append(Path(folder).expanduser())
    samples = run_dir / FOLDER
    return [*folders, samples / TRAIN, samples / VAL]


def _step_and_name(file: Path) -> tuple[int, str]:
    """Returns the key by which files are sorted: by number, so that 10 comes after 9."""
    # files without a number come first
    step = -1
    if file.stem.isdecimal():
        step = int(file.stem)
    return step, file.name


def _rows(file: Path) -> Iterator[Row]:
    """Yields the rows of a file."""
    rows: Iterator[object] = _json_lines(file)
    if file.suffix == ".parquet":
        rows = iter(read_rows(str(file), "RUN_OR_FILE"))
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"row {index} of {file}: found {row!r:.100}, expected an object with named entries")
        yield decoded_columns(row)


def _json_lines(file: Path) -> Iterator[object]:
    """Yields the values in the lines of a file, without an incomplete last line, which a killed run can leave."""
    lines = read_json_text(file, str(file)).split("\n")
    if not lines[-1].strip().endswith("}"):
        lines.pop()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield parse_json(line, f"{file}, line {number}", "an answer per line")


def _answers_of_row(row: Row, key: int, where: str, config: ScoreConfig, images: Path) -> list[SavedAnswer]:
    """Returns the answers of a row.

    Args:
        row: the entries of the row.
        key: key of the row's first answer.
        where: the place of the row, for messages.
        config: options of the command.
        images: folder of the run's images.
    """
    # verl's main_generation writes a list of answers to one prompt
    answer = None
    for name in ("response", "output", "responses"):
        if answer is None:
            answer = row.get(name)
    texts = answer if isinstance(answer, list) else [answer]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{where} has no answer: expected a text `response` (or `output`), or a list of texts `responses`; its "
            f"entries are {', '.join(row)}"
        )

    scored_row = _scored_row(row, where, config)
    encoded_images = _encoded_images(row, images)

    # another program may use the names of optional entries for something else
    step = row.get("step")
    if not isinstance(step, int):
        step = None
    score = None
    saved_score = row.get("score")
    if isinstance(saved_score, int | float):
        score = float(saved_score)
    uid = str(row.get("uid", where))
    answers = []
    for number, text in enumerate(texts):
        item = RewardItem.of_row(key + number, scored_row, text, encoded_images)
        answers.append(SavedAnswer(item, uid, step, score))
    return answers


def _scored_row(row: Row, where: str, config: ScoreConfig) -> Row:
    """Returns the entries that a reward reads, as in a dataset. Raises UserError for a row without data_source."""
    source = row.get("data_source") or config.data_source
    if not isinstance(source, str):
        raise UserError(f"{where} has no data_source: set data_source=NAME for all rows without one")
    nested_truth = None
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict):
        nested_truth = reward_model.get("ground_truth")
    # `gts` last, because in samples it is only a text for display
    ground_truth = _first_value(row.get("ground_truth"), nested_truth, row.get("gts"))

    # another program may use the names of optional entries for something else
    extra_info = row.get("extra_info")
    if not isinstance(extra_info, dict):
        extra_info = None
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        prompt = None
    return {
        "data_source": source,
        "reward_model": {"ground_truth": ground_truth},
        "extra_info": extra_info,
        "prompt": prompt,
    }


def _encoded_images(row: Row, images: Path) -> list[bytes]:
    """Returns the images of a row; nothing if one of them was deleted."""
    encoded = []
    for name in valid_image_names(row.get("images")):
        file = images / name
        if not file.is_file():
            return []
        encoded.append(file.read_bytes())
    return encoded


def _first_value(*values: object) -> object:
    """Returns the first value that is not None, or None."""
    for value in values:
        if value is not None:
            return value
    return None
