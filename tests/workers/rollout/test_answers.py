"""Tests of single-turn answers with a scripted engine: columns, seeds of samples, rewards sent while others decode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.workers.rollout.scripted import answer
from verl_lite.machine.safe_state import read_state, write_state
from verl_lite.protocol import DataProto, as_column
from verl_lite.rewards import RewardItem
from workers.engines.base import Completion, ExtraOutputs, Request, Sampled, SamplingParams, derive_seed
from workers.rollout.answers import AnswerRunner, answer_plans
from workers.rollout.group_run import GroupRun
from workers.rollout.runner import Runner
from workers.rollout.specs import GroupPlan

SAMPLING = SamplingParams(max_tokens=4, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(2,))


class ScriptedEngine:
    """Finishes its requests one a step, the last submitted first; the answer to a request is its own prompt,
    reversed.
    """

    def __init__(self) -> None:
        self.extra_outputs: ExtraOutputs = {}
        self.requests: list[Request] = []
        self.submitted: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.submitted.append(request)

    @property
    def unfinished(self) -> int:
        return len(self.requests)

    @property
    def seeds(self) -> list[int]:
        return [request.sampling.seed for request in self.submitted]

    def snapshot(self, request_ids: Iterable[str]) -> list[Request]:
        """Of each running request, one token is sampled."""
        running = {request.request_id: request for request in self.requests}
        return [
            replace(running[name], sampled=Sampled(running[name].prompt_ids[-1:], (-0.5,), (6,)))
            for name in request_ids
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        self.requests = [request for request in self.requests if request.request_id not in request_ids]

    def step(self) -> list[Completion]:
        request = self.requests.pop()
        tokens = list(reversed(request.prompt_ids))
        return [Completion(request.request_id, tokens, [-0.1 * token for token in tokens], "stop", [7] * len(tokens))]


def prompts() -> DataProto:
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, 5, 6], [0, 5, 6], [7, 8, 9]]),
            "prompt_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1]]),
        },
        non_tensors={
            "uid": as_column(["a", "a", "b"]),
            "sample": np.array([0, 1, 0]),
            "sample_id": as_column(["a/0", "a/1", "b/0"]),
            "data_source": as_column(["x", "x", "y"]),
            "reward_model": as_column([{"ground_truth": "1"}, {"ground_truth": "1"}, {"ground_truth": "2"}]),
            "extra_info": as_column([{"n": number} for number in range(3)]),
            "raw_prompt": as_column([[{"role": "user", "content": text}] for text in ("p", "p", "q")]),
        },
    )


def run(rows: DataProto, sizes: tuple[int, ...] = (2, 1)) -> tuple[DataProto, list[Any], ScriptedEngine]:
    engine, finished = ScriptedEngine(), list[Any]()
    return answer(engine, rows, SAMPLING, 4, sizes, step=11, on_finished=finished.append), finished, engine


def test_columns_are_exact_and_samples_handed_out_while_others_decode() -> None:
    result, finished, engine = run(prompts())
    question = [{"role": "user", "content": "q"}]
    assert finished[0] == [(RewardItem("b/0", "y", "", "2", {"n": 2}, question), [9, 8, 7])]
    assert [[(item.key, ids) for item, ids in done] for done in finished[1:]] == [[("a/1", [6, 5])], [("a/0", [6, 5])]]
    assert result.batch["prompts"].tolist() == [[0, 5, 6], [0, 5, 6], [7, 8, 9]]
    assert result.batch["responses"].tolist() == [[6, 5, 0, 0], [6, 5, 0, 0], [9, 8, 7, 0]]
    assert result.batch["response_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert result.batch["input_ids"][2].tolist() == [7, 8, 9, 9, 8, 7, 0]
    assert result.batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 0, 0]] * 2 + [[1, 1, 1, 1, 1, 1, 0]]
    assert result.batch["position_ids"][0].tolist() == [0, 0, 1, 2, 3, 3, 3]
    torch.testing.assert_close(result.batch["rollout_log_probs"][2], torch.tensor([-0.9, -0.8, -0.7, 0.0]))
    assert result.batch["policy_version"].tolist() == [7, 7, 7]
    assert list(result.non_tensor_batch["finish_reason"]) == ["stop"] * 3


def test_seeds_belong_to_the_sample_not_to_its_place() -> None:
    rows = prompts()
    _, _, engine = run(rows)
    assert engine.seeds == [derive_seed(3, 11, "a", 0), derive_seed(3, 11, "a", 1), derive_seed(3, 11, "b", 0)]
    assert len(set(engine.seeds)) == 3
    _, _, moved = run(rows.select_idxs([2, 0, 1]), (1, 2))
    assert moved.seeds == [engine.seeds[2], engine.seeds[0], engine.seeds[1]]


def test_greedy_rows_are_sampled_greedily_and_others_as_configured() -> None:
    rows = prompts()
    rows.non_tensor_batch["is_greedy"] = np.array([False, True, False])
    _, _, engine = run(rows)
    greedy = replace(SAMPLING, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
    assert [replace(request.sampling, seed=SAMPLING.seed) for request in engine.submitted] == [
        SAMPLING, greedy, SAMPLING,
    ]  # fmt: skip


def test_padding_rows_are_not_run() -> None:
    rows = prompts()
    rows.batch["is_padding"] = torch.tensor([False, False, True])
    result, finished, _ = run(rows)
    assert [[item.key for item, _ in done] for done in finished] == [["a/1"], ["a/0"]]
    assert result.batch["response_mask"][2].sum() == 0
    assert result.batch["policy_version"][2] == -1


def groups_on(engine: ScriptedEngine, reported: list[Any]) -> GroupRun:
    options: Any = {"pad_token_id": 0, "stop_token_ids": (2,), "on_finished": reported.append}
    return GroupRun(AnswerRunner(Runner(engine), response_length=4, **options))  # type: ignore[arg-type]


def test_a_group_in_a_checkpoint_continues_and_its_finished_answers_are_scored_again(tmp_path: Path) -> None:
    """The state goes through a file that may name no code, as a checkpoint does."""
    engine, reported = ScriptedEngine(), list[Any]()
    groups = groups_on(engine, reported)
    groups.begin(list(answer_plans(prompts(), [3], ["g"], seed=3, step=1)), SAMPLING)
    assert [item.key for item, _ in reported.pop()] == ["b/0"]  # the first step of `begin` completed the last answer
    write_state(tmp_path / "state", groups.snapshot())
    saved = read_state(tmp_path / "state")
    assert isinstance(saved[0], GroupPlan) and not groups.is_idle

    engine = ScriptedEngine()
    resumed = groups_on(engine, reported)
    resumed.begin(saved, SAMPLING)
    assert [item.key for item, _ in reported[0]] == ["b/0"] and reported[0][0][1] == [9, 8, 7]
    results = resumed.run(["g"])
    assert [request.sampled.versions for request in engine.submitted] == [(6,), (6,)]
    assert [request.sampled.token_ids for request in engine.submitted] == [(6,), (6,)]
    assert results.rows is not None and results.rows.batch["responses"].tolist()[2] == [9, 8, 7, 0]
    assert results.rows.batch["rollout_versions"].tolist()[2] == [7, 7, 7, -1]
    assert results.rows.batch["policy_version"].tolist() == [7, 7, 7]


def test_an_aborted_group_leaves_no_request_and_no_row() -> None:
    engine = ScriptedEngine()
    groups = groups_on(engine, [])
    groups.begin(list(answer_plans(prompts(), [2, 1], ["a", "b"], seed=3, step=1)), SAMPLING)
    assert groups.abort(["a", "b"]) == 2  # a token of each running answer; "b" is complete already
    assert groups.is_idle and not engine.requests
    assert groups.run(["a", "b"]).reports == []
