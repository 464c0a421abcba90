"""Ranks that share sequences compute the log-probs and gradients of plain transformers: every loss, kind of attention
and role, with shared prompts, adapters, routers and checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from tests.tiny_experts import tiny_experts
from tests.tiny_model import tiny_qwen2
from tests.tiny_run import TinyTask
from tests.workers.engine.test_update_invariance import plain_gradient
from tests.workers.engine_cases import (
    TEMPERATURE,
    Batch,
    Case,
    build_engine,
    gradient_of,
    gradients_of,
    in_order,
    log_probs,
    loss_fn,
    parts_of,
    ragged_batch,
    relative_error,
)
from tests.workers.invariance import (
    CUTS,
    POLICY,
    RAGGED,
    SHARED_PROMPTS,
    PolicyCase,
    ValueCase,
    all_cases,
    one_mode_each,
    shared_table,
    single_rows,
    write_networks,
)
from tests.workers.model_families import FAMILIES, tiny_network
from tests.workers.peak_memory import PeakMemory
from tests.workers.policy import test_router
from tests.workers.policy.test_model_families import gradients
from tests.workers.ranks import OnRanks, Ranks
from tests.workers.roles import test_reward_model
from tests.workers.test_loss_invariance import FP32, FP64, assert_within
from trainer.observe.tracking import read_metrics
from verl_lite.config import ModelConfig, NetworkConfig, PPOConfig
from verl_lite.config.checks import machine_problems, section_problems
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.engine import sequence_parallel
from workers.engine.packing import pack
from workers.engine.sequence_parallel import SequenceGroup, sequence_group, valid_sizes
from workers.policy.causal_lm import CausalLMPolicy, causal_lm
from workers.policy.compiled import CompiledFunction
from workers.policy.loading import check_sequence_parallel
from workers.policy.router import ROUTED_EXPERTS
from workers.policy.token_mixing import arrangement_of, sharding_problem

BATCH = Batch(rows=8, shared_prompts=4, failed_rows=(0, 5))


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_networks(tmp_path_factory.mktemp("networks"))


# ---------------------------------------------------------------------------------------------------- every loss


@pytest.mark.parametrize("layout", [(2, 1), (4, 1)], ids=str)
def test_one_loss(layout: tuple[int, int], networks: str, ranks: Ranks, tmp_path: Path) -> None:
    few = {batch: {name: CUTS[batch][name] for name in names} for batch, names in FEW.items()}
    cases = [PolicyCase("vanilla", "token-mean", with_terms=True, truncated=True), ValueCase("token-mean")]
    tables = shared_table(networks, str(tmp_path), cases, ranks, (layout,), few)
    assert_within(tables["fp64"], FP64)
    assert_within(tables["fp32"], FP32)


FEW = {RAGGED: ("20 tokens", "row order"), SHARED_PROMPTS: ("shared prompts",)}


@pytest.mark.slow
def test_each_loss(networks: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two groups of two ranks: the layout in which both kinds of groups exist."""
    few = {RAGGED: {"20 tokens": CUTS[RAGGED]["20 tokens"]}}
    tables = shared_table(networks, str(tmp_path), one_mode_each(), ranks, ((2, 2),), few)
    assert_within(tables["fp64"], FP64)
    assert_within(tables["fp32"], FP32)


@pytest.mark.long
def test_each_loss_mode_and_cut(networks: str, ranks: Ranks, tmp_path: Path) -> None:
    tables = shared_table(networks, str(tmp_path), all_cases(), ranks)
    assert_within(tables["fp64"], FP64)
    assert_within(tables["fp32"], FP32)


def wrong_scale(path: str, batch: Batch, case: Case) -> float:
    """The error if the backward of the sum adds up the gradients of all copies of the loss, as autograd's would."""

    def summed(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total)
        return total, None

    right = sequence_parallel._Sum.backward
    sequence_parallel._Sum.backward = staticmethod(summed)
    try:
        [found] = gradients_of(path, batch, [case])
    finally:
        sequence_parallel._Sum.backward = right
    return relative_error(found, plain_gradient(path, batch))


def test_a_wrong_scale_of_the_gradient_fails_the_same_comparison(path: str, two_ranks: OnRanks) -> None:
    assert two_ranks(wrong_scale, path, BATCH, Case(sequence_parallel=2)) == pytest.approx([1.0, 1.0], abs=1e-4)


