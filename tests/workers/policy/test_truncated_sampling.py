"""Truncated sampling in training: the engines return the tokens that could be sampled, and the trainer computes its
log-probs over the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.set_keys import set_keys
from tests.tiny_model import tiny_qwen2
from tests.workers.engine_cases import Case, build_engine, gradient_of, in_order, loss_fn, planned, relative_error
from tests.workers.engines.test_engines import VLLM, ask, episodes, load, make_engine, prompt, run
from tests.workers.engines.test_sampling import naive_candidates
from tests.workers.rollout.scripted import answer
from trainer.launch.engine_checks import check_engine
from trainer.planner.batch import launch_table
from trainer.ray_trainer import training_sampling
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from verl_lite.schema import SAMPLING_CANDIDATES
from workers.agents.trajectories import trajectory_rows
from workers.engines.base import RolloutEngine, SamplingParams, register_rollout_engine
from workers.policy.causal_lm import causal_lm
from workers.roll_loss import loss_of_batch
from workers.rollout.rows import Response, write_rows
from workers.rollout.runner import Runner

SAMPLINGS = [{"top_k": 6}, {"top_k": 6, "top_p": 0.6}, {"top_k": 6, "min_p": 0.3}]
SAMPLINGS += [{"top_k": 6, "top_p": 0.7, "min_p": 0.2, "temperature": 1.3}]
CUT = {"top_k": 6, "top_p": 0.8, "min_p": 0.1}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model"), hidden=128, heads=4, kv_heads=2)


def engine_of(name: str, path: str, **options: Any) -> RolloutEngine:
    engine = make_engine(name, path, 230, **CUT, **{"max_num_seqs": 4, **options})
    load(engine, AutoModelForCausalLM.from_pretrained(path), 1)
    return engine


def naive(path: str, prompt_ids: Any, token_ids: list[int], sampling: SamplingParams) -> tuple[list[set[int]], Any]:
    """The candidates of each token and its log-prob among them, by plain transformers and a loop."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([[*prompt_ids, *token_ids]])).logits[0]
    rows = logits[len(prompt_ids) - 1 : -1] / sampling.temperature
    kept = [naive_candidates(row, sampling.top_k, sampling.top_p, sampling.min_p) for row in rows]
    log_probs = [row[token] - row[ids].logsumexp(0) for row, token, ids in zip(rows, token_ids, kept, strict=True)]
    return [set(ids) for ids in kept], torch.stack(log_probs)


@pytest.mark.parametrize("name", ["hf", VLLM])
def test_an_engine_returns_the_naive_candidates_and_log_probs(name: str, path: str) -> None:
    """Also beside greedy requests and those of validation, which have none and whose log-probs are naive too."""
    engine = engine_of(name, path)
    requests = [
        ask(f"{number}/{seed}", prompt(3 + seed, seed), max_tokens=6, seed=seed, **sampling)
        for number, sampling in enumerate(SAMPLINGS)
        for seed in range(3)
    ]
    others = [ask("val", prompt(4), max_tokens=5, top_k=9, top_p=0.9), ask("greedy", prompt(5), temperature=0.0)]
    done = run(engine, [*requests, *others])
    for request in requests:
        found, width = done[request.request_id], request.sampling.top_k
        kept, log_probs = naive(path, request.prompt_ids, found.token_ids, request.sampling)
        candidates = found.extra[SAMPLING_CANDIDATES]
        assert candidates.dtype == torch.int32 and candidates.shape == (len(found.token_ids), width)
        assert [{*row} - {-1} for row in candidates.tolist()] == kept
        assert [row.count(-1) for row in candidates.tolist()] == [width - len(ids) for ids in kept]
        torch.testing.assert_close(torch.tensor(found.log_probs), log_probs, atol=1e-5, rtol=0)
    assert all((done[each.request_id].extra.get(SAMPLING_CANDIDATES, torch.tensor(-1)) < 0).all() for each in others)
    _, log_probs = naive(path, others[0].prompt_ids, done["val"].token_ids, others[0].sampling)
    torch.testing.assert_close(torch.tensor(done["val"].log_probs), log_probs, atol=1e-5, rtol=0)
    engine.close()


