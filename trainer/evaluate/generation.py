"""Answers without rewards: a run that writes what the policy says to each prompt into one file.

The file has a row for each answer, in the order of the dataset: uid, sample, data_source, prompt (chat messages),
response, reward_model (with ground_truth), extra_info, finish_reason, response_length, response_ids. `trainer.score`
reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from trainer.data.prompts import PromptDataset
from trainer.evaluate import chunks
from trainer.evaluate.evaluation import CHUNKS, AnsweringTrainer, answer_settings
from trainer.ray_trainer import FitResult
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto

_PROMPTS_AT_ONCE = 1000
_REMEDY = "Give the old values; or another output=FILE; or delete this folder and the file, to begin anew"


@dataclass(frozen=True)
class GeneratedAnswer:
    """One answer, as the policy gave it."""

    uid: str
    sample: int
    response: str
    finish_reason: str
    response_length: int
    response_ids: list[int]


class Generation(AnsweringTrainer):
    """Answers every prompt; continues where an earlier try in this folder was ended. The run folder is named after the
    file to write, FILE.run."""

    scores = False

    @classmethod
    def claim(cls, config: PPOConfig, data: PromptDataset | None, run_dir: Path) -> None:
        """Raises UserError if the folder has answers under other settings, or the prompts cannot be written."""
        chunks.claim_folder(run_dir / CHUNKS, answer_settings(config, are_scored=False), _REMEDY)
        if data is not None and output_of(run_dir).suffix == ".parquet":
            table_of(data)

    def fit(self) -> FitResult:
        """Loads the weights, answers, and writes the file."""
        assert self.val_data is not None
        self.resume()
        self.model_update()
        kept = chunks.KeptAnswers(self.run_dir / CHUNKS, GeneratedAnswer)
        engines = self.actor.world_size // self.config.rollout.tensor_model_parallel_size
        size = chunks.chunks_of(self.config, len(self.val_data), engines, are_kept=True)
        [sampling] = chunks.val_samplings(self.config)
        answered = chunks.generate_in_chunks(
            self.val_data, [sampling], size, self.generate_for_validation, self.plain_answers, kept, self.tracking.show
        )
        write_answers(output_of(self.run_dir), self.val_data, answered[sampling], sampling.n)
        kept.clear()
        return FitResult()

    def plain_answers(self, batch: DataProto) -> list[GeneratedAnswer]:
        """The rows of an answered batch."""
        columns, tensors = batch.non_tensor_batch, batch.batch
        answers = []
        for row, length in enumerate(tensors["response_mask"].sum(1).tolist()):
            ids = tensors["responses"][row, :length].tolist()
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            uid, sample, reason = columns["uid"][row], int(columns["sample"][row]), columns["finish_reason"][row]
            answers.append(GeneratedAnswer(uid, sample, text, reason, length, ids))
        return answers


def output_of(run_dir: Path) -> Path:
    """The file that a run folder belongs to."""
    return run_dir.with_suffix("")


def folder_of(output: Path) -> Path:
    """The run folder of a file."""
    return output.with_name(f"{output.name}.run")


def is_complete(output: Path, config: PPOConfig) -> bool:
    """Whether the file has the answers under these settings. Raises UserError if it was not written by a run of this
    kind."""
    if not output.exists():
        return False
    settings = chunks.read_settings(folder_of(output) / CHUNKS)
    if settings is None:
        raise UserError(
            f"output={output} exists, and {folder_of(output)} does not say whose it is: choose another file"
        )
    return settings == chunks.plain(answer_settings(config, are_scored=False))


def table_of(prompts: chunks.Prompts, answers: Sequence[GeneratedAnswer] | None = None, n: int = 1) -> pyarrow.Table:
    """chunks.Prompts and answers as columns; without answers the prompts alone.

    Raises UserError where a column has values of several types, which a parquet file cannot hold.
    """
    try:
        tables = [pyarrow.Table.from_pylist(rows) for rows in _blocks(prompts, answers, n)]
        return pyarrow.concat_tables(tables, promote_options="permissive")
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise UserError(
            f"The columns of data.val_files cannot become columns of a parquet file ({error}): a column, or an entry "
            "of extra_info or reward_model, has values of several types. Write output=FILE.jsonl instead, or mend the "
            "data"
        ) from error


def write_answers(path: Path, prompts: chunks.Prompts, answers: Sequence[GeneratedAnswer], n: int) -> None:
    """The file of all answers, by its suffix as parquet or as json lines; there whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table_of(prompts, answers, n), draft)
    else:
        with draft.open("w", encoding="utf-8") as file:
            for rows in _blocks(prompts, answers, n):
                file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
    os.replace(draft, path)


def _blocks(
    prompts: chunks.Prompts, answers: Sequence[GeneratedAnswer] | None, n: int
) -> Iterator[list[dict[str, Any]]]:
    """Rows of some prompts at a time. answers: n to each prompt, in the order of the prompts."""
    for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
        places = range(start, min(start + _PROMPTS_AT_ONCE, len(prompts)))
        columns = prompts.__getitems__(places).non_tensor_batch
        rows: list[dict[str, Any]] = []
        for row, place in enumerate(places):
            shared = {
                "data_source": columns["data_source"][row],
                "prompt": columns["raw_prompt"][row],
                "reward_model": columns["reward_model"][row] or None,
                "extra_info": columns["extra_info"][row] or None,
            }
            if answers is None:
                rows.append(shared)
                continue
            for each in answers[place * n : (place + 1) * n]:
                assert each.uid == columns["uid"][row]
                own = asdict(each)
                rows.append({"uid": own.pop("uid"), "sample": own.pop("sample"), **shared, **own})
        yield rows