@pytest.mark.slow
def test_every_option_of_the_engine(path: str, ranks: Ranks) -> None:
    """More ranks than key/value heads, rows of one token, shards beyond the end of a short row, HSDP."""
    layouts: dict[Batch, list[tuple[int, int]]] = {
        BATCH: [(2, 2), (2, 4), (4, 4)],
        Batch(rows=1, seed=5): [(4, 4)],
        Batch(rows=13, shared_prompts=4, seed=4, failed_rows=(1, 2, 3)): [(2, 4)],
    }
    for batch, sizes in layouts.items():
        expected = plain_gradient(path, batch)
        for size, world in sizes:
            cases = [
                Case(sequence_parallel=size, micro_batch_size=1, checkpointing=True),
                Case(sequence_parallel=size, max_token_len=33, row_order_seed=1, fsdp_size=2),
                Case(sequence_parallel=size, max_token_len=20, reduce_every_micro_batch=True, chunk_tokens=3),
            ]
            for found in ranks.run(gradients_of, path, batch, cases, size=world):
                assert all(relative_error(each, expected) < FP32 for each in found)


def test_every_rank_has_the_log_probs_of_the_whole_row(path: str, ranks: Ranks) -> None:
    case = Case(sequence_parallel=2, max_token_len=40)
    parts = ranks.run(log_probs, path, BATCH, case, size=4)
    _, plan = parts_of(ragged_batch(BATCH), case, 2)
    [expected] = ranks.run(log_probs, path, BATCH, Case(), size=1)
    _, one = parts_of(ragged_batch(BATCH), Case(), 1)
    for name, values in expected.items():
        for first in (0, 1):  # either rank of both groups
            found = np.concatenate([parts[first][name], parts[first + 2][name]])
            np.testing.assert_allclose(in_order(found, plan), in_order(values, one), atol=1e-5)


# ---------------------------------------------------------------------------------------------------- every family


def family_errors(families: list[str], size: int) -> dict[str, tuple[float, float] | str]:
    """Largest errors of log-probs and entropies, and of gradients, relative to their scale; or why a family is refused.
    Runs on each rank."""
    group, results = sequence_group(size), dict[str, tuple[float, float] | str]()
    for family in families:
        network, data = tiny_network(family), ragged_batch(Batch(rows=6, shared_prompts=3))
        if problem := sharding_problem(network, NetworkConfig(), size):
            results[family] = problem
            continue
        expected = tuple(single_rows(network, POLICY, data).values())
        known, network = gradients(network, expected), tiny_network(family)
        if network.supports_gradient_checkpointing:
            network.gradient_checkpointing_enable({"use_reentrant": False})
            for module in network.modules():
                module.training = hasattr(module, "gradient_checkpointing")
        arrange = arrangement_of(network, NetworkConfig())
        outputs = CausalLMPolicy(network, chunk_tokens=7)(arrange(data.batch).shard(group), TEMPERATURE, True)
        found = outputs["log_probs"], outputs["entropys"]
        error = max(float((one - other).detach().abs().max()) for one, other in zip(found, expected, strict=True))
        of_gradients = 0.0
        for name, gradient in gradients(network, found).items():
            dist.all_reduce(gradient)
            scale = max(float(known[name].abs().max()), 1.0)
            of_gradients = max(of_gradients, float((gradient - known[name]).abs().max()) / scale)
        results[family] = error, of_gradients
    return results


KINDS = ["gpt_oss", "gemma2", "mistral", "deepseek_v3", "qwen3_moe", "lfm2"]
"""Sinks, soft-capping, a sliding window, latent attention, experts, layers with a state."""


@pytest.mark.parametrize(
    "families",
    [
        pytest.param([family for family in KINDS if family in FAMILIES], id="kinds of attention"),
        pytest.param([family for family in FAMILIES if family not in KINDS], id="others", marks=pytest.mark.slow),
    ],
)
def test_each_family_equals_one_row_at_a_time_or_is_refused(families: list[str], two_ranks: OnRanks) -> None:
    found, other = two_ranks(family_errors, families, 2)
    assert found.keys() == other.keys() and len(found) == len(families)
    for family, errors in found.items():
        if isinstance(errors, str):
            assert "which need all tokens on one rank; set 1" in errors, family
        else:
            assert max(*errors, *other[family]) < 2e-5, f"{family}: {errors}"
    assert sum(isinstance(errors, str) for errors in found.values()) < len(families) / 2


# ----------------------------------------------------------------------------------------------------- adapters, roles


