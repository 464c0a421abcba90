"""Generation of a file of answers, without rewards."""

from collections.abc import Sequence
from pathlib import Path

from trainer.evaluate.answering import CHUNKS, FOLDER, AnsweringTrainer, answer_settings, answering_config
from trainer.evaluate.targets import find_targets
from trainer.launch.ppo_job import run_ppo
from trainer.observe.final_report import FitResult
from trainer.validation.sample import Sample, samples_of
from trainer.validation.sample_files import table_of, write_table
from trainer.validation.stored_answers import read_settings
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto

UNSCORED = ("~reward", "~reward_model", "rollout.val_kwargs.greedy_too=false")
"""Overrides that remove the settings of a run that are only needed for scores."""
REFUSED = (FOLDER, "reward.", "reward_model.", "rollout.val_kwargs.greedy_too=")


def generate(name: str, output: Path, overrides: Sequence[str]) -> int:
    """Generates the responses, writes the file and returns the exit status.

    Args:
        name: see `find_targets`.
        output: the file of answers.
        overrides: the user's options.

    Raises:
        UserError: for options without effect here, agentic runs, and an `output` that another command wrote.
    """
    for item in overrides:
        if item.startswith(REFUSED):
            raise UserError(
                f"{item} has no effect here; remove it. main_generate computes no scores and no greedy baseline "
                "(`python -m trainer.score` scores the file), and its run folder is FILE.parquet.run"
            )
    [target] = find_targets(name)
    # the user's options follow those of the target and override them; the run folder is fixed
    arguments = [*target.arguments, *UNSCORED, "trainer.experiment_name=generate", *overrides]
    arguments.append(f"{FOLDER}{folder_of(output)}")
    config = answering_config(arguments)
    if config is None:
        return run_ppo(arguments)
    if config.is_agentic:
        raise UserError(
            "main_generate answers the prompts of a dataset, but this run is agentic. To save episodes, use "
            "`python -m trainer.main_eval` with trainer.validation_data_dir=FOLDER"
        )
    if _is_complete(output, config):
        print(f"{output} already has all answers under these settings")
        return 0

    status = run_ppo(arguments, trainer_class=Generation)
    if not status:
        print(f"answers: {output}")
    return status


def folder_of(output: Path) -> Path:
    """Returns the run folder of a file of answers."""
    return output.with_name(f"{output.name}.run")


def _is_complete(output: Path, config: PPOConfig) -> bool:
    """Returns True if the file has all answers under these settings. Raises UserError if another command wrote it."""
    # the file is written at the end, so an interrupted command has left none
    if not output.exists():
        return False
    settings = read_settings(folder_of(output) / CHUNKS)
    if settings is None:
        raise UserError(
            f"--out {output} exists, but {folder_of(output)}, which would name its settings, does not; choose "
            "another file"
        )
    return settings == answer_settings(config, are_scored=False)


class Generation(AnsweringTrainer):
    """A run that generates answers to every prompt and writes them to one file.

    The rows have the order of the dataset and the columns of `trainer.validation.sample_files`. The run folder of FILE
    is FILE.run; an interrupted generation continues there.
    """

    scores = False

    def fit(self) -> FitResult:
        """Loads the weights, generates the answers, and writes the file."""
        self.resume()
        self.weight_sync.start()
        [answers] = self.generate_validation_set().values()
        # the inverse of `folder_of`
        write_table(table_of(answers), self.run_dir.with_suffix(""))
        # only now, because the chunks are the only copy of the answers until the file is complete
        self.answer_store().clear()
        return FitResult()

    def score_for_validation(self, answers: DataProto) -> list[Sample]:
        """Converts answers to samples without scores."""
        return samples_of(answers, self.tokenizer, self.steps.global_step)
