"""Checkpoints of 1, 2 or 4 ranks on any other of these numbers: whole tensors come back bit for bit.

For all that learns: the policy with both moments of Adam; and on 1 or 2 ranks the policy saved in the background, a
critic, an adapter, a policy with the moments of Muon.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_model import tiny_qwen2
from tests.workers.critic_cases import build_critic, critic_batch, value_loss, write_critic
from tests.workers.engine_cases import Batch, Case, build_engine, loss_fn, planned, ragged_batch, whole_state
from tests.workers.ranks import Ranks
from verl_lite.config import OptimConfig
from workers.engine.fsdp import FSDPEngine

pytestmark = pytest.mark.slow

BATCH = Batch(rows=9, shared_prompts=3)
OPTIM = OptimConfig(lr=1e-3, eps=1e-3, lr_warmup_steps=3, lr_scheduler_type="cosine")
KINDS = ("policy", "policy in the background", "critic", "adapter", "muon")
SIZES = (1, 2, 4)
State = dict[str, np.ndarray]


def engine_of(kind: str, path: str) -> FSDPEngine:
    if kind == "critic":
        return build_critic(path + "_critic", Case())
    adapter = {"lora_rank": 3, "lora_alpha": 6} if kind == "adapter" else {}
    case = Case(fsdp_size=1) if "background" in kind else Case()  # each rank holds everything
    optimizer = "muon" if kind == "muon" else "adamw"
    return build_engine(path, case, replace(OPTIM, optimizer=optimizer), model=adapter)


def train(engine: FSDPEngine, kind: str) -> None:
    """One call of two optimizer steps."""
    if kind == "critic":
        engine.train(planned(critic_batch(BATCH), Case(), 4)[0], value_loss)
        return
    data, _ = planned(ragged_batch(BATCH), Case(), mini_batch_size=4)
    engine.train(data, loss_fn, temperature=1.0, calculate_entropy=True)


def save(kind: str, path: str, folder: str) -> tuple[State, State, State]:
    """On each rank: the state at first, when it was saved, and after training on."""
    engine = engine_of(kind, path)
    first = whole_state(engine)
    train(engine, kind)
    train(engine, kind)
    saved = whole_state(engine)
    engine.save(folder, background="background" in kind)
    train(engine, kind)  # a save in the background must not see it
    engine.finish_save()
    return first, saved, whole_state(engine)


def load(kind: str, path: str, folder: str) -> tuple[State, State]:
    """On each rank: the state that was loaded, and after training on."""
    engine = engine_of(kind, path)
    engine.load(folder)
    loaded = whole_state(engine)
    train(engine, kind)
    return loaded, whole_state(engine)


class Checkpoints:
    """One checkpoint of each kind and number of ranks, made when it is first asked for."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.path = tiny_qwen2(folder / "model", hidden=32, heads=4, kv_heads=2)
        write_critic(self.path, Path(self.path + "_critic"))
        self.made: dict[tuple[str, int], tuple[State, State, State]] = {}

    def of(self, kind: str, size: int) -> tuple[str, tuple[State, State, State]]:
        """Its folder, and what `save` gave."""
        folder = str(self.folder / f"{kind}_{size}")
        if (kind, size) not in self.made:
            self.made[kind, size] = self.ranks.run(save, kind, self.path, folder, size=size)[0]
        return folder, self.made[kind, size]


@pytest.fixture(scope="module")
def checkpoints(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(ranks, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("kind", "save_on", "load_on"),
    [case for case in itertools.product(KINDS, SIZES, SIZES) if case[0] == "policy" or max(case[1:]) < max(SIZES)],
)
def test_what_is_loaded_is_what_was_saved(kind: str, save_on: int, load_on: int, checkpoints: Checkpoints) -> None:
    folder, (first, saved, continued) = checkpoints.of(kind, save_on)
    assert len(list(Path(folder).glob("*.distcp"))) == save_on, "each rank writes its shards"
    for loaded, after in checkpoints.ranks.run(load, kind, checkpoints.path, folder, size=load_on):
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            assert np.array_equal(loaded[name], value), name
            # of the sum of gradients over the ranks, which the bf16 iteration of Muon amplifies
            tolerance = 0.0 if load_on == save_on else 2e-4 if kind == "muon" else 2e-6
            assert np.abs(after[name] - continued[name]).max() <= tolerance, name
    assert not all(np.array_equal(first[name], saved[name]) for name in saved if "exp_avg" not in name)
    moments = [name for name in saved if name.startswith(("exp_avg", "momentum."))]
    single = sum(name.startswith("momentum.") for name in moments)
    assert len(moments) == 2 * (len(saved) - 2 - 2 * single) // 3 + single and bool(single) == (kind == "muon")
    assert all(saved[name].any() for name in moments)