def adapter_gradient(path: str, case: Case) -> dict[str, np.ndarray]:
    """Of an adapter whose two factors are random, so that both have a gradient."""
    engine = build_engine(path, case, build_policy=causal_lm(16), model={"lora_rank": 3})
    with torch.no_grad():
        for number, (name, value) in enumerate(engine.trained.items()):
            values = torch.randn(value.shape, generator=torch.Generator().manual_seed(number)) * 0.1
            value.copy_(distribute_tensor(values, value.device_mesh, value.placements))
            assert "lora_" in name
    data = ragged_batch(BATCH)
    captured: dict[str, np.ndarray] = {}

    def capture(lr: float) -> dict[str, Any]:
        captured.update({name: value.grad.full_tensor().numpy() for name, value in engine.trained.items()})
        return {}

    engine.optimizer.step = capture
    part = parts_of(data, case, dist.get_world_size() // case.sequence_parallel)[0]
    engine.train(
        part[dist.get_rank() // case.sequence_parallel], loss_fn, temperature=TEMPERATURE, calculate_entropy=True
    )
    return captured


def test_an_adapter(path: str, ranks: Ranks) -> None:
    [expected] = ranks.run(adapter_gradient, path, Case(), size=1)
    for found in ranks.run(adapter_gradient, path, Case(sequence_parallel=2, checkpointing=True), size=2):
        assert relative_error(found, expected) < FP32


def test_the_load_balancing_loss(tmp_path: Path, two_ranks: OnRanks) -> None:
    experts = tiny_experts(tmp_path, norm_topk_prob=True)
    expected = test_router.plain_gradient(experts, test_router.BATCH)
    cases = [Case(sequence_parallel=2, max_token_len=45), Case(sequence_parallel=2, checkpointing=True)]
    for found in two_ranks(test_router.gradients, experts, test_router.BATCH, cases):
        assert all(relative_error(each, expected) < FP32 for each in found)


def replayed(path: str, size: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Counts and gradient with given experts, which differ from the router's."""
    data = ragged_batch(Batch(rows=6, shared_prompts=3, seed=3))
    experts = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:2] for i in range(64)])
    routed = experts[data.batch["input_ids"]].unsqueeze(2).expand(-1, -1, 2, -1)
    data.batch[ROUTED_EXPERTS] = routed.masked_fill(data.batch["attention_mask"][..., None, None] == 0, -1).short()
    engine = build_engine(path, case := Case(sequence_parallel=size), build_policy=causal_lm(16, with_routers=True))
    counts: list[torch.Tensor] = []

    def loss(rows: DataProto, outputs: dict[str, torch.Tensor]) -> Any:
        counts.append(outputs["router_replay"].sum(0))
        return loss_fn(rows, outputs)

    more = {"temperature": 1.0, "calculate_entropy": True, "count_router_replay": True}
    found = gradient_of(engine, data, case, loss, **more)
    return torch.stack(counts).sum(0).numpy(), found


def test_router_replay(tmp_path: Path, ranks: Ranks) -> None:
    experts = tiny_experts(tmp_path, norm_topk_prob=True)
    [(counts, expected)] = ranks.run(replayed, experts, 1, size=1)
    assert 0 < counts[0] <= counts[1]
    for found_counts, found in ranks.run(replayed, experts, 2, size=2):
        assert np.array_equal(found_counts, counts) and relative_error(found, expected) < FP32


def test_a_reward_model(tmp_path: Path, two_ranks: OnRanks) -> None:
    path = test_reward_model.tiny_reward_model(tmp_path)
    case = Case(sequence_parallel=2)
    expected = test_reward_model.plain_scores(path, test_reward_model.batch())
    for found in two_ranks(test_reward_model.worker_scores, path, test_reward_model.batch(), case):
        _, plan = parts_of(test_reward_model.batch(), case, 1)
        np.testing.assert_allclose(in_order(found, plan), expected.numpy(), atol=1e-5)


# ---------------------------------------------------------------------------------------------------- refusals


def test_valid_sizes() -> None:
    assert valid_sizes(12, 2) == [1, 2, 4, 6, 12]
    assert valid_sizes(32, 8) == [1, 2, 4, 8, 16, 32]
    assert valid_sizes(6, 6) == [1, 2, 3, 6]
    assert valid_sizes(12, 8) == [1, 2, 4]


