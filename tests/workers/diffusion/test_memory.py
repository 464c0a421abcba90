"""The tools that save memory change no gradient, and hold less."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.workers.ranks import Ranks
from workers.diffusion import memory
from workers.diffusion.memory import (
    Placement,
    activation_offload,
    checkpointed_decode,
    checkpointed_step,
)

WIDTH, STEPS = 8, 4


class Network(nn.Module):
    """A few layers, of which one learns, applied several times to what it gave: the shape of denoising."""

    def __init__(self, checkpoint_steps: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.requires_grad_(False)
        cast("nn.Linear", self.layers[2]).weight.requires_grad_(True)
        self.dropout = nn.Dropout(dropout)
        self.step = checkpointed_step(self._step, checkpoint_steps)

    def _step(self, x: torch.Tensor, sigma: float) -> torch.Tensor:
        velocity = x
        for layer in self.layers:
            velocity = torch.tanh(layer(self.dropout(velocity)))
        return x - sigma * velocity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(STEPS):
            x = self.step(x, 0.5 / (i + 1))
        return x


class Saved:
    """Counts what autograd saves, without parameters."""

    def __init__(self) -> None:
        self.tensors = self.numbers = 0

    def __enter__(self) -> Saved:
        self.hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not memory._is_weight(tensor):
            self.tensors += 1
            self.numbers += tensor.numel()
        return tensor.detach()


def gradient(network: Network, x: torch.Tensor) -> torch.Tensor:
    network.zero_grad()
    network(x).square().sum().backward()
    return weight_gradient(network)


def weight_gradient(network: Network) -> torch.Tensor:
    gradient = cast("nn.Linear", network.layers[2]).weight.grad
    assert gradient is not None
    return gradient.full_tensor().clone() if isinstance(gradient, DTensor) else gradient.clone()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_steps_recomputed_give_the_same_gradient(dropout: float) -> None:
    """Also where random numbers are drawn inside."""
    x, gradients = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)), []
    for enabled in (False, True):
        network = Network(enabled, dropout)
        torch.manual_seed(5)
        gradients.append(gradient(network, x))
    assert gradients[0].abs().max() > 0.01
    assert torch.equal(*gradients)


def test_steps_recomputed_save_their_arguments_alone() -> None:
    """The first step's latents do not need gradients, so they are saved like any argument: one tensor a step."""
    x = torch.randn(3, WIDTH)
    with Saved() as plain:
        Network(False)(x)
    with Saved() as recomputed:
        Network(True)(x)
    assert recomputed.tensors <= STEPS < plain.tensors
    assert recomputed.numbers <= STEPS * x.numel()


def sharded_gradient(checkpoint_steps: bool) -> torch.Tensor:
    """Every rank has the same rows, and FSDP takes the mean over ranks."""
    network = Network(checkpoint_steps)
    for layer in network.layers[1:]:  # the first one is in the root's own group
        fully_shard(layer)
    fully_shard(network)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    return gradient(network, x)


@pytest.mark.slow
def test_steps_recomputed_inside_the_root_forward_of_fsdp() -> None:
    expected = gradient(Network(), torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)))
    with Ranks(2) as ranks:
        for world, enabled in ((1, True), (2, False), (2, True)):
            for found in ranks.run(sharded_gradient, enabled, size=world):
                torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-5, atol=1e-7)


# -- decoding ----------------------------------------------------------------------------------------------------------


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


