"""What every rollout engine promises, run over all of them (those on vLLM are slow: they import it)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from verl_lite.config import RolloutConfig
from verl_lite.protocol import DataProto
from workers.rollout.base import (
    Completion,
    Request,
    RolloutEngine,
    SamplingParams,
    build_rollout_engine,
    derive_seed,
)
from workers.rollout.single_turn import generate

MAX_MODEL_LEN = 320
STOPS = (0, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two sets of weights of one model."""
    root: Path = tmp_path_factory.mktemp("models")
    return tiny_qwen2(root / "a", seed=0), tiny_qwen2(root / "b", seed=1)


@pytest.fixture(scope="module")
def models(folders: tuple[str, str]) -> tuple[torch.nn.Module, torch.nn.Module]:
    first, second = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders)
    return first, second


def make_engine(name: str, folder: str, **options: Any) -> RolloutEngine:
    return build_rollout_engine(
        name,
        folder,
        RolloutConfig(kv_cache_memory_mb=32, max_num_seqs=64, max_num_batched_tokens=2048, **options),
        max_model_len=MAX_MODEL_LEN,
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
    )


vllm_missing = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=[pytest.mark.slow, vllm_missing])])
def both(request: pytest.FixtureRequest, folders: tuple[str, str]) -> Iterator[tuple[RolloutEngine, RolloutEngine]]:
    """Two engines of one kind in one process."""
    engines = make_engine(request.param, folders[0]), make_engine(request.param, folders[0])
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(both: tuple[RolloutEngine, RolloutEngine], models: tuple[torch.nn.Module, ...]) -> RolloutEngine:
    """With the first set of weights, version 1, and nothing running."""
    assert both[0].unfinished == 0, "the test before this one left requests"
    load(both[0], models[0], 1)
    return both[0]


def load(engine: RolloutEngine, model: torch.nn.Module, version: int) -> None:
    engine.load_weights(iter(model.named_parameters()), version)
    engine.reset_cache()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def run(engine: RolloutEngine, requests: list[Request]) -> dict[str, Completion]:
    for request in requests:
        engine.submit(request)
    return drain(engine)


def drain(engine: RolloutEngine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while engine.unfinished:
        for completion in engine.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
    assert engine.step() == []
    return done


@torch.no_grad()
def plain_log_probs(model: Any, prompt_ids: tuple[int, ...], token_ids: list[int], temperature: float) -> torch.Tensor:
    """(T,) by one ordinary forward of the whole sequence."""
    logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, dim=-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def mixed_requests(count: int, **sampling: Any) -> list[Request]:
    """Prompts of 1 to 37 tokens; every fourth shares its prompt with the one before."""
    return [
        Request(
            str(index),
            prompt(1 + (7 * (index - (index % 4 == 3))) % 37, seed=index - (index % 4 == 3)),
            SamplingParams(seed=derive_seed(1, 0, index, 0), stop_token_ids=STOPS, **sampling),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=[pytest.mark.slow, vllm_missing])])
def test_each_update_reaches_a_tied_output_layer(name: str, tmp_path: Path) -> None:
    """Found in the main job: with tied embeddings vLLM on a CPU kept the output layer it had packed at start."""
    shape = {"tie_word_embeddings": True, "heads": 4, "hidden": 128, "kv_heads": 2}
    folders = [tiny_qwen2(tmp_path / str(seed), seed=seed, **shape) for seed in (0, 1)]  # type: ignore[arg-type]
    engine = make_engine(name, folders[0])
    try:
        for version, folder in enumerate(folders):
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            load(engine, model, version)
            requests = mixed_requests(6, temperature=1.0, max_tokens=8)
            answers = run(engine, requests)
            for request in requests:
                done = answers[request.request_id]
                expected = plain_log_probs(model, request.prompt_ids, done.token_ids, 1.0)
                torch.testing.assert_close(torch.tensor(done.log_probs), expected, atol=1e-4, rtol=0)
    finally:
        engine.close()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3, 0.0])
def test_log_probs_equal_a_plain_forward(engine: RolloutEngine, models: Any, temperature: float) -> None:
    requests = mixed_requests(40, temperature=temperature, max_tokens=24)
    done = run(engine, requests)
    for request in requests:
        result = done[request.request_id]
        expected = plain_log_probs(models[0], request.prompt_ids, result.token_ids, temperature or 1.0)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)


def test_log_probs_of_greedy_and_sampled_rows_in_one_batch(engine: RolloutEngine, models: Any) -> None:
    requests = [
        Request(str(row), prompt(9, row), SamplingParams(temperature=temperature, max_tokens=12, seed=row))
        for row, temperature in enumerate([0.0, 0.5, 1.0, 2.0])
    ]
    done = run(engine, requests)
    for request in requests:
        result, temperature = done[request.request_id], request.sampling.temperature or 1.0
        expected = plain_log_probs(models[0], request.prompt_ids, result.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)


