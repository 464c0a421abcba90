"""What every rollout engine promises, run over all of them (those on vLLM are slow: they import it), and episodes on
them. One engine of each kind serves the whole file; its models tie the output layer to the embedding, which vLLM on a
CPU packs anew for each update."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2, tiny_tokenizer
from tests.workers.rollout.scripted import END, ScriptedPool, answer, run_groups, spec, template
from verl_lite.config import RolloutConfig
from verl_lite.errors import TransferError
from verl_lite.protocol import DataProto
from workers.agents.episodes import EpisodeRunner, TokenLimits, Trajectory
from workers.agents.trajectories import trajectory_rows
from workers.engines.base import (
    Completion,
    Request,
    RolloutEngine,
    Sampled,
    SamplingParams,
    build_rollout_engine,
    derive_seed,
)
from workers.rollout.runner import Runner

MAX_MODEL_LEN = 320
STOPS = (0, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two sets of weights of one model."""
    root: Path = tmp_path_factory.mktemp("models")
    shape: Any = {"tie_word_embeddings": True, "heads": 4, "hidden": 128, "kv_heads": 2}
    return [tiny_qwen2(root / str(seed), seed=seed, **shape) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(folders: list[str]) -> list[torch.nn.Module]:
    return [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]


def make_engine(
    name: str, folder: str, max_model_len: int = MAX_MODEL_LEN, dtype: torch.dtype = torch.float32, **options: Any
) -> RolloutEngine:
    given = {"kv_cache_memory_mb": 32, "max_num_seqs": 64, "max_num_batched_tokens": 2048, **options}
    # trainer.seed may have 63 bits
    how: Any = {"device": torch.device("cpu"), "dtype": dtype, "seed": 2**62}
    return build_rollout_engine(name, folder, RolloutConfig(**given), max_model_len=max_model_len, **how)


vllm_missing = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


VLLM = pytest.param("vllm", marks=[pytest.mark.slow, vllm_missing])
PLAIN = "recipes.own_engine.engine:PlainEngine"  # the example of a user's engine keeps the same promises


@pytest.fixture(scope="module", params=["hf", VLLM, PLAIN])
def started(request: pytest.FixtureRequest, folders: list[str]) -> Iterator[RolloutEngine]:
    engine = make_engine(request.param, folders[0])
    yield engine
    engine.close()


@pytest.fixture
def engine(started: RolloutEngine, models: list[torch.nn.Module]) -> RolloutEngine:
    """With the first set of weights, version 1, and nothing running."""
    assert started.unfinished == 0, "the test before this one left requests"
    load(started, models[0], 1)
    return started


def load(engine: RolloutEngine, model: torch.nn.Module, version: int) -> None:
    engine.load_weights(iter(model.named_parameters()), version)
    engine.reset_cache()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def ask(name: Any, ids: tuple[int, ...], **sampling: Any) -> Request:
    return Request(str(name), ids, SamplingParams(**sampling))


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


def expect_plain(done: dict[str, Completion], model: Any, requests: list[Request]) -> None:
    """The log-probs are those of a plain forward."""
    for request in requests:
        result = done[request.request_id]
        expected = plain_log_probs(model, request.prompt_ids, result.token_ids, request.sampling.temperature or 1.0)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)