def decoded(vae: Any, enabled: bool, frames: int = 2, side: int = 6) -> tuple[torch.Tensor, torch.Tensor, Saved]:
    """Frames, gradient at the latents, what was saved."""
    latents = torch.randn(1, 4, frames, side, side, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    latents.requires_grad_(True)
    decode = checkpointed_decode(lambda z: vae.decode(z).sample, enabled, vae)
    with Saved() as saved:
        video = decode(latents)
    weights = torch.randn(video.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (video * weights).sum().backward()
    assert latents.grad is not None
    return video.detach(), latents.grad, saved


def test_decoding_in_checkpoints_gives_the_same_frames_and_gradient(vae: Any) -> None:
    plain, recomputed = decoded(vae, False), decoded(vae, True)
    assert torch.equal(plain[0], recomputed[0])
    assert plain[1].abs().min() > 0
    torch.testing.assert_close(recomputed[1], plain[1], rtol=1e-12, atol=1e-14)
    assert recomputed[2].numbers < 0.5 * plain[2].numbers
    assert "forward" not in vars(vae.decoder)


def test_each_chunk_of_decoding_is_recomputed_alone(vae: Any) -> None:
    """So at most one chunk's activations exist at one time: calls come one by one, between steps of the backward."""
    events: list[str] = []
    first = vae.decoder.conv_in.register_forward_hook(lambda *_: events.append("run"))
    last = vae.decoder.conv_out.register_full_backward_hook(lambda *_: events.append("back"))
    try:
        decoded(vae, True, frames=3)
    finally:
        first.remove()
        last.remove()
    assert events == ["run"] * 3 + ["run", "back"] * 3


def test_any_other_decoder_is_one_checkpoint() -> None:
    decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    found = []
    for enabled in (False, True):
        latents = torch.ones(1, WIDTH, requires_grad=True)
        with Saved() as saved:
            frames = checkpointed_decode(decoder, enabled, decoder)(latents)
        frames.sum().backward()
        found.append((latents.grad, saved.tensors))
    assert found[0][0] is not None and found[1][0] is not None
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1] == 1 < found[0][1]


# -- host memory -------------------------------------------------------------------------------------------------------


def test_offload_moves_activations_and_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would move is recorded in place of a copy, since there is no device here."""
    moved: list[torch.Tensor] = []

    def to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        if not memory._is_weight(tensor):
            moved.append(tensor)
        return tensor.device, tensor.detach().clone()

    monkeypatch.setattr(memory, "_to_host", to_host)
    network = Network()
    x = torch.randn(3, WIDTH)
    expected = gradient(network, x)
    assert not moved
    with activation_offload(True):
        loss = network(x).square().sum()
    network.zero_grad()
    loss.backward()
    assert torch.equal(weight_gradient(network), expected)
    assert moved
    assert all(tensor.shape == x.shape for tensor in moved)  # never a (WIDTH, WIDTH) weight


# -- placement ---------------------------------------------------------------------------------------------------------


def frozen() -> Any:
    module = nn.Linear(2, 2).requires_grad_(False)
    module.register_buffer("scale", torch.ones(2))
    return module


def test_a_placed_module_is_away_but_for_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy stands for the device's memory: inside it is there, afterwards the host's own tensors are back."""
    monkeypatch.setattr(memory, "_copied", lambda home, device: home.clone())
    module = frozen()
    homes = [tensor.data_ptr() for tensor in (module.weight, module.bias, module.scale)]
    placement = Placement(torch.device("cpu"), offload=True)
    placement.add(module)
    with placement.at_work(module):
        inside = [tensor.data_ptr() for tensor in (module.weight, module.bias, module.scale)]
        assert set(inside).isdisjoint(homes)
        assert not module(torch.ones(2, requires_grad=True)).requires_grad
    assert [tensor.data_ptr() for tensor in (module.weight, module.bias, module.scale)] == homes


def test_a_placed_module_goes_home_after_an_error() -> None:
    module, placement = frozen(), Placement(torch.device("cpu"), offload=True)
    home = module.weight.data_ptr()
    placement.add(module)
    with pytest.raises(ZeroDivisionError), placement.at_work(module):
        raise ZeroDivisionError
    assert module.weight.data_ptr() == home
    with placement.at_work(module):
        pass


def test_what_learns_cannot_be_placed() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear: weight learns"):
        Placement(torch.device("cpu"), offload=True).add(module)
