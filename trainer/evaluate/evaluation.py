"""Evaluation of policies: answers to the validation prompts with scores, their metrics, and a table of several."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.checkpoint.files import write_atomically
from trainer.evaluate.answering import CHUNKS, FOLDER, AnsweringTrainer, answer_settings, answering_config
from trainer.evaluate.targets import Target, find_targets, titles
from trainer.launch.ppo_job import run_ppo
from trainer.observe.console import Console
from trainer.observe.final_report import FitResult, validation_table
from trainer.observe.tracking import read_metrics
from trainer.validation.stored_answers import read_settings
from verl_lite.errors import UserError

RESULTS = "results.json"


def evaluate_all(names: Sequence[str], options: list[str], *, all_checkpoints: bool) -> int:
    """Validates all targets that the names denote, and prints a table if there are several.

    Args:
        names: see `find_targets`.
        options: the user's options.
        all_checkpoints: see `find_targets`.

    Returns:
        The exit status: that of the first run that fails, after which no other target is validated.
    """
    targets = []
    for name in names:
        targets += find_targets(name, all_checkpoints=all_checkpoints)
    folder_options = [option for option in options if option.startswith(FOLDER)]
    if folder_options and len(targets) > 1:
        raise UserError(
            f"{folder_options[-1]}: each of the {len(targets)} targets gets its own folder; remove this option"
        )

    evaluations: dict[str, dict[str, float]] = {}
    titles_of_targets = titles(targets)
    for target, title in zip(targets, titles_of_targets, strict=True):
        status, metrics = evaluate(target, options)
        # models and checkpoints before it have stored results, which the next command shows at once; agents have not
        if status:
            return status
        evaluations[title] = metrics
    if len(targets) > 1:
        Console().print(validation_table(evaluations))
    return 0


def evaluate(target: Target, overrides: list[str]) -> tuple[int, dict[str, float]]:
    """Validates one target, or shows the result of an earlier call with the same settings.

    An agentic evaluation stores no episodes, so the same command runs them again in a new folder.

    Args:
        target: the policy.
        overrides: the user's options.

    Returns:
        The exit status, and the metrics if it is 0.

    Raises:
        UserError: if there is nothing to validate.
    """
    arguments = eval_arguments(target, overrides)
    config = answering_config(arguments)
    if config is None:
        return run_ppo(arguments), {}
    if config.is_agentic:
        start_time = time.strftime("%Y%m%d-%H%M%S")
        folder = _folder_of(target, start_time, overrides)
        return _evaluate_agent([*arguments, f"{FOLDER}{folder}"], folder)

    # the folder is named after the settings, so that the same command finds it again and others do not
    settings = answer_settings(config)
    settings_text = json.dumps(settings, sort_keys=True)
    digest = hashlib.sha256(settings_text.encode()).hexdigest()
    folder = _folder_of(target, digest[:8], overrides)
    arguments.append(f"{FOLDER}{folder}")
    earlier_metrics = finished_metrics(folder, settings)
    if earlier_metrics is not None:
        console = Console()
        console.note(f"{target.name} was evaluated before under the same settings: {folder}")
        console.print(validation_table({"mean": earlier_metrics}))
        return 0, earlier_metrics

    # continues a folder that already has answers; Evaluation loads no weights from it
    if target.is_model:
        arguments.append("trainer.resume_mode=auto")
    status = run_ppo(arguments, trainer_class=Evaluation)
    if status:
        return status, {}
    return 0, _read_results(folder)


def eval_arguments(target: Target, overrides: list[str]) -> list[str]:
    """Returns the command line of the run that validates `target`. Raises UserError without validation data."""
    # a run has the data of its configuration
    needs_data = target.is_model
    for item in overrides:
        if item.startswith(("data.val_files=", "agentic.", "--config", "recipe=")):
            needs_data = False
    if needs_data:
        raise UserError(
            f"{target.name} is a model: name what to validate on, data.val_files=PATH, or the environments: "
            "--config FILE or recipe=NAME"
        )
    return [*target.arguments, "trainer.experiment_name=eval", *overrides]


def finished_metrics(run_dir: Path, settings: Mapping[str, object]) -> dict[str, float] | None:
    """Returns the metrics of a finished evaluation with these settings in the folder, or None without one."""
    if not (run_dir / RESULTS).exists():
        return None
    # the results alone do not tell under which settings the answers were generated
    if read_settings(run_dir / CHUNKS) != settings:
        return None
    return _read_results(run_dir)


def _folder_of(target: Target, name: str, overrides: Sequence[str]) -> Path:
    """Returns the run folder of an evaluation: that of the user's options, else TARGET-NAME in the target's folder."""
    # the last option counts, as everywhere on a command line
    for item in reversed(overrides):
        if item.startswith(FOLDER):
            return Path(item.removeprefix(FOLDER)).expanduser()
    return target.folder / f"{target.name}-{name}"


def _evaluate_agent(arguments: list[str], folder: Path) -> tuple[int, dict[str, float]]:
    """Runs the episodes of an agent. Returns the exit status and the metrics of the only step."""
    status = run_ppo(arguments)
    if status:
        return status, {}
    metrics_by_step = read_metrics(folder / "metrics.jsonl")
    if not metrics_by_step:
        return 0, {}
    last_step = max(metrics_by_step)
    return 0, metrics_by_step[last_step]


def _read_results(run_dir: Path) -> dict[str, float]:
    """Returns the metrics in results.json."""
    text = (run_dir / RESULTS).read_text(encoding="utf-8")
    return json.loads(text)["metrics"]


class Evaluation(AnsweringTrainer):
    """A run that validates once. It continues an interrupted evaluation in the same folder."""

    def fit(self) -> FitResult:
        """Validates, and writes the step of the weights and all metrics to results.json."""
        result = super().fit()
        # the only validation is the one before the training, which does not follow
        results = {"step": self.steps.global_step, "metrics": result.before}
        # default: numbers of NumPy, which json cannot write
        text = json.dumps(results, indent=1, default=float)
        # atomically, because the file also tells that the evaluation is complete
        write_atomically(self.run_dir / RESULTS, text)
        return result
