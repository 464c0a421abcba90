"""The tools that save memory change no gradient, and hold less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from workers.diffusion.memory_saving import Placement, checkpointed_decode

WIDTH = 8


@pytest.fixture(scope="module")
def vae() -> Any:
    """A small AutoencoderKLWan, in double precision, whose weights let an input be felt in its output."""
    autoencoder = pytest.importorskip("diffusers").AutoencoderKLWan
    torch.manual_seed(3)
    network = autoencoder(
        base_dim=4, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True], scale_factor_spatial=2,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    network.requires_grad_(False)
    return network.double().eval()


def decoded(vae: Any, latents: torch.Tensor, enabled: bool) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Frames, gradient at the latents, sizes of what autograd saved without weights."""
    decode = (lambda z: vae.decode(z).sample) if hasattr(vae, "decode") else vae
    if enabled:
        decode = checkpointed_decode(decode, vae)
    latents, sizes = latents.clone().requires_grad_(True), list[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            sizes.append(tensor.numel())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        video = decode(latents)
    weights = torch.randn(video.shape, generator=torch.Generator().manual_seed(4), dtype=video.dtype)
    (video * weights).sum().backward()
    assert latents.grad is not None
    return video.detach(), latents.grad, sizes


def test_decoding_in_checkpoints_gives_the_same_frames_and_gradient(vae: Any) -> None:
    latents = torch.randn(1, 4, 2, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plain, recomputed = decoded(vae, latents, False), decoded(vae, latents, True)
    assert torch.equal(plain[0], recomputed[0]) and plain[1].abs().min() > 0
    torch.testing.assert_close(recomputed[1], plain[1], rtol=1e-12, atol=1e-14)
    assert sum(recomputed[2]) < 0.5 * sum(plain[2])
    assert "forward" not in vars(vae.decoder)


def test_each_chunk_of_decoding_is_recomputed_alone(vae: Any) -> None:
    """So at most one chunk's activations exist at one time: calls come one by one, between steps of the backward."""
    events: list[str] = []
    first = vae.decoder.conv_in.register_forward_hook(lambda *_: events.append("run"))
    last = vae.decoder.conv_out.register_full_backward_hook(lambda *_: events.append("back"))
    try:
        decoded(vae, torch.randn(1, 4, 3, 6, 6, dtype=torch.float64), True)
    finally:
        first.remove()
        last.remove()
    assert events == ["run"] * 3 + ["run", "back"] * 3


@pytest.mark.parametrize("fails", [False, True])
def test_a_placed_module_is_away_but_for_its_work(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A copy stands for the device's memory: inside it is there, afterwards the host's own tensors are back."""
    module: Any = nn.Linear(2, 2).requires_grad_(False)
    module.register_buffer("scale", torch.ones(2))

    def places() -> list[int]:
        return [tensor.data_ptr() for tensor in (module.weight, module.bias, module.scale)]

    homes, placement = places(), Placement(torch.device("cpu"), offload=True)
    placement.add(module)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor.clone())
    try:
        with placement.at_work(module):
            assert set(places()).isdisjoint(homes)
            assert not module(torch.ones(2, requires_grad=True)).requires_grad
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert places() == homes
