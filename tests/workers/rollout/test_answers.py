"""Single-turn generation with a scripted engine: columns, seeds by row, rewards handed out while others decode."""

from __future__ import annotations

import numpy as np
import torch

from verl_lite.protocol import DataProto
from workers.rollout.base import Completion, ExtraOutputs, Request, SamplingParams, derive_seed
from workers.rollout.runner import Runner
from workers.rollout.single_turn import generate


class ScriptedEngine:
    """Finishes its requests one a step, the last submitted first; the answer to a request is its own prompt,
    reversed.
    """

    def __init__(self) -> None:
        self.extra_outputs: ExtraOutputs = {}
        self.requests: list[Request] = []
        self.seeds: list[int] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self.seeds.append(request.sampling.seed)

    @property
    def unfinished(self) -> int:
        return len(self.requests)

    def step(self) -> list[Completion]:
        request = self.requests.pop()
        tokens = list(reversed(request.prompt_ids))
        return [Completion(request.request_id, tokens, [-0.1 * token for token in tokens], "stop", policy_version=7)]


def prompts() -> DataProto:
    uid, sample = np.array(["a", "a", "b"], dtype=object), np.array([0, 1, 0])
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, 5, 6], [0, 5, 6], [7, 8, 9]]),
            "prompt_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1]]),
        },
        non_tensors={"uid": uid, "sample": sample},
    )


def run(rows: DataProto) -> tuple[DataProto, list[list[int]], ScriptedEngine]:
    engine, finished = ScriptedEngine(), []
    result = generate(
        Runner(engine),  # type: ignore[arg-type]
        rows,
        sampling=SamplingParams(max_tokens=4),
        seed=3,
        step=11,
        response_length=4,
        pad_token_id=0,
        on_finished=lambda done: finished.append([row for row, _ in done]),
    )
    return result, finished, engine


def test_columns_are_exact_and_samples_handed_out_while_others_decode() -> None:
    result, finished, _ = run(prompts())
    assert finished == [[2], [1], [0]]
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
    _, _, moved = run(rows.select_idxs([2, 0, 1]))
    assert moved.seeds == [engine.seeds[2], engine.seeds[0], engine.seeds[1]]


def test_padding_rows_are_not_run() -> None:
    rows = prompts()
    rows.batch["is_padding"] = torch.tensor([False, False, True])
    result, finished, _ = run(rows)
    assert finished == [[1], [0]]
    assert result.batch["response_mask"][2].sum() == 0
    assert result.batch["policy_version"][2] == -1
