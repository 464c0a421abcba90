"""The worker of reward flow: one gradient however the batch is cut, and what leaves it.

That a run goes on exactly is in tests/e2e/test_reward_flow_resume.py, what an adapter's checkpoint holds in
test_adapter.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.diffusion.actor_cases import gradient, move, part, plain_gradient, trained, worker_of
from tests.workers.diffusion.tiny_wan import ALL_CHECKPOINTS, tiny_pipeline
from tests.workers.ranks import OnRanks

diffusers = pytest.importorskip("diffusers")

TOLERANCE = {"rtol": 1e-4, "atol": 1e-7}
"""Of gradients that are sums of the same fp32 terms in another order."""
IN_ROOT = {"min_num_params": 1 << 40}


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """A group that a test here makes is no other test's."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, **TOLERANCE, err_msg=name)


@pytest.mark.parametrize(
    ("micro_batch_size", "options"),
    [
        (1, {}),
        (2, ALL_CHECKPOINTS),
        (3, IN_ROOT),
        (3, {"checkpoint_steps": True, **IN_ROOT}),
        (2, {"checkpoint_steps": True, "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_the_engine_has_the_plain_modules_gradient(path: str, micro_batch_size: int, options: dict[str, Any]) -> None:
    """FSDP2 with many calls of each block in one forward, others without gradient and without adapter between them."""
    expected, divergence = plain_gradient(path, 3)
    found, metrics = gradient(path, 3, micro_batch_size, (), options)
    assert_same(found, expected)
    assert metrics["actor/kl_loss"] == pytest.approx(divergence, rel=1e-4)


def test_in_half_precision_the_adapter_and_its_gradient_stay_fp32(path: str) -> None:
    worker = worker_of(path, param_dtype="bf16")
    assert not any("high" in name or ".lora_" not in name for name in worker.engine.trained)
    kinds = {value.dtype for name, value in worker.engine.parameters.items() if ".lora_" in name}
    frozen = {name: value.dtype for name, value in worker.engine.parameters.items() if ".lora_" not in name}
    assert kinds == {torch.float32} and frozen["patch_embedding.weight"] == torch.bfloat16
    assert frozen["scale_shift_table"] == torch.float32  # diffusers keeps it so
    expected, _ = plain_gradient(path, 2)
    found, _ = gradient(path, 2, 2, (), {"param_dtype": "bf16", **ALL_CHECKPOINTS})
    assert_near(found, expected)


def assert_near(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The same direction, as a whole: products of bf16 numbers differ by 1 in 256."""
    a, b = (np.concatenate([gradients[name].ravel() for name in expected]) for gradients in (found, expected))
    assert a.dtype == np.float32 and float(a @ b) > 0.99 * float(np.linalg.norm(a) * np.linalg.norm(b))


def test_metrics_of_a_batch_with_a_sample_that_does_not_count(path: str) -> None:
    expected, _ = plain_gradient(path, 3, without_face=(1,))
    found, metrics = gradient(path, 3, 2, (1,), {})
    assert_same(found, expected)
    scores = worker_of(path)
    move(scores)
    samples = scores.sample(part(3, 3, (1,))).batch
    assert metrics["actor/no_face_frac"] == pytest.approx(1 / 3)
    assert metrics["actor/face_score"] == pytest.approx(float(samples["face_score"].sum()) / 2, rel=1e-4)
    assert samples["counted"].sum() == 2


def test_frames_of_the_last_step_are_those_it_was_trained_on(path: str) -> None:
    worker = worker_of(path)
    data = part(3, 2)
    expected = worker.sample(data).batch["frames"]
    worker.train_step(data)
    last = worker.last_frames()
    assert sorted(last.batch["row"].tolist()) == [0, 1, 2]
    for row, frames in zip(last.batch["row"].tolist(), last.batch["frames"], strict=True):
        place = [int(r) for r in data.batch["row"]].index(row)
        torch.testing.assert_close(frames, expected[place], rtol=1e-5, atol=1e-6)
    assert 0 <= float(last.batch["frames"].min()) <= float(last.batch["frames"].max()) <= 1


@pytest.mark.parametrize("layout", ["i2v", "ti2v"])
def test_the_exported_adapter_gives_the_same_frames_in_diffusers(layout: str, tmp_path: Path) -> None:
    """Written by the worker, read by load_lora_weights of a fresh pipeline, sampled by our own sampler."""
    folder = tiny_pipeline(tmp_path / "pipeline", layout=layout)
    worker, data = worker_of(folder), part(2, 2)
    fresh_frames = worker.sample(data).batch["frames"]
    move(worker)
    expected = worker.sample(data).batch["frames"]
    worker.export_lora(str(tmp_path / "lora"))
    assert not torch.allclose(fresh_frames, expected, atol=1e-4)

    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(folder, vae=None)
    second = layout == "i2v"
    pipeline.load_lora_weights(str(tmp_path / "lora"), **({"load_into_transformer_2": True} if second else {}))
    expert = pipeline.transformer_2 if second else pipeline.transformer
    plain = worker_of(folder)
    plain.engine.policy._velocity = (  # type: ignore[operator]
        lambda given, inputs, original=plain.engine.policy._velocity: original(  # type: ignore[misc]
            expert if given is plain.engine.policy.model else given, inputs
        )
    )
    found = plain.sample(data).batch["frames"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_training_through_a_wan_autoencoder(tmp_path: Path) -> None:
    """The wiring of diffusers' own decoder, recomputed and not; a random one hardly lets the adapter be felt."""
    folder = tiny_pipeline(tmp_path / "pipeline", vae="wan", layers=1)
    expected, found = (gradient(folder, 1, 1, (), options)[0] for options in ({}, ALL_CHECKPOINTS))
    assert all(np.abs(value).max() > 0 for value in expected.values())
    assert_same(found, expected)


# --- several ranks ------------------------------------------------------------------------------------------------

CUTS: list[tuple[int, int, tuple[int, ...], dict[str, Any]]] = [
    (3, 1, (), {}),  # one rank has a micro-batch of padding
    (4, 2, (1,), ALL_CHECKPOINTS),
    (3, 2, (0,), {"checkpoint_steps": True, **IN_ROOT}),
    (1, 1, (), {"enable_gradient_checkpointing": True}),  # a rank has nothing at all
]


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(path: str, two_ranks: OnRanks, tmp_path: Path) -> None:
    for rows, micro_batch_size, without_face, options in CUTS:
        expected, _ = plain_gradient(path, rows, without_face)
        for found, _ in two_ranks(gradient, path, rows, micro_batch_size, without_face, options):
            assert_same(found, expected)
    for found, _ in two_ranks(gradient, path, 2, 1, (), {"param_dtype": "bf16"}):
        assert_near(found, plain_gradient(path, 2)[0])
    one_step, folder = trained(path, 3), str(tmp_path / "actor")
    two = two_ranks(trained, path, 3, folder)
    for found in two:
        assert found.keys() == one_step.keys()
        for name, value in one_step.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    loaded = trained(path, 0, load=folder)  # on another number of ranks
    assert all(np.array_equal(loaded[name], value) for name, value in two[0].items())