@pytest.fixture(scope="module")
def sampled(path: str) -> DataProto:
    """Answers of several lengths, three to each of three prompts, one answer without a token that counts."""
    lengths, prompts, mask = (4, 7, 8), torch.zeros(9, 8, dtype=torch.long), torch.zeros(9, 8, dtype=torch.long)
    for row in range(9):
        tokens = torch.tensor(prompt(lengths[row // 3], row // 3))
        prompts[row, 8 - len(tokens) :], mask[row, 8 - len(tokens) :] = tokens, 1
    names = {"uid": np.repeat(np.array(["a", "b", "c"], dtype=object), 3), "sample": np.tile(np.arange(3), 3)}
    rows = DataProto.from_dict({"prompts": prompts, "prompt_mask": mask}, names)
    given = SamplingParams(**CUT, max_tokens=10, stop_token_ids=tuple(range(30, 36)))
    data = answer(engine_of("hf", path), rows, given, 10)
    data.batch["response_mask"][4] = 0
    data.batch["advantages"] = torch.randn(9, 10, generator=torch.Generator().manual_seed(0))
    kept = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "advantages")
    return data.select(batch_keys=[*kept, SAMPLING_CANDIDATES, "rollout_log_probs"], non_tensor_batch_keys=[])


CASES = [
    Case(), Case(micro_batch_size=1), Case(packed=False, micro_batch_size=3), Case(checkpointing=True, max_token_len=40)
]  # fmt: skip


def outputs_of(path: str, data: DataProto, case: Case) -> np.ndarray:
    part, plan = planned(data, case)
    outputs = build_engine(path, case, build_policy=causal_lm(3)).infer(part, temperature=1.0, calculate_entropy=False)
    return in_order(outputs["log_probs"].numpy(), plan)


@pytest.mark.parametrize("case", CASES)
def test_the_trainers_log_probs_are_the_engines(case: Case, path: str, sampled: DataProto) -> None:
    expected = sampled.batch["rollout_log_probs"] * sampled.batch["response_mask"]
    assert np.abs(outputs_of(path, sampled, case) - expected.numpy()).max() < 1e-5
    whole = sampled.select(batch_keys=[name for name in sampled.batch.keys() if name != SAMPLING_CANDIDATES])
    assert np.abs(outputs_of(path, whole, case) - expected.numpy()).max() > 0.1


@pytest.mark.parametrize("model", [{}, {"lora_rank": 2, "lora_alpha": 4}], ids=["whole", "adapter"])
def test_the_gradient_does_not_depend_on_the_cut(path: str, sampled: DataProto, model: dict[str, Any]) -> None:
    """The loss invariance suite compares it with plain transformers, also with ranks that share sequences."""
    found = []
    for case in CASES:
        engine = build_engine(path, case, build_policy=causal_lm(3), model=model)
        found.append(gradient_of(engine, sampled, case, loss_fn, temperature=1.0, calculate_entropy=True))
    learns = {name for name, value in found[0].items() if np.abs(value).max() > 0}  # a new adapter's A does not
    first, *others = [{name: each[name] for name in learns} for each in found]
    assert learns and all(relative_error(other, first) < 2e-5 for other in others)


@pytest.mark.parametrize("by", ["trajectory", "step"])
def test_the_turns_of_an_episode_keep_their_candidates(path: str, by: str) -> None:
    """Each at its own tokens; the text between turns has none. A prompt longer than P moves to the response."""
    engine = make_engine("hf", path, 230, max_num_seqs=4, top_k=6)
    load(engine, AutoModelForCausalLM.from_pretrained(path), 1)
    found = episodes(Runner(engine), max_live=5, latency=(0, 4), by=by, top_k=6)
    assert max(len(one.turns) for one in found) > 2
    for prompt_length in (80, 3):
        batch = trajectory_rows(
            found, pad_token_id=0, prompt_length=prompt_length, response_length=230, extra_outputs=engine.extra_outputs
        ).batch
        candidates, mask = batch[SAMPLING_CANDIDATES], batch["response_mask"].bool()
        assert mask.any(1).all() and (candidates[mask] >= 0).all() and (candidates[~mask] == -1).all()
        turns = [turn for one in found for turn in one.turns]
        expected = torch.cat([turn.extra[SAMPLING_CANDIDATES] for turn in turns])
        assert torch.equal(candidates[mask], expected)


def test_candidates_that_do_not_fit_the_tokens_are_an_error() -> None:
    def rows(ids: list[int], candidates: list[list[int]]) -> DataProto:
        extra = {SAMPLING_CANDIDATES: torch.tensor(candidates, dtype=torch.int32)}
        response = Response(ids, [1] * len(ids), [0.0] * len(ids), [1] * len(ids), "stop", extra)
        ones = torch.ones(1, 2, dtype=torch.long)
        return write_rows(ones, ones, [response], 3, 0, {SAMPLING_CANDIDATES: (2,)})

    found = rows([7, 9], [[4, 7], [-1, -1]]).batch[SAMPLING_CANDIDATES]
    assert found.tolist() == [[[4, 7], [-1, -1], [-1, -1]]]
    with pytest.raises(ValueError, match=r"token 9 at position 1 .* not among its sampling_candidates \[4, 8\]"):
        rows([7, 9], [[4, 7], [4, 8]])
    with pytest.raises(ValueError, match="1 sets of candidates for 2 tokens"):
        rows([7, 9], [[4, 7]])


def test_what_cannot_be_truncated_is_refused(path: str, sampled: DataProto) -> None:
    @register_rollout_engine("foreign")
    class Foreign:
        pass

    config = set_keys(PPOConfig(), model__path=path, rollout__top_k=64, rollout__name="foreign")
    with pytest.raises(UserError, match="rollout.top_k=64 with rollout.name=foreign: .*returns_candidates = True"):
        check_engine(config)
    Foreign.returns_candidates = True
    check_engine(config)
    config.rollout.top_k = 65
    with pytest.raises(UserError, match="rollout.top_k=65: .* has 64 tokens"):
        check_engine(config)
    config.rollout.min_p = 0.3
    assert training_sampling(config) == SamplingParams(top_k=65, min_p=0.3, max_tokens=512)
    config.data.train_batch_size, config.rollout.n, config.data.max_response_length = 8, 4, 1000
    assert "8.3 MB   rollout.top_k=65 x 4 bytes" in launch_table(config, 1)
    with pytest.raises(ValueError, match="rollout.top_k needs outputs by name"):
        loss_of_batch(sampled, torch.zeros(9, 18, 64), config)
