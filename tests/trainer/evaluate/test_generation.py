"""The file of answers: columns, order, types that do not fit, and a killed run that is continued."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest

from tests.trainer.answering import answering, task
from trainer.data.prompts import PromptDataset
from trainer.evaluate.generation import Generation, folder_of, table_of
from verl_lite.errors import UserError
from workers.policy.tokenizer import load_tokenizer


def generated(config: Any, output: Path, ranks: int, kind: type[Generation] = Generation) -> Any:
    """What the run gives when it does not end early; the number of answers that it asked for."""
    folder = folder_of(output)
    folder.mkdir(exist_ok=True)
    with answering(config, folder, ranks, kind) as trainer:
        trainer.model_update = dict  # type: ignore[method-assign, assignment]
        trainer.fit()


@pytest.fixture
def config(tmp_path: Path) -> Any:
    config = task(tmp_path, prompts=7)
    config.rollout.val_kwargs.do_sample, config.rollout.val_kwargs.temperature = True, 1.0
    config.rollout.val_kwargs.n, config.data.val_batch_size = 2, 3
    return config


def test_a_killed_generation_goes_on_and_gives_the_same_file(config: Any, tmp_path: Path) -> None:
    generated(copy.deepcopy(config), tmp_path / "whole.parquet", ranks=1)
    rows = pyarrow.parquet.read_table(tmp_path / "whole.parquet").to_pylist()
    assert [(row["uid"], row["sample"]) for row in rows] == [(f"val-{i}", k) for i in range(7) for k in range(2)]
    first = rows[2]
    assert first["prompt"] == [{"role": "user", "content": "1+1+1"}] and first["data_source"] == "sums"
    assert first["reward_model"] == {"ground_truth": "1"} and first["extra_info"] is None
    assert first["response_length"] == len(first["response_ids"]) <= 8 and first["finish_reason"] in ("stop", "length")
    tokenizer = load_tokenizer(config.model)
    assert all(row["response"] == tokenizer.decode(row["response_ids"], skip_special_tokens=True) for row in rows)

    class Killed(Generation):
        chunks = 0

        def generate_for_validation(self, prompts: Any, way: Any) -> Any:
            Killed.chunks += 1
            if Killed.chunks == 3:
                raise KeyboardInterrupt
            return super().generate_for_validation(prompts, way)

    output = tmp_path / "killed.parquet"
    with pytest.raises(KeyboardInterrupt):
        generated(config, output, 1, Killed)
    assert not output.exists() and len(list(folder_of(output).glob("answers/chunk-*"))) == 1
    config.data.val_batch_size = None
    generated(config, output, ranks=2)
    assert output.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert not list(folder_of(output).glob("answers/chunk-*")), "what is in the file is not kept twice"
    generated(copy.deepcopy(config), tmp_path / "lines.jsonl", ranks=1)
    assert [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()] == rows


def test_who_asks_it_to_stop_keeps_what_is_answered(config: Any, tmp_path: Path) -> None:
    """As Ctrl-C does, which asks the run to end after the chunk at hand."""

    class Stopped(Generation):
        def plain_answers(self, batch: Any) -> Any:
            self.steps.stop_asked = True
            return super().plain_answers(batch)

    with pytest.raises(KeyboardInterrupt):
        generated(config, tmp_path / "out.parquet", 1, Stopped)
    assert len(list(tmp_path.glob("out.parquet.run/answers/chunk-*"))) == 1 and not (tmp_path / "out.parquet").exists()


def test_values_of_several_types_are_refused_at_the_start_of_a_parquet_and_fit_json_lines(tmp_path: Path) -> None:
    config = task(tmp_path, prompts=2)
    rows = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    rows[0]["reward_model"]["ground_truth"] = 7
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PromptDataset(config.data.val_files, load_tokenizer(config.model), config.data, split="val")
    with pytest.raises(UserError, match=r"(?s)cannot become columns of a parquet file.*output=FILE\.jsonl"):
        Generation.claim(config, data, folder_of(tmp_path / "out.parquet"))
    Generation.claim(config, data, folder_of(tmp_path / "out.jsonl"))


def test_columns_that_only_later_rows_have_are_kept() -> None:
    """Blocks of 1,000 prompts become one table, whose columns are those of all."""

    class Prompts:
        def __len__(self) -> int:
            return 1500

        def __getitems__(self, positions: Any) -> Any:
            columns = {
                "data_source": ["s"] * len(positions),
                "raw_prompt": [[{"role": "user", "content": str(place)}] for place in positions],
                "reward_model": [{} if place < 1200 else {"ground_truth": "x"} for place in positions],
                "extra_info": [{"index": place} for place in positions],
            }
            return SimpleNamespace(non_tensor_batch=columns)

    table = table_of(Prompts())
    assert table.num_rows == 1500 and table["reward_model"][0].as_py() is None
    assert table["reward_model"][1400].as_py() == {"ground_truth": "x"}
    assert [row["index"] for row in table["extra_info"].to_pylist()] == list(range(1500))