def test_new_weights_answer_for_a_prompt_that_is_in_the_cache(engine: RolloutEngine, models: Any) -> None:
    # longer than a block of vLLM's prefix cache, on any device
    request = Request("r", prompt(290), SamplingParams(max_tokens=8, seed=3, ignore_eos=True))
    old = run(engine, [request, Request("again", request.prompt_ids, request.sampling)])
    load(engine, models[1], 2)
    new = run(engine, [request])["r"]
    expected = plain_log_probs(models[1], request.prompt_ids, new.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(new.log_probs), expected, atol=1e-4, rtol=0)
    assert (old["r"].policy_version, new.policy_version) == (1, 2)
    assert old["r"].token_ids == old["again"].token_ids != new.token_ids


def test_running_requests_go_on_with_new_weights(engine: RolloutEngine, models: Any) -> None:
    request = Request("r", prompt(20), SamplingParams(max_tokens=30, seed=5, ignore_eos=True))
    engine.submit(request)
    for _ in range(10):
        engine.step()
    load(engine, models[1], 2)
    result = drain(engine)["r"]
    assert len(result.token_ids) == 30 and result.policy_version == 1
    old, new = (plain_log_probs(model, request.prompt_ids, result.token_ids, 1.0) for model in models)
    given = torch.tensor(result.log_probs)
    changed_at = int(((given - old).abs() > 1e-4).nonzero()[0])
    assert 8 <= changed_at <= 10  # one token a step
    torch.testing.assert_close(given[changed_at:], new[changed_at:], atol=1e-4, rtol=0)


def test_a_prompt_that_continues_a_finished_request(engine: RolloutEngine, models: Any) -> None:
    """What is kept of the first turns must be theirs, and forgotten with the weights that it was computed with."""
    conversations = [prompt(3 + 5 * row, seed=row) for row in range(12)]
    for turn in range(4):
        model = models[turn == 3]
        if turn == 3:
            load(engine, model, 2)
        requests = [
            Request(f"{row}-{turn}", ids, SamplingParams(max_tokens=4 + row % 3, seed=100 * turn + row))
            for row, ids in enumerate(conversations)
        ]
        done = run(engine, requests)
        for row, request in enumerate(requests):
            result = done[request.request_id]
            expected = plain_log_probs(model, request.prompt_ids, result.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)
            joined = prompt(1 + 7 * row % 11, seed=50 + turn) if row % 4 else ()
            conversations[row] = (*request.prompt_ids, *result.token_ids, *joined)


def test_tokens_depend_on_the_seed_alone(engine: RolloutEngine, both: Any, models: Any) -> None:
    requests = mixed_requests(50, temperature=1.0, max_tokens=20)
    together = run(engine, requests)
    reversed_order = run(engine, requests[::-1])
    load(both[1], models[0], 7)
    elsewhere = run(both[1], requests[10:40])
    for request in requests:
        assert reversed_order[request.request_id].token_ids == together[request.request_id].token_ids
    for name, result in elsewhere.items():
        assert result.token_ids == together[name].token_ids
    for request in requests[::10]:
        assert run(engine, [request])[request.request_id].token_ids == together[request.request_id].token_ids


def test_another_seed_gives_other_tokens(engine: RolloutEngine) -> None:
    requests = [
        Request(str(seed), prompt(12), SamplingParams(max_tokens=16, seed=seed, ignore_eos=True)) for seed in range(8)
    ]
    results = {tuple(result.token_ids) for result in run(engine, requests).values()}
    assert len(results) == 8


def test_any_stop_token_ends_a_response(engine: RolloutEngine) -> None:
    stops = (2, 11, 40)
    requests = [
        Request(str(seed), prompt(6, seed), SamplingParams(max_tokens=60, seed=seed, stop_token_ids=stops))
        for seed in range(40)
    ]
    results = run(engine, requests).values()
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert {result.token_ids[-1] for result in stopped} == set(stops)
    for result in results:
        assert not set(result.token_ids[:-1]) & set(stops)
        assert len(result.log_probs) == len(result.token_ids)
        assert result.finish_reason == "stop" or len(result.token_ids) == 60


def test_only_the_stop_tokens_of_the_request_end_it(engine: RolloutEngine) -> None:
    # the model's generation config names 0 and 2; a request that does not goes on over them
    requests = [
        Request(str(seed), prompt(6, seed), SamplingParams(temperature=2.0, max_tokens=60, seed=seed))
        for seed in range(20)
    ]
    results = run(engine, requests).values()
    assert all(result.finish_reason == "length" and len(result.token_ids) == 60 for result in results)
    assert {0, 2} <= {token for result in results for token in result.token_ids}


