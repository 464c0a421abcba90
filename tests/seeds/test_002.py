"""Seed 002, ROLL's reward-flow actor: its usage example on clips and prompts alone, and its contract.

The pipeline is a random one of a few thousand parameters; what frames are worth is their mean colour.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.diffusion.actor_cases import move, plain_gradient
from tests.workers.diffusion.tiny_wan import clips, flow_config, tiny_pipeline
from tests.workers.ranks import Ranks
from trainer.diffusion.reward_flow import FlowActorRole
from verl_lite.metrics import values
from verl_lite.protocol import DataProto
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from verl_lite.single_controller.decorator import REGISTRATION, Dispatch
from verl_lite.single_controller.worker_group import WorkerGroup
from workers.diffusion.reward_flow_worker import RewardFlowWorker

pytest.importorskip("diffusers")

NAMES = {"actor/loss", "actor/face_score", "actor/kl_loss"}
ROLLS_NOISE = 24  # the seed of every sample's noise in ROLL


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture
def actor_train(path: str) -> Iterator[WorkerGroup]:
    """The worker group of one device, in this process."""
    make = ClassWithInitArgs(RewardFlowWorker, flow_config(path, noise_seed=ROLLS_NOISE), 10)
    group = create_worker_groups("inline", ResourcePool([1]), {"actor_train": make})["actor_train"]
    group.init_model()
    yield group
    group.shutdown()


def batch_of(rows: int, skip: int = 0) -> DataProto:
    """Video tensors and prompt strings, and nothing else."""
    made = clips(rows + skip)[list(range(skip, rows + skip))]
    return DataProto.from_single_dict({"video": made.batch["video"], "prompt": made.non_tensor_batch["prompt"]})


def worker_of(group: WorkerGroup) -> Any:
    transport: Any = group._transport
    return transport._slots[0].roles["actor_train"]


def formula(face_score: float, kl_loss: float) -> float:
    """As the seed has it."""
    return -(face_score - 0.54) / 0.16 * 0.1 + kl_loss


# ------------------------------------------------------------------------------------------------------- train_step


def test_the_usage_example(actor_train: WorkerGroup) -> None:
    move(worker_of(actor_train))  # the divergence and half of the gradients are 0 where an adapter starts
    batch = batch_of(3)
    results = actor_train.execute_all_sync("train_step", batch)
    registration = getattr(RewardFlowWorker.train_step, REGISTRATION)
    assert registration.dispatch_mode is Dispatch.DP_MP_DISPATCH_FIRST and registration.clear_cache is False
    assert len(results) == 1 and isinstance(results[0], DataProto)
    metrics = results[0].meta_info["metrics"]
    assert NAMES <= set(metrics) and all(isinstance(value, float) for value in metrics.values())
    assert metrics["actor/kl_loss"] > 0
    # the loss is linear in both means, as all three samples count
    assert metrics["actor/loss"] == pytest.approx(formula(metrics["actor/face_score"], metrics["actor/kl_loss"]))
    assert metrics["actor/no_face_frac"] == 0
    assert sorted(batch.batch.keys()) == ["video"] and not batch.meta_info, "the caller's batch stays as it was"


def test_one_optimizer_step_on_the_gradient_of_the_formula(actor_train: WorkerGroup, path: str) -> None:
    """Autograd on the module alone gives the gradient; the first step of AdamW without decay is lr g / (|g| + eps)."""
    expected, divergence = plain_gradient(path, 3, noise=ROLLS_NOISE)
    worker = worker_of(actor_train)
    move(worker)
    before = {name: value.full_tensor().detach().clone() for name, value in worker.engine.trained.items()}
    [result] = actor_train.execute_all_sync("train_step", batch_of(3))
    metrics = result.meta_info["metrics"]
    assert metrics["actor/kl_loss"] == pytest.approx(divergence, rel=1e-4)
    norm = float(np.sqrt(sum((value**2).sum() for value in expected.values())))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    scale = min(1.0, worker.config.actor.optim.clip_grad / norm)
    for name, gradient in expected.items():
        g = torch.from_numpy(gradient) * scale
        step = metrics["actor/lr"] * g / (g.abs() + worker.config.actor.optim.eps)
        found = before[name] - worker.engine.trained[name].full_tensor().detach()
        torch.testing.assert_close(found, step, rtol=1e-3, atol=1e-7)


def test_train_step_through_the_role_is_the_same_step(actor_train: WorkerGroup, path: str) -> None:
    by_role = values(FlowActorRole(actor_train, 1).train_step(batch_of(2)))
    again = ClassWithInitArgs(RewardFlowWorker, flow_config(path, noise_seed=ROLLS_NOISE), 10)()
    again.init_model()
    found = again.train_step(batch_of(2)).meta_info["metrics"]  # the method itself, as the seed has its signature
    assert NAMES <= set(by_role)
    assert {name: by_role[name] for name in NAMES} == {name: found[name] for name in NAMES}


def test_another_batch_has_other_references_and_each_step_other_noise(path: str) -> None:
    """Clips are known by their content: the first clip of a second batch is not that of the first. Without a constant
    noise a sample's is drawn anew in each step, and the same in a run that is repeated."""
    runs = []
    for _ in range(2):
        worker = RewardFlowWorker(flow_config(path, lr=0.0), total_training_steps=10)
        worker.init_model()
        steps = [(2, 0), (2, 0), (1, 2)]
        frames = []
        for rows, skip in steps:
            worker.train_step(batch_of(rows, skip))
            frames.append(worker.last_frames().batch["frames"])
        runs.append(frames)
        assert len(worker.engine.policy._references) == 3
    first, second, _ = runs[0]
    assert not torch.allclose(first, second, atol=1e-4) and not torch.allclose(first[0], first[1], atol=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop(["video"]), "train_step: column 'video' is missing"),
        (lambda data: data.pop([], ["prompt"]), "train_step: column 'prompt' is missing"),
        (lambda data: data.batch["video"].mul_(255), r"expected frames as floats in \[0, 1\]"),
        (lambda data: data.batch.set("video", data.batch["video"].byte()), "column 'video' has torch.uint8"),
    ],
)
def test_a_batch_of_something_else_is_refused(actor_train: WorkerGroup, change: Any, message: str) -> None:
    data = batch_of(2)
    change(data)
    with pytest.raises(ValueError, match=message):
        actor_train.execute_all_sync("train_step", data)


