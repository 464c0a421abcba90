"""Targets of `main_eval` and `main_generate`, and trainers that only generate and score answers.

A target (a run, a checkpoint or a model) is translated to the first arguments of a command line: the settings saved
with the run, or only the model, with everything that belongs to training switched off. `Evaluation` validates and
writes results.json; `Generation` writes a file of answers. Both store each chunk of answers in the run folder, so that
an interrupted command can continue without generating an answer twice.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.checkpoint import find_checkpoint, read_state, whole_steps, write_atomically
from trainer.data.prompts import PromptDataset
from trainer.evaluate.chunks import KeptAnswers, ValSampling, claim_folder, content_of, read_settings
from trainer.evaluate.sample import Sample, samples_of
from trainer.evaluate.sample_files import table_of, write_table
from trainer.final_report import FitResult
from trainer.ray_trainer import RayPPOTrainer
from trainer.resume import flat_config, is_bound
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto

RESULTS, CHUNKS = "results.json", "answers"
FOLDER = "trainer.default_local_dir="
MODELS = Path("runs/eval")
"""Parent folder of the results of models that do not belong to a run."""

ONLY_ANSWERS = (
    "trainer.val_only=true",
    "trainer.save_freq=0",
    "data.train_files=[]",
    "~data.sources",
    "~data.sampler",
    "~algorithm.filter_groups",
    "~distillation",
    "~trainer.validation_data_dir",
    "~trainer.rollout_data_dir",
    "~trainer.resume_allow",
    "~trainer.callbacks",
    "~trainer.early_stopping",
)
"""Arguments that switch off training and saving, so that files written by the training stay unchanged."""

_SECTIONS = ("data.", "model.", "rollout.", "reward.", "reward_model.")
_ALSO = ("data.val_files", "data.val_max_samples", "model.tokenizer_path", "rollout.val_kwargs.", "trainer.seed")
_TRAINING = ("data.train_", "data.shuffle", "data.sampler.", "data.sources", "rollout.log_prob_", "reward.overlong_")
_TRAINING_ALONE = tuple(f"rollout.{name}" for name in ("n", "temperature", "top_p", "top_k", "min_p", "ignore_eos"))


@dataclass(frozen=True)
class Target:
    """A policy to evaluate. name: display name, also for folders. path: its folder, or its name on the hub. folder:
    parent folder of its results. arguments: command line of a run that only generates answers with it. is_model: True
    for a model that is not part of a run, and so has no data."""

    name: str
    path: str
    folder: Path
    arguments: tuple[str, ...]
    is_model: bool = False


def find_targets(text: str, *, all_checkpoints: bool = False) -> list[Target]:
    """Returns the policies that `text` names.

    `text` is a run folder (its newest complete checkpoint, or all complete ones), a global_step_N folder, a model
    folder, or the name of a model on the hub. Raises UserError for any other text.
    """
    path = Path(text).expanduser().absolute()
    if (path / "data.pt").exists():
        return [_checkpoint(path)]
    if (path / "config.yaml").exists():
        found = list(islice(whole_steps(path, print), None if all_checkpoints else 1))
        if not found:
            raise UserError(f"{path} is a run without a checkpoint; train it with trainer.save_freq=-1 or above 0")
        return [_checkpoint(folder) for folder in reversed(found)]
    if all_checkpoints:
        raise UserError(f"{path}: --all-checkpoints requires a run folder, but there is no config.yaml in it")
    name, model = path.name, str(path)
    # a name on the hub; the check of the options finds out whether it exists
    if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        name, model = text.replace("/", "--"), text
    elif not (path / "config.json").exists():
        raise UserError(f"{path}: neither a run folder (config.yaml), a checkpoint (data.pt) nor a model (config.json)")
    return [Target(name, model, MODELS.absolute(), (f"model.path={model}", *ONLY_ANSWERS), is_model=True)]


def _checkpoint(path: Path) -> Target:
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    arguments = ("--config", str(path.parent / "config.yaml"), *ONLY_ANSWERS, *resume)
    return Target(path.name, str(path), path.parent / "eval", arguments)


def titles(targets: Sequence[Target]) -> list[str]:
    """Returns a distinct title for each target: its name, or for equal names the differing part of its path."""

    def title(target: Target) -> str:
        same_name = {os.path.abspath(each.path) for each in targets if each.name == target.name}
        return target.name if len(same_name) == 1 else os.path.relpath(target.path, os.path.commonpath(same_name))

    return list(map(title, targets))


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the targets at its beginning and the options after them."""
    count = next((i for i, item in enumerate(argv) if item[0:1] in ("-", "+", "~") or "=" in item), len(argv))
    return list(argv[:count]), list(argv[count:])