def mixed_requests(count: int, **sampling: Any) -> list[Request]:
    """Prompts of 1 to 37 tokens; every fourth shares its prompt with the one before."""
    return [
        ask(index, prompt(1 + (7 * (index - (index % 4 == 3))) % 37, seed=index - (index % 4 == 3)),
            seed=derive_seed(1, 0, index, 0), stop_token_ids=STOPS, **sampling)
        for index in range(count)
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------- log-probs, weights


@pytest.mark.parametrize("temperature", [0.7, 1.0, 0.0])
def test_log_probs_equal_a_plain_forward(engine: RolloutEngine, models: Any, temperature: float) -> None:
    requests = mixed_requests(40, temperature=temperature, max_tokens=24)  # more than there are slots
    expect_plain(run(engine, requests), models[0], requests)


@pytest.mark.parametrize("started", [VLLM], indirect=True)
def test_what_vllm_has_chosen_is_a_line(engine: Any) -> None:
    from workers.engines.vllm_worker import summarize_engine

    [line] = engine._engine.collective_rpc(summarize_engine)
    assert re.match(r"vLLM: vllm\.\S+, attention CPU_ATTN, torch.float32, [\d,]+ tokens of keys and values", line)
    assert "prefixes kept, CUDA graphs " in line


def test_new_weights_answer_for_a_prompt_that_is_in_the_cache(
    engine: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # longer than a block of vLLM's prefix cache, on any device
    request = ask("r", prompt(290), max_tokens=8, seed=3, ignore_eos=True)
    old = run(engine, [request, Request("again", request.prompt_ids, request.sampling)])
    load(engine, models[1], 2)
    new = run(engine, [request])
    expect_plain(new, models[1], [request])
    assert (set(old["r"].versions), set(new["r"].versions)) == ({1}, {2})
    assert old["r"].token_ids == old["again"].token_ids != new["r"].token_ids
    if hasattr(engine, "_engine"):  # without the reset of vLLM's prefix cache the comparison fails
        monkeypatch.setattr(engine._engine, "reset_prefix_cache", lambda **kwargs: True)
        load(engine, models[0], 3)
        with pytest.raises(AssertionError, match="close"):
            expect_plain(run(engine, [request]), models[0], [request])


def test_running_requests_go_on_with_new_weights(engine: RolloutEngine, models: Any) -> None:
    request = ask("r", prompt(20), max_tokens=30, seed=5, ignore_eos=True)
    engine.submit(request)
    for _ in range(10):
        engine.step()
    load(engine, models[1], 2)
    result = drain(engine)["r"]
    expect_versions(result, request, {1: models[0], 2: models[1]})
    assert len(result.token_ids) == 30 and 8 <= result.versions.index(2) <= 10  # one token a step


def expect_versions(result: Completion, request: Request, models: dict[int, Any]) -> None:
    """Each log-prob is that of the model with the token's version, and not that of another one."""
    given, versions = torch.tensor(result.log_probs), torch.tensor(result.versions)
    for version, model in models.items():
        mine = versions == version
        plain = plain_log_probs(model, request.prompt_ids, result.token_ids, 1.0)
        torch.testing.assert_close(given[mine], plain[mine], atol=1e-4, rtol=0)
        assert ((given - plain)[~mine].abs() > 1e-4).float().mean() > 0.8
    assert versions.diff().ge(0).all() and set(result.versions) == set(models)


def test_a_snapshot_continues_on_an_engine_with_other_weights(engine: RolloutEngine, models: Any) -> None:
    request = ask("r", prompt(20), max_tokens=30, seed=5, ignore_eos=True)
    other = ask("other", prompt(9, 1), max_tokens=30, seed=6, ignore_eos=True)
    whole = run(engine, [request, other])
    for each in (request, other):
        engine.submit(each)
    for _ in range(10):
        engine.step()
    [so_far] = engine.snapshot(["r"])
    assert 8 <= len(so_far.sampled.token_ids) <= 10 and set(so_far.sampled.versions) == {1}
    assert whole["r"].token_ids[: len(so_far.sampled.token_ids)] == list(so_far.sampled.token_ids)
    engine.abort(["r"])
    assert drain(engine)["other"].token_ids == whole["other"].token_ids  # a snapshot and an abort disturb nobody
    load(engine, models[1], 2)
    engine.submit(so_far)
    for _ in range(5):
        engine.step()
    [later] = engine.snapshot(["r"])
    engine.abort(["r"])
    load(engine, models[0], 3)
    result = run(engine, [later])["r"]
    expected = {2: models[1]}
    assert len(result.token_ids) == 30 and result.token_ids[:8] == whole["r"].token_ids[:8]
    given, versions = torch.tensor(result.log_probs), torch.tensor(result.versions)
    for version, model in (expected | {1: models[0], 3: models[0]}).items():
        plain = plain_log_probs(model, request.prompt_ids, result.token_ids, 1.0)
        torch.testing.assert_close(given[versions == version], plain[versions == version], atol=1e-4, rtol=0)
    assert result.versions == sorted(result.versions) and set(result.versions) == {1, 2, 3}


def test_a_continued_request_does_not_repeat_its_random_numbers(engine: RolloutEngine) -> None:
    """A generator that starts anew with the same seed would sample from the same numbers again."""
    requests = [ask(n, prompt(1), max_tokens=40, seed=n, temperature=2.0, ignore_eos=True) for n in range(8)]
    for request in requests:
        engine.submit(request)
    for _ in range(20):
        engine.step()
    so_far = engine.snapshot([request.request_id for request in requests])
    engine.abort([request.request_id for request in requests])
    for result in run(engine, so_far).values():  # almost uniform, so that equal numbers give mostly equal tokens
        half = len(so_far[int(result.request_id)].sampled.token_ids)
        equal = [a == b for a, b in zip(result.token_ids, result.token_ids[half:], strict=False)]
        assert sum(equal) < len(equal) / 2


def test_requests_that_are_not_interrupted_have_the_same_completions(engine: RolloutEngine) -> None:
    requests = mixed_requests(12, temperature=1.0, max_tokens=20)
    streamed = run(engine, requests)
    whole = run(engine, [replace(request, is_interruptible=False) for request in requests])
    for name, completion in streamed.items():
        other = whole[name]
        assert (completion.token_ids, completion.versions) == (other.token_ids, other.versions)
        assert completion.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_a_response_of_its_maximum_length_is_not_continued(engine: RolloutEngine) -> None:
    sampled = Sampled((5, 6), (-1.0, -1.0), (0, 0))
    with pytest.raises(ValueError, match="'full'.*2 tokens already"):
        engine.submit(Request("full", prompt(3), SamplingParams(max_tokens=2), sampled))


@pytest.mark.parametrize("started", ["hf", VLLM], indirect=True)  # the plain engine does not sleep
def test_unfinished_requests_continue_after_a_sleep(engine: Any, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ask(n, prompt(9 + n, n), max_tokens=30, seed=n, ignore_eos=True) for n in range(5)]
    for request in requests[:4]:
        engine.submit(request)
    for _ in range(10):
        engine.step()
    with monkeypatch.context() as asleep:  # on a CPU an engine does not sleep
        asleep.setattr(engine, "_device", SimpleNamespace(type="cuda"))
        if hasattr(engine, "_engine"):
            asleep.setattr(engine._engine, "sleep", lambda level: None)
        engine.sleep()
    assert engine.unfinished == 4 and not engine.has_weights
    assert [len(one.sampled.token_ids) >= 8 for one in engine.snapshot("0123")] == [True] * 4
    engine.abort(["3"])
    if hasattr(engine, "_engine"):
        monkeypatch.setattr(engine._engine, "wake_up", lambda tags: None)
    engine.wake(("weights",))
    load(engine, models[1], 2)
    done = run(engine, requests[4:])
    for request in requests[:3]:
        expect_versions(done[request.request_id], request, {1: models[0], 2: models[1]})
    assert set(done) == {"0", "1", "2", "4"} and set(done["4"].versions) == {2}


@pytest.mark.parametrize("started", ["hf", VLLM], indirect=True)  # the plain engine keeps no keys and values
def test_kept_keys_and_values_never_serve_later_requests(
    engine: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rollout.recompute_kv_on_update=false, over 3 updates, with prompts longer than a block of vLLM's prefix cache."""
    monkeypatch.setattr(engine._config, "recompute_kv_on_update", False)
    load(engine, models[0], 1)
    running = ask("running", prompt(100), max_tokens=60, seed=5, ignore_eos=True)
    ended = ask("ended", prompt(150, 1), max_tokens=12, seed=6, ignore_eos=True)
    engine.submit(running)
    for _ in range(10):
        engine.step()
    engine.submit(ended)
    engine.step()
    load(engine, models[1], 2)
    done = {}
    while "ended" not in done:  # sampled by both versions, with keys and values of the first
        done |= {one.request_id: one for one in engine.step()}
    assert set(done["ended"].versions) == {1, 2}
    again = [
        Request("prompt again", ended.prompt_ids, ended.sampling),
        ask("next turn", (*ended.prompt_ids, *done["ended"].token_ids), max_tokens=8, seed=3, ignore_eos=True),
        Request("running again", running.prompt_ids, ended.sampling),
    ]
    for request in again:
        engine.submit(request)
    while not {one.request_id for one in again} <= set(done):
        done |= {one.request_id: one for one in engine.step()}
    expect_plain(done, models[1], again)
    assert "running" not in done
    load(engine, models[0], 3)
    result = drain(engine)["running"]
    assert set(result.versions) == {1, 2, 3}
    mixed, last = torch.tensor(result.log_probs), torch.tensor(result.versions) == 2
    plain = plain_log_probs(models[1], running.prompt_ids, result.token_ids, 1.0)
    assert (mixed - plain)[last].abs().max() > 1e-4  # the keys and values of the prompt are still those of version 1


def test_a_prompt_that_continues_a_finished_request(engine: RolloutEngine, models: Any) -> None:
    """What is kept of the first turns must be theirs, and forgotten with the weights that it was computed with."""
    conversations = [prompt(3 + 5 * row, seed=row) for row in range(12)]
    for turn in range(4):
        if turn == 3:
            load(engine, models[1], 2)
        requests = [
            ask(f"{row}-{turn}", ids, max_tokens=4 + row % 3, seed=100 * turn + row)
            for row, ids in enumerate(conversations)
        ]
        done = run(engine, requests)
        expect_plain(done, models[turn == 3], requests)
        for row, request in enumerate(requests):
            joined = prompt(1 + 7 * row % 11, seed=50 + turn) if row % 4 else ()
            conversations[row] = (*request.prompt_ids, *done[request.request_id].token_ids, *joined)


def test_prompts_that_do_not_fit_one_step(engine: RolloutEngine, models: Any) -> None:
    # 24 x 250 tokens against max_num_batched_tokens=2048, while others decode
    lengths = [5, 6, 7] + [250] * 24
    requests = [ask(n, prompt(length, n), max_tokens=10, seed=n, ignore_eos=True) for n, length in enumerate(lengths)]
    for request in requests[:3]:
        engine.submit(request)
    engine.step()
    expect_plain(run(engine, requests[3:]), models[0], requests)


def test_a_weight_update_without_a_parameter_is_refused(engine: RolloutEngine, models: Any) -> None:
    weights = [(name, tensor) for name, tensor in models[0].named_parameters() if "layers.1.mlp.up_proj" not in name]
    with pytest.raises(ValueError, match="up_proj"):
        engine.load_weights(iter(weights), 2)


# ------------------------------------------------------------------------------------------------------ what is sampled


def test_tokens_depend_on_the_seed_alone(engine: RolloutEngine, models: Any) -> None:
    requests = mixed_requests(50, temperature=1.0, max_tokens=20)
    together = run(engine, requests)
    load(engine, models[0], 7)
    for company in (requests[::-1], requests[10:40], *([request] for request in requests[::10])):
        for name, result in run(engine, company).items():
            assert result.token_ids == together[name].token_ids
    others = run(engine, [ask(seed, prompt(12), max_tokens=16, seed=seed, ignore_eos=True) for seed in range(8)])
    assert len({tuple(result.token_ids) for result in others.values()}) == 8


def test_responses_end_with_a_stop_token_of_the_request_the_limit_or_the_context(engine: RolloutEngine) -> None:
    stops = (2, 11, 40)
    results = run(
        engine, [ask(n, prompt(6, n), max_tokens=60, seed=n, stop_token_ids=stops) for n in range(40)]
    ).values()
    assert {result.token_ids[-1] for result in results if result.finish_reason == "stop"} == set(stops)
    for result in results:
        assert not set(result.token_ids[:-1]) & set(stops) and len(result.log_probs) == len(result.token_ids)
        assert result.finish_reason == "stop" or len(result.token_ids) == 60
    # the model's generation config names 0 and 2; a request that does not, or ignores them, goes on over them
    for more in ({}, {"stop_token_ids": STOPS, "ignore_eos": True}):
        requests = [ask(n, prompt(6, n), temperature=2.0, max_tokens=60, seed=n, **more) for n in range(20)]
        found = run(engine, requests).values()
        assert all(result.finish_reason == "length" and len(result.token_ids) == 60 for result in found)
        assert {0, 2} <= {token for result in found for token in result.token_ids}
    lengths = {"a": MAX_MODEL_LEN - 5, "b": MAX_MODEL_LEN - 1}
    done = run(engine, [ask(n, prompt(length), max_tokens=100, ignore_eos=True) for n, length in lengths.items()])
    assert [(len(done[name].token_ids), done[name].finish_reason) for name in "ab"] == [(5, "length"), (1, "length")]


def test_aborted_requests_are_gone_and_the_others_go_on(engine: RolloutEngine) -> None:
    requests = [ask(name, prompt(8, n), max_tokens=40, seed=9, ignore_eos=True) for n, name in enumerate("abc")]
    full = run(engine, requests)
    engine.submit(ask("unbegun", prompt(8), max_tokens=1))
    engine.abort(["unbegun"])
    assert engine.unfinished == 0 and engine.step() == []
    for request in requests:
        engine.submit(request)
    for _ in range(12):
        assert engine.step() == []
    engine.abort(["a", "c", "never submitted"])
    rest = drain(engine)
    assert set(rest) == {"b"} and rest["b"].token_ids == full["b"].token_ids
    assert run(engine, requests[:1])["a"].token_ids == full["a"].token_ids  # the id is free again


def test_a_batch_of_sampled_and_greedy_rows(engine: RolloutEngine, models: Any) -> None:
    """What ReMax asks for: greedy rows are the argmax of a plain forward; beside them others sample what they would."""
    lengths = (5, 9, 13)
    ids, mask = torch.zeros(9, 13, dtype=torch.long), torch.zeros(9, 13, dtype=torch.long)
    for row in range(9):
        tokens = torch.tensor(prompt(lengths[row // 3], seed=row // 3))
        ids[row, 13 - len(tokens) :], mask[row, 13 - len(tokens) :] = tokens, 1
    uid, sample = np.repeat(np.array(["a", "b", "c"], dtype=object), 3), np.tile(np.arange(3), 3)
    rows = DataProto.from_dict({"prompts": ids, "prompt_mask": mask}, {"uid": uid, "sample": sample})

    sampling = SamplingParams(temperature=1.3, max_tokens=16)
    plain = answer(engine, rows, sampling, 16)
    rows.non_tensor_batch["is_greedy"] = sample == 2
    mixed = answer(engine, rows, sampling, 16)
    for row in range(9):
        if sample[row] < 2:
            assert torch.equal(mixed.batch["responses"][row], plain.batch["responses"][row])
            continue
        tokens = torch.cat([ids[row][mask[row].bool()], mixed.batch["responses"][row]])[None]
        with torch.no_grad():
            choices = models[0](tokens).logits[0, lengths[row // 3] - 1 : -1].argmax(-1)
        assert torch.equal(mixed.batch["responses"][row], choices)
        assert not torch.equal(mixed.batch["responses"][row], plain.batch["responses"][row])


@torch.no_grad()
def test_truncated_draws_stay_inside(engine: RolloutEngine, models: Any) -> None:
    ordered = torch.softmax(models[0](torch.tensor([prompt(4)])).logits[0, -1], dim=-1).sort(descending=True)
    ranked = ordered.indices.tolist()
    nucleus = ranked[: int((ordered.values.cumsum(0) < 0.5).sum()) + 1]
    for sampling, allowed in (({"top_k": 3}, ranked[:3]), ({"top_p": 0.5}, nucleus)):
        drawn = run(engine, [ask(seed, prompt(4), max_tokens=1, seed=seed, **sampling) for seed in range(100)])
        assert {result.token_ids[0] for result in drawn.values()} == set(allowed)


def test_bad_requests_are_refused(engine: RolloutEngine) -> None:
    engine.submit(ask("twice", prompt(3)))
    bad = {f"{MAX_MODEL_LEN} tokens.*max_model_len": prompt(MAX_MODEL_LEN), "0 tokens": (), "'twice'": prompt(3)}
    for told, ids in bad.items():
        with pytest.raises(ValueError, match=told):
            engine.submit(ask("twice", ids))
    engine.abort(["twice"])


# ------------------------------------------------------------------------------------------------------------- episodes

LIMITS = TokenLimits(max_prompt_length=80, max_response_length=150, max_model_len=230)
TEMPERATURE = 0.8


def reacting(seed: int, actions: list[str]) -> dict[str, Any]:
    rng = random.Random(f"{seed} {actions}")
    return {"observation": "abcdef"[: rng.randrange(1, 6)], "reward": rng.random(), "terminated": rng.random() < 0.1}


def episodes(
    runner: Runner[Any], *, max_live: int, latency: tuple[int, int], by: str, top_k: int = -1
) -> list[Trajectory]:
    entry = template(max_steps=4, max_tokens_per_step=12, env_manager_cls=by, agent_template="{observation} go")
    driver = EpisodeRunner(
        runner, ScriptedPool(reacting, latency=latency), tiny_tokenizer(), {"t": entry}, LIMITS, seed=5,  # type: ignore[arg-type]
        stop_token_ids=(0, END), max_live=max_live, rows=list,  # type: ignore[arg-type]
    )  # fmt: skip
    specs = [spec(f"g{group}_{member}", seed=group, group_size=2) for group in range(4) for member in range(2)]
    return run_groups(driver, specs, SamplingParams(temperature=TEMPERATURE, top_k=top_k, max_tokens=150))


@pytest.mark.parametrize("by", ["trajectory", "step"])
@torch.no_grad()
def test_what_is_trained_on_is_what_was_sampled_where_it_was_sampled(engine: Any, models: Any, by: str) -> None:
    """By one forward over the padded rows, as a trainer sees them."""
    found = episodes(Runner(engine), max_live=5, latency=(0, 4), by=by)
    batch = trajectory_rows(found, pad_token_id=0, prompt_length=80, response_length=150, extra_outputs={}).batch
    assert {turn.finish_reason for one in found for turn in one.turns} == {"stop", "length"}
    mask, given = batch["response_mask"].bool(), batch["rollout_log_probs"]
    assert mask.any(-1).all() and (~mask & (given != 0)).sum() == 0
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    log_probs = torch.log_softmax(models[0](**inputs).logits[:, -151:-1].float() / TEMPERATURE, dim=-1)
    expected = log_probs.gather(-1, batch["responses"][..., None])[..., 0]
    torch.testing.assert_close(given[mask], expected[mask], atol=1e-4, rtol=0)
    # one place further it is another token: the comparison sees a shift
    assert (given.roll(1, -1)[mask] - expected[mask]).abs().mean() > 0.3


def test_an_interrupted_update_leaves_no_weights_and_a_complete_one_repairs_them(
    engine: RolloutEngine, models: list[torch.nn.Module]
) -> None:
    """Otherwise the engine would sample from a mixture of two sets of weights."""
    request = ask("r", prompt(20), max_tokens=12, ignore_eos=True)
    expected = run(engine, [request])["r"].token_ids

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, parameter) in enumerate(models[1].named_parameters()):
            if number == 6:
                raise TransferError("the trainer is gone")
            yield name, parameter

    with pytest.raises(TransferError, match="the trainer is gone"):
        engine.load_weights(interrupted(), 2)
    assert not engine.has_weights
    with pytest.raises(RuntimeError, match="no weights"):
        engine.submit(request)
    load(engine, models[0], 3)
    result = run(engine, [request])["r"]
    assert result.token_ids == expected and set(result.versions) == {3}