@pytest.mark.parametrize(
    ("options", "size", "told"),
    [
        ({}, 3, "4 query heads, which the size must divide, and 2 key/value heads.*set one of .1, 2, 4."),
        ({"use_remove_padding": False}, 2, "only packed rows.*set model.use_remove_padding=true"),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused(
    options: dict[str, Any], size: int, told: str, tmp_path: Path
) -> None:
    model = ModelConfig(path=tiny_qwen2(tmp_path, heads=4, kv_heads=2), **options)
    with pytest.raises(UserError, match=f"critic.ulysses_sequence_parallel_size={size} with model.path=.*{told}"):
        check_sequence_parallel(model, "critic.", size)
    check_sequence_parallel(model, "critic.", 1)


def test_a_layer_with_other_heads_than_the_config_says_is_an_error() -> None:
    group = SequenceGroup(dist.GroupMember.NON_GROUP_MEMBER, 0, 4)
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=4: .*6 query heads and 3 .*one of .1, 3, 6."):
        group.shards_of_heads(torch.zeros(2, 6, 8), torch.zeros(2, 3, 8), torch.zeros(2, 3, 8), 8)


def test_a_shard_has_the_tokens_and_predictions_of_its_part() -> None:
    """Together the shards are the row, with tokens at the end that no prediction reads."""
    inputs = pack(ragged_batch(BATCH).batch)
    assert inputs.sequences is not None and inputs.sequences.num_tokens % 3
    shards = [inputs.shard(SequenceGroup(dist.GroupMember.NON_GROUP_MEMBER, rank, 3)) for rank in range(3)]
    whole = torch.cat([shard.input_ids for shard in shards], dim=1)[:, : inputs.input_ids.shape[1]]
    assert torch.equal(whole, inputs.input_ids) and len({shard.input_ids.shape for shard in shards}) == 1
    size = shards[0].input_ids.shape[1]
    predicted = torch.cat([shard.predict_index + rank * size for rank, shard in enumerate(shards)])
    assert torch.equal(predicted.sort().values, inputs.predict_index.sort().values)
    places = torch.stack(
        [torch.where(shard.token_index >= 0, shard.token_index + rank * size, -1) for rank, shard in enumerate(shards)]
    )
    assert torch.equal(places.amax(0), inputs.token_index)


@pytest.mark.slow
def test_a_run_with_a_critic_and_a_reference_is_the_same(tmp_path: Path) -> None:
    """Through Ray on two processes, against one process: the same samples, and metrics up to rounding."""
    task = TinyTask(tmp_path)
    shared = ["trainer.n_gpus_per_node=2", "actor.ulysses_sequence_parallel_size=2"]
    options = ["algorithm.adv_estimator=gae", "actor.use_kl_loss=true", "actor.ppo_mini_batch_size=2"]
    names, rows = ("alone", "shared"), []
    for name, more in zip(names, ([], shared), strict=True):
        run = task.start(name, *options, *more)
        assert run.wait() == 0, run.output()
        rows.append(list(read_metrics(run.run_dir / "metrics.jsonl").values()))
        run.close()
    assert "groups of actor.ulysses_sequence_parallel_size=2" in run.log.read_text()
    learned = ("actor/", "critic/", "training/")
    for alone, other in zip(*rows, strict=True):
        compared = [key for key in alone if key.startswith(learned) and "/perf/" not in key]
        assert {"actor/grad_norm", "critic/vf_loss", "actor/kl_loss"} <= {*compared}
        for key in compared:
            assert other[key] == pytest.approx(alone[key], rel=1e-3, abs=1e-6), key


def test_sizes_are_checked_against_the_ranks_and_the_longest_sample() -> None:
    config = PPOConfig()
    config.model.path, config.actor.ppo_max_token_len_per_gpu = "owner/name", 800  # a sample has up to 1,536 tokens
    config.trainer.n_gpus_per_node, config.data.train_files = 4, ["owner/name"]
    config.trainer.device, config.rollout.n = "cpu", 8
    for size, told in ((2, None), (1, "_len_per_gpu=800: a micro-batch cannot hold"), (3, "=3 does not divide the 4")):
        config.actor.ulysses_sequence_parallel_size = size
        found = [str(problem) for problem in (*section_problems(config), *machine_problems(config, 4, None))]
        assert [told in problem for problem in found] == [True] if told else not found, found
    config.actor.ulysses_sequence_parallel_size, config.critic.ulysses_sequence_parallel_size = 2, 4
    sizes = [config.sequence_parallel_size(role) for role in ("actor", "ref", "critic", "reward_model")]
    assert sizes == [2, 2, 4, 2]


def compiled_error(path: str, case: Case) -> float:
    """The error of the gradient with compiled layers, which must not fall back to eager ones."""
    engine = build_engine(path, case, model={"compile": True})
    options = {"temperature": TEMPERATURE, "calculate_entropy": True}
    found = gradient_of(engine, ragged_batch(BATCH), case, loss_fn, **options)
    forwards = [vars(module).get("forward") for module in engine.policy.modules()]
    compiled = [forward for forward in forwards if isinstance(forward, CompiledFunction)]
    assert compiled and not any(forward.eager for forward in compiled)
    return relative_error(found, plain_gradient(path, BATCH))


@pytest.mark.long
def test_compiled_layers(path: str, two_ranks: OnRanks) -> None:
    assert max(two_ranks(compiled_error, path, Case(sequence_parallel=2, checkpointing=True))) < FP32


def test_an_exchange_of_heads_holds_two_copies_of_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is joined, and what is sent in another order."""
    monkeypatch.setattr(sequence_parallel, "all_to_all_single_autograd", lambda sent, *args: sent)
    group: Any = None
    # as `packed_attention` gets them: (heads, tokens, size), transposed
    query, key, value = (torch.randn(heads, 64, 16).transpose(0, 1) for heads in (8, 4, 4))
    with PeakMemory() as memory:
        SequenceGroup(group, rank=0, size=2).shards_of_heads(query, key, value, 128)
    assert memory.peak == 2 * (query.nbytes + key.nbytes + value.nbytes)
