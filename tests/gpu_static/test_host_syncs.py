"""Where the host waits for the device: nowhere in a loss. What would wait on CUDA is seen on a CPU by its operator."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_lite.config import ActorConfig, CriticConfig, PolicyLossConfig
from verl_lite.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl_lite.protocol import DataProto
from verl_lite.registry import takes
from workers.losses import actor_loss, critic_loss

ROOT = Path(__file__).resolve().parents[2]
ROWS, WIDTH = 6, 10
WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique_dim", "_unique2"}
"""Operators whose result the host reads, or whose size it has to know."""


class HostSyncs(TorchDispatchMode):
    """Counts them by the line of the project that asks. A test's own lines count as the line that they call."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        picks = name in ("index", "index_put", "index_put_") and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in args[1]
        )
        if picks or name in WAITING:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT))]
        ours = [frame for frame in ours if ".venv" not in frame.filename and "gpu_static" not in frame.filename]
        place = f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}" if ours else "?"
        self.lines[f"{name} {place}"] += 1


@contextmanager
def host_syncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Inside, lines where the host would wait are counted. `tolist` reads memory without an operator."""
    mode, tolist = HostSyncs(), torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        mode.note("tolist")
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    with mode:
        yield mode.lines


def columns(*more: str) -> DataProto:
    """A micro-batch of the actor with a hole, a short row and those columns."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(ROWS, WIDTH, dtype=torch.long)
    mask[0, 3], mask[1, 5:] = 0, 0
    tensors = {
        "response_mask": mask,
        "advantages": torch.randn(ROWS, WIDTH, generator=generator),
        **{name: -torch.rand(ROWS, WIDTH, generator=generator) for name in more},
    }
    if "selected" in more:
        tensors["selected"] = mask.bool()
    if "scores" in more:
        tensors["scores"] = torch.randn(ROWS, generator=generator)
    return DataProto.from_dict(tensors, meta_info={"num_tokens": int(mask.sum()), "num_sequences": ROWS})


@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSS_REGISTRY))
def test_no_policy_loss_waits_for_the_device(loss_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss_fn = get_policy_loss_fn(loss_mode)
    more = [name for name in ("selected", "scores") if takes(loss_fn, name)]
    data = columns("old_log_probs", "rollout_log_probs", "ref_log_prob", *more)
    options = PolicyLossConfig(loss_mode=loss_mode, dro_beta=0.5)
    config = ActorConfig(use_kl_loss=True, entropy_coeff=0.01, router_aux_loss_coef=0.01, policy_loss=options)
    outputs = {name: (-torch.rand(ROWS, WIDTH)).requires_grad_() for name in ("log_probs", "entropys")}
    outputs |= {"router_aux_loss": torch.rand(ROWS).requires_grad_(), "router_replay": torch.ones(ROWS, 2)}
    with host_syncs(monkeypatch) as lines:
        loss, _ = actor_loss(data, outputs, config)
        loss.backward()
    assert not lines


def test_the_critic_s_loss_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    data = columns("values", "returns")
    outputs = {"values": torch.randn(ROWS, WIDTH, requires_grad=True)}
    with host_syncs(monkeypatch) as lines:
        loss, _ = critic_loss(data, outputs, CriticConfig(), ActorConfig())
        loss.backward()
    assert not lines


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool(x.any()),
    ],
    ids=["item", "tolist", "bool index", "nonzero", "bool"],
)
def test_each_way_to_wait_is_seen(wait: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with host_syncs(monkeypatch) as lines:
        wait(torch.randn(4))
    assert len(lines) == 1
