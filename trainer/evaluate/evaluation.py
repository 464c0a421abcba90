"""What `main_eval` and `main_generate` are pointed at, and the run that only answers: the trainer's own generation and
scoring, with answers that outlive the process.

A target (a run, a checkpoint, a model) becomes the beginning of a command line: the settings that the run was saved
with, or those of a model alone, less all that belongs to training. `Evaluation` validates and writes results.json;
`Generation` writes a file of answers. Both keep each chunk of answers in the run folder, and ask nothing twice.
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
"""Where the results of models belong."""

ONLY_ANSWERS = (
    "trainer.val_only=true",
    "trainer.save_freq=0",
    "data.train_files=[]",
    "~data.sources",
    "~data.sampler",
    "~algorithm.filter_groups",
    "~trainer.validation_data_dir",
    "~trainer.rollout_data_dir",
    "~trainer.resume_allow",
)
"""Nothing is trained or saved; files that the training wrote stay as they are."""

_SECTIONS = ("data.", "model.", "rollout.", "reward.", "reward_model.")
_ALSO = ("data.val_files", "data.val_max_samples", "model.tokenizer_path", "rollout.val_kwargs.", "trainer.seed")
_TRAINING = ("data.train_", "data.shuffle", "data.sampler.", "data.sources", "rollout.log_prob_", "reward.overlong_")
_TRAINING_ALONE = ("rollout.n", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.ignore_eos")


@dataclass(frozen=True)
class Target:
    """A policy to look at. name: for people and folders. path: where it is, or its name on the hub. folder: where
    results belong. arguments: of a run that only answers with it. is_model: without data of its own."""

    name: str
    path: str
    folder: Path
    arguments: tuple[str, ...]
    is_model: bool = False


def find_targets(text: str, *, all_checkpoints: bool = False) -> list[Target]:
    """The policies that `text` names: a run folder (its newest whole checkpoint, or all that are whole), a
    global_step_N folder, a model folder, or the name of a model on the hub. Raises UserError if it is none of these."""
    path = Path(text).expanduser().absolute()
    if (path / "data.pt").exists():
        return [_checkpoint(path)]
    if (path / "config.yaml").exists():
        found = list(islice(whole_steps(path, print), None if all_checkpoints else 1))
        if not found:
            raise UserError(f"{path} is a run without a checkpoint; run it with trainer.save_freq=-1 or above 0")
        return [_checkpoint(folder) for folder in reversed(found)]
    if all_checkpoints:
        raise UserError(f"{path}: --all-checkpoints is for a run folder (config.yaml), which this is not")
    name, model = path.name, str(path)
    if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):  # a hub name; the options' check looks further
        name, model = text.replace("/", "--"), text
    elif not (path / "config.json").exists():
        raise UserError(f"{path}: neither a run folder (config.yaml), a checkpoint (data.pt) nor a model (config.json)")
    return [Target(name, model, MODELS.absolute(), (f"model.path={model}", *ONLY_ANSWERS), is_model=True)]


def _checkpoint(path: Path) -> Target:
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    arguments = ("--config", str(path.parent / "config.yaml"), *ONLY_ANSWERS, *resume)
    return Target(path.name, str(path), path.parent / "eval", arguments)


def titles(targets: Sequence[Target]) -> list[str]:
    """What each is called beside the others: its name, or what of its path tells it from those of the same name."""

    def title(target: Target) -> str:
        twins = {os.path.abspath(each.path) for each in targets if each.name == target.name}
        return target.name if len(twins) == 1 else os.path.relpath(target.path, os.path.commonpath(twins))

    return list(map(title, targets))


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The targets at the beginning of a command line, and the options after them."""
    count = next((i for i, item in enumerate(argv) if item[0:1] in ("-", "+", "~") or "=" in item), len(argv))
    return list(argv[:count]), list(argv[count:])


def answer_settings(config: PPOConfig, *, are_scored: bool = True) -> dict[str, Any]:
    """All that the answers depend on, as json has it: options by key, and what is in the files that they name."""

    def decides(name: str) -> bool:
        if name in _TRAINING_ALONE or name.startswith(_TRAINING):
            return False
        if not are_scored and name.startswith(("reward.", "reward_model.")):
            return False
        return name.startswith(_ALSO) or (name.startswith(_SECTIONS) and is_bound(name, config))

    settings = {name: value for name, value in flat_config(config).items() if decides(name)}
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
    """The checkpoint that trainer.resume_from_path names, if the run takes one."""
    if config.trainer.resume_mode != "resume_path":
        return None
    return find_checkpoint(Path(), "resume_path", config.trainer.resume_from_path)


class AnsweringTrainer(RayPPOTrainer):
    """A run that has one policy answer, and whose answers so far are kept."""

    trains = False

    @classmethod
    def check_folder(cls, config: PPOConfig, data: PromptDataset | None, run_dir: Path) -> None:
        """Raises UserError if the folder has answers under other settings."""
        claim_folder(run_dir / CHUNKS, answer_settings(config, are_scored=cls.scores))

    def kept_answers(self) -> KeptAnswers:
        """In the run folder."""
        return KeptAnswers(self.run_dir / CHUNKS)

    def resume(self) -> None:
        """Takes the policy of the checkpoint that trainer.resume_from_path names, if any, and its step; nothing of the
        training that it belongs to, whose data need not be there."""
        folder = _checkpoint_of(self.config)
        if folder is not None:
            self.saver.learners["actor"].load(str(folder / "actor"))
            self.steps.global_step = read_state(folder)["steps"]["global_step"]

    def generate_for_validation(self, prompts: DataProto, sampling: ValSampling) -> DataProto:
        """Answers a chunk; a run that was asked to stop ends before it, as what was answered so far is kept."""
        if self.steps.stop_asked:
            raise KeyboardInterrupt
        return super().generate_for_validation(prompts, sampling)


class Evaluation(AnsweringTrainer):
    """Validates once; continues where an earlier try in this folder was ended."""

    def fit(self) -> FitResult:
        """Validates, and writes results.json: the step of the weights, and every number."""
        result = super().fit()
        results = {"step": self.steps.global_step, "metrics": result.before}
        write_atomically(self.run_dir / RESULTS, json.dumps(results, indent=1, default=float))
        return result


def finished_metrics(run_dir: Path, settings: Mapping[str, Any]) -> dict[str, float] | None:
    """The numbers of an evaluation that was finished in this folder under these settings; None if there is none."""
    if read_settings(run_dir / CHUNKS) != settings or not (run_dir / RESULTS).exists():
        return None
    return json.loads((run_dir / RESULTS).read_text(encoding="utf-8"))["metrics"]


class Generation(AnsweringTrainer):
    """Answers every prompt and writes one file, in the order of the dataset, with the columns of
    `trainer.evaluate.sample_files`; continues where an earlier try was ended. The run folder is FILE.run."""

    scores = False

    def fit(self) -> FitResult:
        """Loads the weights, answers, and writes the file."""
        self.resume()
        self.model_update()
        [answers] = self.generate_validation_set().values()
        write_table(table_of(answers), self.run_dir.with_suffix(""))
        self.kept_answers().clear()
        return FitResult()

    def score_for_validation(self, answers: DataProto) -> list[Sample]:
        """Answers as samples without a score."""
        return samples_of(answers, self.tokenizer, self.steps.global_step)


def folder_of(output: Path) -> Path:
    """The run folder of a file of answers."""
    return output.with_name(f"{output.name}.run")