def test_ignore_eos_samples_over_stop_tokens(engine: RolloutEngine) -> None:
    sampling = SamplingParams(temperature=2.0, max_tokens=64, stop_token_ids=STOPS, ignore_eos=True)
    result = run(engine, [Request("r", prompt(5), sampling)])["r"]
    assert result.finish_reason == "length" and len(result.token_ids) == 64
    assert set(result.token_ids) & set(STOPS)


def test_a_response_ends_with_the_context(engine: RolloutEngine) -> None:
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    done = run(
        engine,
        [Request("a", prompt(MAX_MODEL_LEN - 5), sampling), Request("b", prompt(MAX_MODEL_LEN - 1), sampling)],
    )
    assert [(len(done[name].token_ids), done[name].finish_reason) for name in "ab"] == [(5, "length"), (1, "length")]


def test_abort_gives_what_there_is(engine: RolloutEngine) -> None:
    sampling = SamplingParams(max_tokens=40, seed=9, ignore_eos=True)
    requests = [Request(name, prompt(8, index), sampling) for index, name in enumerate("abc")]
    full = run(engine, requests)
    for request in requests:
        engine.submit(request)
    for _ in range(12):
        engine.step()
    aborted = {result.request_id: result for result in engine.abort(["a", "c", "never submitted"])}
    rest = drain(engine)
    assert set(aborted) == {"a", "c"} and set(rest) == {"b"}
    for name, result in aborted.items():
        assert result.finish_reason == "abort"
        count = len(result.token_ids)
        assert 0 < count < 40 and len(result.log_probs) == count
        assert result.token_ids == full[name].token_ids[:count]
    assert rest["b"].token_ids == full["b"].token_ids
    engine.submit(requests[0])  # the id is free again
    assert drain(engine)["a"].token_ids == full["a"].token_ids


def test_abort_of_a_request_that_has_not_started(engine: RolloutEngine) -> None:
    engine.submit(Request("r", prompt(8), SamplingParams()))
    (result,) = engine.abort(["r"])
    assert (result.token_ids, result.log_probs, result.finish_reason) == ([], [], "abort")
    assert engine.unfinished == 0