# -------------------------------------------------------------------------------------------------------- loss_func


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_loss_func(actor_train: WorkerGroup, shape: tuple[int, ...]) -> None:
    """The four arguments by name. What is given as loss goes on as it is; without it the formula is the loss."""
    actor_worker, data = worker_of(actor_train), batch_of(2)
    assert list(inspect.signature(actor_worker.loss_func).parameters) == ["data", "loss", "face_score", "kl_loss"]
    face_score, kl_loss = torch.full(shape, 0.70, requires_grad=True), torch.full(shape, 0.03, requires_grad=True)
    given = torch.tensor(0.25, requires_grad=True)
    loss, metrics = actor_worker.loss_func(data=data, loss=given, face_score=face_score, kl_loss=kl_loss)
    assert loss is given and set(metrics) == NAMES
    expected = {"actor/loss": 0.25, "actor/face_score": 0.70, "actor/kl_loss": 0.03}
    assert values(metrics) == pytest.approx(expected)

    loss, metrics = actor_worker.loss_func(data, None, face_score, kl_loss)
    assert loss.item() == pytest.approx(-(0.70 - 0.54) / 0.16 * 0.1 + 0.03) == pytest.approx(-0.07)
    assert values(metrics)["actor/loss"] == pytest.approx(-0.07)
    loss.backward()
    assert face_score.grad is not None and float(face_score.grad.sum()) == pytest.approx(-0.1 / 0.16)


# --------------------------------------------------------------------------------------------------- several ranks


def step_of(path: str, cut: bool) -> tuple[dict[str, float], int, dict[str, np.ndarray]]:
    """On each rank: the whole batch, or a part of it that nobody planned. Metrics, samples, and the adapter after."""
    worker = RewardFlowWorker(flow_config(path), total_training_steps=10)
    worker.init_model()
    whole = batch_of(3)
    data = whole.chunk(2)[torch.distributed.get_rank()] if cut else whole
    metrics = worker.train_step(data).meta_info["metrics"]
    after = {name: value.full_tensor().detach().numpy() for name, value in worker.engine.trained.items()}
    return metrics, len(worker.last_frames()), after


@pytest.mark.slow
def test_two_ranks_share_the_batch_and_both_give_the_whole_steps_numbers(path: str, ranks: Ranks) -> None:
    [(expected, samples, weights)] = ranks.run(step_of, path, False, size=1)
    assert samples == 3
    found = ranks.run(step_of, path, False, size=2)
    assert sorted(samples for _, samples, _ in found) == [1, 2]
    for metrics, _, after in found:
        assert {name: metrics[name] for name in NAMES} == pytest.approx({n: expected[n] for n in NAMES}, rel=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(after[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    with pytest.raises(RuntimeError, match="train_step: an unplanned batch was split over the ranks"):
        ranks.run(step_of, path, True, size=2)
