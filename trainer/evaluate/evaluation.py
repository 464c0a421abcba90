"""A run that only answers: the trainer's own generation and scoring, with answers that outlive the process.

`Evaluation` validates and writes results.json; `generation` writes a file of answers. Both keep each chunk of answers
in the run folder, and what is there already is not asked again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint import find_checkpoint, read_state, write_atomically
from trainer.data.prompts import PromptDataset
from trainer.evaluate.chunks import KeptAnswers, ValSampling, claim_folder, content_of, plain, read_settings
from trainer.evaluate.sample import Sample
from trainer.ray_trainer import FitResult, RayPPOTrainer
from trainer.resume import flat_config, is_bound
from verl_lite.config import PPOConfig
from verl_lite.protocol import DataProto

RESULTS = "results.json"
CHUNKS = "answers"
REMEDY = "Give the old values, or another folder (trainer.default_local_dir)"

SECTIONS = ("data.", "model.", "rollout.", "reward.", "reward_model.")
ALSO = ("data.val_files", "data.val_max_samples", "model.tokenizer_path", "rollout.val_kwargs.", "trainer.seed")
ONLY_IN_TRAINING = (
    "data.train_",
    "data.shuffle",
    "data.sampler.",
    "data.sources",
    "rollout.log_prob_",
    "reward.overlong_buffer.",
)
ONLY_IN_TRAINING_WHOLE = ("rollout.n", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.ignore_eos")


def answer_settings(config: PPOConfig, *, are_scored: bool = True) -> dict[str, Any]:
    """All that the answers depend on: options by key, and what is in the files that they name."""
    settings = {name: value for name, value in flat_config(config).items() if _decides(name, config, are_scored)}
    files = dict.fromkeys(config.data.val_files)
    if are_scored:
        functions = (entry.get("path") for entry in config.reward.functions.values() if isinstance(entry, Mapping))
        paths = (config.reward.custom_reward_function.path, *functions)
        files |= dict.fromkeys(path for path in paths if path and not path.startswith("pkg://"))
    settings |= {f"content of {path}": content_of(path) for path in files}
    checkpoint = find_checkpoint(Path(), "resume_path", config.trainer.resume_from_path) if _resumes(config) else None
    if checkpoint is not None:
        return settings | {"checkpoint": str(checkpoint), "content of the checkpoint": content_of(checkpoint)}
    return settings | {"content of model.path": content_of(config.model.path or "")}


def _decides(name: str, config: PPOConfig, are_scored: bool) -> bool:
    if name in ONLY_IN_TRAINING_WHOLE or name.startswith(ONLY_IN_TRAINING):
        return False
    if not are_scored and name.startswith(("reward.", "reward_model.")):
        return False
    return name.startswith(ALSO) or (name.startswith(SECTIONS) and is_bound(name, config))


def _resumes(config: PPOConfig) -> bool:
    return config.trainer.resume_mode == "resume_path"


class Answering(RayPPOTrainer):
    """A run that has one policy answer, and whose answers so far are kept."""

    trains = False

    def resume(self) -> None:
        """Takes the policy of the checkpoint that trainer.resume_from_path names, if any, and its step; nothing of the
        training that it belongs to, whose data need not be there."""
        if _resumes(self.config):
            folder = find_checkpoint(self.run_dir, "resume_path", self.config.trainer.resume_from_path)
            assert folder is not None
            self.saver.learners["actor"].load(str(folder / "actor"))
            self.steps.global_step = read_state(folder)["steps"]["global_step"]

    def generate_for_validation(self, prompts: DataProto, sampling: ValSampling) -> DataProto:
        """Answers a chunk. Before it whoever asked the run to end gets that, as what was answered so far is kept."""
        if self.steps.stop_asked:
            raise KeyboardInterrupt
        return super().generate_for_validation(prompts, sampling)


class Evaluation(Answering):
    """Validates once; continues where an earlier try in this folder was ended."""

    @classmethod
    def claim(cls, config: PPOConfig, data: PromptDataset | None, run_dir: Path) -> None:
        """Raises UserError if the folder has answers under other settings."""
        claim_folder(run_dir / CHUNKS, answer_settings(config), REMEDY)

    def fit(self) -> FitResult:
        """Validates, and writes the numbers."""
        result = super().fit()
        write_results(self.run_dir, self.steps.global_step, result.before)
        return result

    def kept_answers(self) -> KeptAnswers[Sample]:
        """In the run folder."""
        return KeptAnswers(self.run_dir / CHUNKS, Sample)


def write_results(run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
    """results.json: the step of the weights, whether every prompt was asked, and every number."""
    is_complete = metrics.get("val/scored_frac", 1.0) == 1.0
    results = {"step": step, "is_complete": is_complete, "metrics": dict(metrics)}
    write_atomically(run_dir / RESULTS, json.dumps(results, indent=1, default=float))


def finished_metrics(run_dir: Path, settings: Mapping[str, Any]) -> dict[str, float] | None:
    """The numbers of an evaluation that was finished in this folder under these settings; None if there is none."""
    if read_settings(run_dir / CHUNKS) != plain(settings) or not (run_dir / RESULTS).exists():
        return None
    found = json.loads((run_dir / RESULTS).read_text(encoding="utf-8"))
    return found["metrics"] if found["is_complete"] else None


def read_results(run_dir: Path) -> tuple[int, dict[str, float]]:
    """Step and numbers of a finished evaluation."""
    found = json.loads((run_dir / RESULTS).read_text(encoding="utf-8"))
    return found["step"], found["metrics"]