def answer_settings(config: PPOConfig, *, are_scored: bool = True) -> dict[str, Any]:
    """Returns everything that the answers depend on, as json values: options by key, and digests of the named files."""

    def is_relevant(name: str) -> bool:
        if name in _TRAINING_ALONE or name.startswith(_TRAINING):
            return False
        if not are_scored and name.startswith(("reward.", "reward_model.")):
            return False
        return name.startswith(_ALSO) or (name.startswith(_SECTIONS) and is_bound(name, config))

    settings = {name: value for name, value in flat_config(config).items() if is_relevant(name)}
    files = dict.fromkeys(config.data.val_files)
    if are_scored:
        functions = (entry.get("path") for entry in config.reward.functions.values() if isinstance(entry, Mapping))
        paths = (config.reward.custom_reward_function.path, *functions)
        files |= dict.fromkeys(path for path in paths if path and not path.startswith("pkg://"))
    settings |= {f"content of {path}": content_of(path) for path in files}
    checkpoint = _checkpoint_of(config)
    if checkpoint is not None:
        settings |= {"checkpoint": str(checkpoint), "content of the checkpoint": content_of(checkpoint)}
    else:
        settings["content of model.path"] = content_of(config.model.path or "")
    return json.loads(json.dumps(settings, default=str))


def _checkpoint_of(config: PPOConfig) -> Path | None:
    """Returns the checkpoint folder trainer.resume_from_path, or None unless trainer.resume_mode=resume_path."""
    if config.trainer.resume_mode != "resume_path":
        return None
    return find_checkpoint(Path(), "resume_path", config.trainer.resume_from_path)


class AnsweringTrainer(RayPPOTrainer):
    """A trainer that only generates answers with one policy, and stores them in the run folder."""

    trains = False

    @classmethod
    def check_folder(cls, config: PPOConfig, data: PromptDataset | None, run_dir: Path) -> None:
        """Raises UserError if the folder contains answers generated with other settings."""
        claim_folder(run_dir / CHUNKS, answer_settings(config, are_scored=cls.scores))

    def kept_answers(self) -> KeptAnswers:
        """Returns the store of answers in the run folder."""
        return KeptAnswers(self.run_dir / CHUNKS)

    def resume(self) -> None:
        """Loads the policy and the step of the checkpoint trainer.resume_from_path, if it is set.

        The state of the training is not loaded, so its data need not exist.
        """
        folder = _checkpoint_of(self.config)
        if folder is not None:
            self.saver.learners["actor"].load(str(folder / "actor"))
            self.steps.global_step = read_state(folder)["steps"]["global_step"]

    def generate_for_validation(self, prompts: DataProto, sampling: ValSampling) -> DataProto:
        """Generates the answers to one chunk of prompts, or raises KeyboardInterrupt if the run was asked to stop."""
        if self.steps.stop_asked:  # earlier chunks are stored, so stopping between chunks loses nothing
            raise KeyboardInterrupt
        return super().generate_for_validation(prompts, sampling)


class Evaluation(AnsweringTrainer):
    """A run that validates once. It continues an interrupted evaluation in the same folder."""

    def fit(self) -> FitResult:
        """Validates, and writes the step of the weights and all metrics to results.json."""
        result = super().fit()
        results = {"step": self.steps.global_step, "metrics": result.before}
        write_atomically(self.run_dir / RESULTS, json.dumps(results, indent=1, default=float))
        return result


def finished_metrics(run_dir: Path, settings: Mapping[str, Any]) -> dict[str, float] | None:
    """Returns the metrics of a finished evaluation with these settings in the folder, or None without one."""
    if read_settings(run_dir / CHUNKS) != settings or not (run_dir / RESULTS).exists():
        return None
    return json.loads((run_dir / RESULTS).read_text(encoding="utf-8"))["metrics"]


class Generation(AnsweringTrainer):
    """A run that generates answers to every prompt and writes them to one file.

    The rows have the order of the dataset and the columns of `trainer.evaluate.sample_files`. The run folder of FILE is
    FILE.run; an interrupted generation continues there.
    """

    scores = False

    def fit(self) -> FitResult:
        """Loads the weights, generates the answers, and writes the file."""
        self.resume()
        self.weight_sync.start()
        [answers] = self.generate_validation_set().values()
        write_table(table_of(answers), self.run_dir.with_suffix(""))
        self.kept_answers().clear()
        return FitResult()

    def score_for_validation(self, answers: DataProto) -> list[Sample]:
        """Converts answers to samples without scores."""
        return samples_of(answers, self.tokenizer, self.steps.global_step)


def folder_of(output: Path) -> Path:
    """Returns the run folder of a file of answers."""
    return output.with_name(f"{output.name}.run")