def test_requests_join_while_others_run(engine: RolloutEngine) -> None:
    long = Request("long", prompt(10, 1), SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
    short = Request("short", prompt(30, 2), SamplingParams(max_tokens=5, seed=2, ignore_eos=True))
    alone = {**run(engine, [long]), **run(engine, [short])}
    engine.submit(long)
    for _ in range(10):
        assert engine.step() == []
    engine.submit(short)
    finished: list[str] = []
    while engine.unfinished:
        for result in engine.step():
            finished.append(result.request_id)
            assert result.token_ids == alone[result.request_id].token_ids
    assert finished == ["short", "long"]


def test_more_requests_than_slots(engine: RolloutEngine, models: Any) -> None:
    requests = mixed_requests(150, max_tokens=12)
    done = run(engine, requests)
    assert len(done) == 150
    for request in requests[::7]:
        result = done[request.request_id]
        expected = plain_log_probs(models[0], request.prompt_ids, result.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)


def test_prompts_that_do_not_fit_one_step(engine: RolloutEngine, models: Any) -> None:
    # 24 x 250 tokens against max_num_batched_tokens=2048, while others decode
    requests = [
        Request(str(index), prompt(length, index), SamplingParams(max_tokens=10, seed=index, ignore_eos=True))
        for index, length in enumerate([5, 6, 7] + [250] * 24)
    ]
    for request in requests[:3]:
        engine.submit(request)
    engine.step()
    done = run(engine, requests[3:])
    for request in requests:
        result = done[request.request_id]
        expected = plain_log_probs(models[0], request.prompt_ids, result.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)


def test_many_samples_of_one_prompt(engine: RolloutEngine, models: Any) -> None:
    requests = [
        Request(str(sample), prompt(25), SamplingParams(max_tokens=16, seed=derive_seed(0, 0, "u", sample)))
        for sample in range(16)
    ]
    done = run(engine, requests)
    assert len({tuple(result.token_ids) for result in done.values()}) == 16
    for result in done.values():
        expected = plain_log_probs(models[0], prompt(25), result.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_greedy_equals_an_argmax_loop(engine: RolloutEngine, models: Any) -> None:
    requests = mixed_requests(12, temperature=0.0, max_tokens=20)
    done = run(engine, requests)
    for request in requests:
        expected: list[int] = []
        while len(expected) < 20 and not set(expected) & set(STOPS):
            expected.append(int(models[0](torch.tensor([[*request.prompt_ids, *expected]])).logits[0, -1].argmax()))
        assert done[request.request_id].token_ids == expected


@torch.no_grad()
def test_first_tokens_are_distributed_as_the_softmax(engine: RolloutEngine, models: Any) -> None:
    count, temperature = 3000, 0.8
    requests = [
        Request(
            str(sample),
            prompt(4),
            SamplingParams(temperature=temperature, max_tokens=1, seed=derive_seed(5, 2, "u", sample)),
        )
        for sample in range(count)
    ]
    done = run(engine, requests)
    counts = torch.bincount(torch.tensor([result.token_ids[0] for result in done.values()]), minlength=64)
    expected = count * torch.softmax(models[0](torch.tensor([prompt(4)])).logits[0, -1] / temperature, dim=-1)
    common = expected >= 5
    cells = [(counts[common], expected[common]), (counts[~common].sum(), expected[~common].sum())]
    chi_square = sum(float(((seen - wanted) ** 2 / wanted).sum()) for seen, wanted in cells)
    freedom = int(common.sum())
    assert freedom > 20
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@torch.no_grad()
def test_truncated_sampling_stays_inside(engine: RolloutEngine, models: Any) -> None:
    probs = torch.softmax(models[0](torch.tensor([prompt(4)])).logits[0, -1], dim=-1)
    ranked = probs.argsort(descending=True).tolist()
    nucleus = ranked[: int((probs.sort(descending=True).values.cumsum(0) < 0.5).sum()) + 1]
    for sampling, allowed in (({"top_k": 3}, ranked[:3]), ({"top_p": 0.5}, nucleus), ({"top_k": 1}, ranked[:1])):
        requests = [
            Request(str(seed), prompt(4), SamplingParams(max_tokens=1, seed=seed, **sampling)) for seed in range(200)
        ]
        assert {result.token_ids[0] for result in run(engine, requests).values()} == set(allowed)


def test_bad_requests_are_refused(engine: RolloutEngine) -> None:
    with pytest.raises(ValueError, match=f"{MAX_MODEL_LEN} tokens.*max_model_len"):
        engine.submit(Request("long", prompt(MAX_MODEL_LEN), SamplingParams()))
    with pytest.raises(ValueError, match="0 tokens"):
        engine.submit(Request("empty", (), SamplingParams()))
    engine.submit(Request("twice", prompt(3), SamplingParams()))
    with pytest.raises(ValueError, match="'twice'"):
        engine.submit(Request("twice", prompt(3), SamplingParams()))
    assert engine.unfinished == 1
    engine.abort(["twice"])


def test_a_weight_update_without_a_parameter_is_refused(engine: RolloutEngine, models: Any) -> None:
    weights = [(name, tensor) for name, tensor in models[0].named_parameters() if "layers.1.mlp.up_proj" not in name]
    with pytest.raises(ValueError, match="up_proj"):
        engine.load_weights(iter(weights), 2)


def test_moving_in_and_out_on_a_cpu_changes_nothing(engine: RolloutEngine) -> None:
    request = Request("r", prompt(5), SamplingParams(max_tokens=6))
    before = run(engine, [request])["r"]
    engine.move_out()
    engine.move_in()
    assert run(engine, [request])["r"] == before


def test_a_batch_of_sampled_and_greedy_rows(engine: RolloutEngine, models: Any) -> None:
    """What ReMax asks for: greedy rows are the argmax of a plain forward; beside them others sample what they would."""
    lengths = (5, 9, 13)
    ids, mask = torch.zeros(9, 13, dtype=torch.long), torch.zeros(9, 13, dtype=torch.long)
    for row in range(9):
        tokens = torch.tensor(prompt(lengths[row // 3], seed=row // 3))
        ids[row, 13 - len(tokens) :], mask[row, 13 - len(tokens) :] = tokens, 1
    uid, sample = np.repeat(np.array(["a", "b", "c"], dtype=object), 3), np.tile(np.arange(3), 3)
    rows = DataProto.from_dict({"prompts": ids, "prompt_mask": mask}, {"uid": uid, "sample": sample})

    def answer(data: DataProto) -> DataProto:
        sampling = SamplingParams(temperature=1.3, max_tokens=16)
        return generate(
            engine, data, sampling=sampling, seed=1, step=4, response_length=16, pad_token_id=0,
            on_finished=lambda finished: None,
        )  # fmt: skip

    plain = answer(rows)
    rows.non_tensor_batch["is_greedy"] = sample == 2
    mixed = answer(rows)
    for row in range(9):
        if sample[row] < 2:
            assert torch.equal(mixed.batch["responses"][row], plain.batch["responses"][row])
            continue
        tokens = torch.cat([ids[row][mask[row].bool()], mixed.batch["responses"][row]])[None]
        with torch.no_grad():
            choices = models[0](tokens).logits[0, lengths[row // 3] - 1 : -1].argmax(-1)
        assert torch.equal(mixed.batch["responses"][row], choices)
        assert not torch.equal(mixed.batch["responses"][row], plain.batch["responses"][row])
