"""Validation in chunks: what is asked and in which order; answers kept in files, under their own settings only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint import files
from trainer.validation import stored_answers
from trainer.validation.answers import ValSampling, chunk_size, generate_in_chunks, val_samplings
from trainer.validation.sample import Sample
from trainer.validation.stored_answers import AnswerStore, StoredAnswer, content_of
from verl_lite.config import PPOConfig
from verl_lite.protocol import DataProto
from workers.engines.base import SamplingParams

SAMPLED, GREEDY = (
    ValSampling("", "val0", 2, SamplingParams()),
    ValSampling("greedy/", "val1", 1, SamplingParams(temperature=0.0)),
)


def sample(uid: str, source: str, number: int = 0, **changes: Any) -> Sample:
    values = {"output": "", "score": 1.0} | changes
    return Sample(0, uid, source, "", gts="", response_length=1, finish_reason="stop", policy_version=0, extra={},
                  sample=number, **values)  # fmt: skip


FIRST = [
    StoredAnswer("", 3, sample("a", "s", output="a\nb\u2028é", score=0.1 + 0.2)),
    StoredAnswer("greedy/", 3, sample("", "s", score=None)),
]
SECOND = [StoredAnswer("", 0, sample("c", "s", score=1 / 3))]


class Prompts:
    """A dataset whose prompt is its place; answers and finishes; notes the calls."""

    def __init__(self, rows: int) -> None:
        self.rows, self.calls, self.logged = rows, list[str](), list[str]()

    def __len__(self) -> int:
        return self.rows

    def __getitems__(self, positions: list[int]) -> DataProto:
        return DataProto.from_dict(tensors={"place": torch.tensor(positions)})

    def answer(self, prompts: DataProto, way: ValSampling) -> DataProto:
        self.calls.append(f"{way.purpose} {prompts.batch['place'].tolist()}")
        rows = prompts.repeat(way.n, interleave=True)
        rows.batch["sample"] = torch.arange(way.n).repeat(len(prompts))
        return rows

    def finish(self, batch: DataProto) -> list[Sample]:
        self.calls.append("finish")
        pairs = zip(batch.batch["place"].tolist(), batch.batch["sample"].tolist(), strict=True)
        return [sample(str(place), "s", number) for place, number in pairs]

    def ask(self, samplings: list[ValSampling], size: int, kept: AnswerStore | None = None) -> Any:
        return generate_in_chunks(self, samplings, size, self.answer, self.finish, kept, self.logged.append)  # type: ignore[arg-type]


def test_the_order_is_that_of_the_dataset_and_each_answer_comes_once() -> None:
    prompts = Prompts(5)
    answered = prompts.ask([SAMPLED, GREEDY], 2)
    assert answered[SAMPLED] == [sample(str(place), "s", number) for place in range(5) for number in range(2)]
    assert answered[GREEDY] == [sample(str(place), "s") for place in range(5)]
    asked = [f"{way} {places}" for places in ([0, 1], [2, 3], [4]) for way in ("val0", "val1")]
    assert prompts.calls == asked + ["finish"] * 6, "rewards are waited for when all is generated"


def test_what_is_kept_is_finished_one_chunk_behind_and_not_asked_again(tmp_path: Path) -> None:
    prompts, kept = Prompts(4), AnswerStore(tmp_path)
    first = prompts.ask([GREEDY], 2, kept)
    assert prompts.calls == ["val1 [0, 1]", "val1 [2, 3]", "finish", "finish"]
    answered = ["2 of 4 prompts are answered", "4 of 4 prompts are answered"]
    assert prompts.logged == ["answering 4 of 4 prompts, 2 at a time", *answered]
    prompts.rows, prompts.calls, prompts.logged = 5, [], []
    both = prompts.ask([SAMPLED, GREEDY], 3, kept)
    assert prompts.calls == ["val0 [0, 1, 2]", "val0 [3, 4]", "finish", "val1 [4]", "finish", "finish"]
    answered = ["3 of 5 prompts are answered", "5 of 5 prompts are answered"]
    assert prompts.logged == ["answering 5 of 5 prompts, 3 at a time", *answered]
    assert both[GREEDY] == [*first[GREEDY], sample("4", "s")] and len(both[SAMPLED]) == 10


def test_what_is_asked_at_one_time_and_with_which_sampling() -> None:
    """All; as asked; where answers are kept, what fills 3 engines of 256 sequences with 4 answers to each prompt."""
    config = PPOConfig()
    [greedy] = val_samplings(config)
    assert (greedy.prefix, greedy.n, greedy.params.temperature) == ("", 1, 0.0)
    kwargs = config.rollout.val_kwargs
    kwargs.do_sample, kwargs.temperature, kwargs.top_p, kwargs.n, kwargs.greedy_too = True, 0.7, 0.9, 4, True
    sampled, greedy = val_samplings(config)
    assert (sampled.prefix, sampled.n, sampled.params.temperature, sampled.params.top_p) == ("", 4, 0.7, 0.9)
    assert (greedy.prefix, greedy.n, greedy.params.temperature) == ("greedy/", 1, 0.0)
    for size, are_kept, expected in ((None, False, 1000), (7, False, 7), (7, True, 7), (None, True, 192)):
        config.data.val_batch_size = size
        assert chunk_size(config, 1000, 3, are_kept) == expected


# --------------------------------------------------------------------------------------------------- what is kept of it


def test_a_chunk_comes_back_bit_for_bit_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = AnswerStore(tmp_path / "answers")
    assert kept.load() == []
    kept.add(FIRST)

    def killed(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            kept.add(SECOND)
    assert kept.load() == FIRST
    kept.add(SECOND)
    assert AnswerStore(tmp_path / "answers").load() == FIRST + SECOND
    kept.clear()
    assert kept.load() == []


def test_contents_tell_files_and_folders_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)) * 64)
    first = content_of(path)
    assert content_of(tmp_path / "none") == "absent" and content_of(tmp_path) != first
    path.write_bytes(bytes(range(256)) * 63 + bytes(255) + b"x")
    assert content_of(path) != first
    monkeypatch.setattr(stored_answers, "_PIECE_BYTES", 16)
    pieces, folder = content_of(path), content_of(tmp_path)
    path.write_bytes(bytes(range(256)) * 63 + bytes(256))
    assert content_of(path) != pieces, "the last bytes are always looked at"
    assert content_of(tmp_path) != folder


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100, 4095, 4096])
def test_every_byte_of_a_file_up_to_64_mib_counts(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small: pieces of 16 bytes, and so files of up to 4096."""
    assert stored_answers._PIECES * stored_answers._PIECE_BYTES == 64 << 20
    monkeypatch.setattr(stored_answers, "_PIECE_BYTES", 16)
    path, content = tmp_path / "data.jsonl", bytearray(size)
    path.write_bytes(content)
    before = content_of(path)
    for place in {*range(0, size, 13), size - 1}:
        content[place] = 1
        path.write_bytes(content)
        assert content_of(path) != before, place
        content[place] = 0
