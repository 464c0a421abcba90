"""Runs that only answer the validation prompts with one policy, and the settings that their answers depend on.

`main_eval` and `main_generate` take the same path: the arguments of a target and the user's options give a
configuration (`answering_config`), and an `AnsweringTrainer` generates the answers of that configuration. It stores
each chunk in the run folder, so that an interrupted command can continue without generating an answer twice.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.checkpoint.files import find_checkpoint, read_state
from trainer.checkpoint.resume import flat_config, is_bound
from trainer.data.prompts import PromptDataset
from trainer.ray_trainer import RayPPOTrainer
from trainer.recipe import prepare_recipe, recipe_overrides
from trainer.validation.answers import ValSampling
from trainer.validation.stored_answers import AnswerStore, claim_folder, content_of
from verl_lite.config import PPOConfig, load_config
from verl_lite.json_types import JsonObject
from verl_lite.protocol import DataProto

CHUNKS = "answers"
"""Folder of the stored answers in a run folder."""
FOLDER = "trainer.default_local_dir="

# the answers depend on these sections, except for the keys that no result of a run depends on (`is_bound`) ...
_SECTIONS = ("data.", "model.", "rollout.", "reward.", "reward_model.")
# ... on these keys, although the sections or `is_bound` leave them out ...
_ALSO = ("data.val_files", "data.val_max_samples", "model.tokenizer_path", "rollout.val_kwargs.", "trainer.seed")
# ... and not on those that concern the training alone: keys with these prefixes, and these whole keys
_TRAINING_PREFIXES = (
    "data.train_",
    "data.shuffle",
    "data.sampler.",
    "data.sources",
    "rollout.log_prob_",
    "reward.overlong_",
)
_TRAINING_KEYS = (
    "rollout.n",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.min_p",
    "rollout.ignore_eos",
)


def answering_config(arguments: Sequence[str]) -> PPOConfig | None:
    """Returns the configuration of a run, and creates the files that its recipe prepares.

    Returns None if the arguments contain an option such as --help-config, with which the command prints something and
    runs nothing.
    """
    loaded = load_config(list(arguments), recipe_loader=recipe_overrides)
    if loaded.action != "run":
        return None
    # now, because the digests of the answers read the files; agentic runs have no digests and prepare at their start
    if not loaded.config.is_agentic:
        prepare_recipe(loaded.config)
    return loaded.config


def answer_settings(config: PPOConfig, *, are_scored: bool = True) -> JsonObject:
    """Returns everything that the answers depend on, as json values: options by key, and digests of the named files.

    The devices and the size of chunks are not part of it, because they do not change an answer.

    Args:
        config: Configuration of the run.
        are_scored: False if the answers get no scores, so that they do not depend on rewards.
    """
    settings: JsonObject = {}
    for name, value in flat_config(config).items():
        if _is_relevant(name, config, are_scored):
            settings[name] = value
    files = list(config.data.val_files)
    if are_scored:
        files += _reward_files(config)
    # the content too, because a file with the same name can have changed
    for file in files:
        settings[f"content of {file}"] = content_of(file)

    checkpoint = _checkpoint_of(config)
    if checkpoint is None:
        settings["content of model.path"] = content_of(config.model.path or "")
    else:
        settings["checkpoint"] = str(checkpoint)
        settings["content of the checkpoint"] = content_of(checkpoint)
    # as json once, so that they are equal to settings that were read from a file
    return json.loads(json.dumps(settings, default=str))


def _is_relevant(name: str, config: PPOConfig, are_scored: bool) -> bool:
    """Returns True if the answers depend on an option."""
    if name in _TRAINING_KEYS or name.startswith(_TRAINING_PREFIXES):
        return False
    if not are_scored and name.startswith(("reward.", "reward_model.")):
        return False
    if name.startswith(_ALSO):
        return True
    return name.startswith(_SECTIONS) and is_bound(name, config)


def _reward_files(config: PPOConfig) -> list[str]:
    """Returns the files of the user's reward functions."""
    paths = [config.reward.custom_reward_function.path]
    for part in config.reward.functions.values():
        if isinstance(part, Mapping):
            paths.append(part.get("path"))
    files = []
    for path in paths:
        # a module of an installed package is no file of the user
        if path and not path.startswith("pkg://"):
            files.append(path)
    return files


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
        settings = answer_settings(config, are_scored=cls.scores)
        claim_folder(run_dir / CHUNKS, settings)

    def answer_store(self) -> AnswerStore:
        """Returns the store of answers in the run folder."""
        return AnswerStore(self.run_dir / CHUNKS)

    def resume(self) -> None:
        """Loads the policy and the step of the checkpoint trainer.resume_from_path, if it is set.

        The state of the training is not loaded, so its data need not exist. Unlike in training,
        trainer.resume_mode=auto loads nothing: it only allows the command to continue in its folder.
        """
        folder = _checkpoint_of(self.config)
        if folder is None:
            return
        # an evaluation has no critic and no reference, whose parts of the checkpoint are not read
        self.saver.learners["actor"].load(str(folder / "actor"))
        state = read_state(folder)
        self.steps.global_step = state["steps"]["global_step"]

    def generate_for_validation(self, prompts: DataProto, sampling: ValSampling) -> DataProto:
        """Generates the answers to one chunk of prompts, or raises KeyboardInterrupt if the run was asked to stop."""
        # earlier chunks are stored, so stopping between chunks loses nothing
        if self.steps.stop_asked:
            raise KeyboardInterrupt
        return super().generate_for_validation(prompts, sampling)
