"""Ragged batches, losses and engines for the tests of the training engine: what runs on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_lite.config import FSDPConfig, ModelConfig, OptimConfig, WrapPolicyConfig
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import BatchPlan, plan_batch
from workers.engine.fsdp import FSDPEngine
from workers.engine.update import LossFunction
from workers.policy import activations
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import PolicyBuilder, token_network

PROMPT, RESPONSE = 8, 10
TEMPERATURE = 0.7
CPU = torch.device("cpu")
activations.MIN_BYTES = 256  # the tensors of tiny networks are offloaded too


@dataclass(frozen=True)
class Case:
    """How one batch is cut and run; the gradient must not depend on any of it."""

    packed: bool = True
    checkpointing: bool = False
    max_token_len: int | None = None
    micro_batch_size: int | None = None
    min_num_params: int = 0
    fsdp_size: int = -1
    reshard_after_forward: bool = True
    chunk_tokens: int = 1024
    row_order_seed: int | None = None
    balance: bool = True
    epochs: int = 1
    shuffle_seed: int | None = None
    reduce_every_micro_batch: bool = False
    empty_rows: int = 0  # without weight, that are added
    sequence_parallel: int = 1
    recomputed: int | None = None  # layers with gradient checkpointing; None = all
    offload: bool = False


@dataclass(frozen=True)
class Batch:
    """Which rows there are. shared_prompts: rows come in groups of this size with one prompt."""

    rows: int = 7
    seed: int = 0
    shared_prompts: int = 1
    failed_rows: tuple[int, ...] = field(default=())


def token_columns(ids: torch.Tensor, attention: torch.Tensor, prompt: int = PROMPT) -> dict[str, torch.Tensor]:
    """Of prompts (left-padded) and responses (right-padded), whose tokens all count."""
    return {
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": attention[:, prompt:].clone(),
    }


BATCH = Batch(rows=9, shared_prompts=3, failed_rows=(4,))


def ragged_batch(batch: Batch) -> DataProto:
    """Random prompts (left-padded) and responses (right-padded), with a hole in one response_mask and no-weight
    rows."""
    generator = np.random.default_rng(batch.seed)
    ids = torch.zeros(batch.rows, PROMPT + RESPONSE, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row in range(batch.rows):
        if row % batch.shared_prompts == 0:
            prompt = generator.integers(3, 60, generator.integers(2, PROMPT + 1))
        response = generator.integers(3, 60, generator.integers(1, RESPONSE + 1))
        start, end = PROMPT - len(prompt), PROMPT + len(response)
        ids[row, start:end] = torch.from_numpy(np.concatenate([prompt, response]))
        attention[row, start:end] = 1
    columns = token_columns(ids, attention)
    columns["response_mask"][0, 0] = 0
    columns["response_mask"][list(batch.failed_rows)] = 0
    advantages = torch.from_numpy(generator.standard_normal((batch.rows, RESPONSE)).astype(np.float32))
    return DataProto.from_dict(columns | {"advantages": advantages})


def loss_fn(data: DataProto, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Metric]]:
    """A token mean of log-probs and a sequence mean of entropies, both by the global denominators."""
    mask = data.batch["response_mask"]
    policy = (outputs["log_probs"] * data.batch["advantages"] * mask).sum() / data.meta_info["num_tokens"]
    per_row = (outputs["entropys"] * mask).sum(1) / mask.sum(1).clamp(min=1)
    entropy = per_row.sum() / data.meta_info["num_sequences"]
    return -policy - 0.1 * entropy, {"tokens": Metric.sum(float(mask.sum()))}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Arrays of the same names, each entry within the tolerance."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= tolerance, name


def relative_error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest of gradients by parameter, relative to the largest entry of each; NaN where there is one."""
    assert found.keys() == expected.keys()
    return float(np.max([np.abs(found[name] - value).max() / np.abs(value).max() for name, value in expected.items()]))


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def planned(data: DataProto, case: Case, mini_batch_size: int | None = None) -> tuple[DataProto, BatchPlan]:
    """This rank's part of the planned batch, as the dispatch would send it."""
    rank, world = rank_and_world()
    parts, plan = parts_of(data, case, world // case.sequence_parallel, mini_batch_size)
    return parts[rank // case.sequence_parallel], plan


def parts_of(
    data: DataProto, case: Case, world: int, mini_batch_size: int | None = None
) -> tuple[list[DataProto], BatchPlan]:
    """The parts of a planned batch for `world` ranks."""
    if case.row_order_seed is not None:
        data = data[np.random.default_rng(case.row_order_seed).permutation(len(data))]
    plan = plan_batch(
        data.batch["attention_mask"].sum(1).numpy(),
        world_size=world,
        mini_batch_size=mini_batch_size,
        max_token_len=case.max_token_len,
        micro_batch_size=case.micro_batch_size,
        balance=case.balance,
        epochs=case.epochs,
        shuffle_seed=case.shuffle_seed,
        num_tokens=(tokens := data.batch["response_mask"].sum(1)).numpy(),
        num_distilled=(tokens * data.batch["has_teacher"]).numpy() if "has_teacher" in data else None,
    )
    return plan.apply(data).chunk(world), plan


def in_order(found: np.ndarray, plan: BatchPlan) -> np.ndarray:
    """What was computed in planned order, of all ranks together, in the order of the batch; of padding it is 0."""
    assert not found[plan.is_padding].any()
    rows = np.zeros((plan.order.max() + 1, *found.shape[1:]), dtype=found.dtype)
    rows[plan.order[~plan.is_padding]] = found[~plan.is_padding]
    return rows


def build_engine(
    path: str,
    case: Case,
    optim: OptimConfig | None = None,
    build_policy: PolicyBuilder | None = None,
    model: Mapping[str, Any] | None = None,
    **fsdp: Any,
) -> FSDPEngine:
    """build_policy: null = a language model. model: more options of `ModelConfig`; the rest are `FSDPConfig`'s."""
    return FSDPEngine(
        token_network(
            ModelConfig(
                path,
                enable_gradient_checkpointing=case.checkpointing,
                gradient_checkpointing_layers=case.recomputed,
                enable_activation_offload=case.offload,
                use_remove_padding=case.packed,
                **(model or {}),
            ),
            build_policy or causal_lm(case.chunk_tokens),
            case.sequence_parallel,
        ),
        FSDPConfig(
            fsdp_size=case.fsdp_size,
            reshard_after_forward=case.reshard_after_forward,
            reduce_every_micro_batch=case.reduce_every_micro_batch,
            wrap_policy=WrapPolicyConfig(min_num_params=case.min_num_params),
            **fsdp,
        ),
        optim or OptimConfig(lr=1e-3),
        device=CPU,
        total_training_steps=10,
        seed=0,
    )


@cache
def _engine_of(path: str, how: Case, build_policy: PolicyBuilder | None, ranks: Any) -> FSDPEngine:
    return build_engine(path, how, build_policy=build_policy)


def engine_of(path: str, case: Case, build_policy: PolicyBuilder | None = None) -> FSDPEngine:
    """One engine for all cases that cut the batch in other ways."""
    cut = {"max_token_len": None, "micro_batch_size": None, "row_order_seed": None, "balance": True, "empty_rows": 0}
    return _engine_of(path, replace(case, **cut), build_policy, dist.group.WORLD)


def gradient(path: str, batch: Batch, case: Case) -> dict[str, np.ndarray]:
    """The whole gradient of one optimizer step on `ragged_batch` with `loss_fn`."""
    data, options = ragged_batch(batch), {"temperature": TEMPERATURE, "calculate_entropy": True}
    return gradient_of(engine_of(path, case), data, case, loss_fn, **options)


def gradients_of(path: str, batch: Batch, cases: list[Case]) -> list[dict[str, np.ndarray]]:
    return [gradient(path, batch, case) for case in cases]


def gradient_of(
    engine: FSDPEngine, batch: DataProto, case: Case, loss: LossFunction, **forward_arguments: Any
) -> dict[str, np.ndarray]:
    """The whole gradient of one optimizer step, by parameter; the parameters stay as they are."""
    data, _ = planned(batch, case)
    captured: dict[str, np.ndarray] = {}

    def capture(lr: float) -> dict[str, Metric]:
        captured.update({name: value.grad.full_tensor().numpy() for name, value in engine.trained.items()})
        engine.optimizer.zero_grad()
        return {}

    engine.optimizer.step = capture
    engine.train(data, loss, **forward_arguments)
    return captured


def whole_state(engine: FSDPEngine) -> dict[str, np.ndarray]:
    """What learns, its moments and the counters, by name."""
    assert engine.optimizer is not None
    tensors: dict[str, Any] = {**engine.trained, **engine.optimizer.moments()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}
    state = {name: value.detach().clone().numpy() for name, value in whole.items()}
    counters = {"steps_taken": engine.optimizer.steps_taken, "scheduler_step": engine.scheduler_step}
    return state | {name: np.array(count) for name, count in counters.items()}


def log_probs(path: str, batch: Batch, case: Case) -> dict[str, np.ndarray]:
    """This rank's log_probs and entropys in planned order."""
    data, _ = planned(ragged_batch(batch), case)
    outputs = engine_of(path, case).infer(data, temperature=TEMPERATURE, calculate_entropy=True)
    return {name: value.numpy() for name, value in outputs.items()}


def trained(path: str, batch: Batch, case: Case, steps: int, save: str = "", load: str = "") -> dict[str, Any]:
    """Parameters after some training steps of two mini-batches each; loads first and saves last where asked to."""
    engine = build_engine(path, case, OptimConfig(lr=1e-3, eps=1e-3, lr_warmup_steps=3, lr_scheduler_type="cosine"))
    if load:
        engine.load(load)
    data, _ = planned(ragged_batch(batch), case, mini_batch_size=4)
    metrics = [engine.train(data, loss_fn, temperature=1.0, calculate_entropy=True) for _ in range(steps)]
    if save:
        engine.save(save)
    result = {name: tensor.clone().numpy() for name, tensor in engine.full_params(bucket_bytes=40_000)}
    return {"parameters": result, "metrics": [{k: asdict(v) for k, v in m.items()} for m in metrics]}
