"""Tools that trade time for memory where gradients run through a video decoder and frozen parts stand beside it:
recomputing, and having frozen parts on the device only while they work.

They change no number: gradients with and without them are equal. `trainer.diffusion_plan` predicts what they save.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Decode = Callable[[torch.Tensor], torch.Tensor]


def checkpointed_decode(decode: Decode, vae: nn.Module) -> Decode:
    """`decode` from latents to frames by `vae`, recomputed in the backward pass.

    If the decoder works in chunks of time with a feature cache, as that of `AutoencoderKLWan` does, each chunk is a
    checkpoint: between forward and backward only the cache's tensors are kept, and the activations of a single chunk
    exist at one time.
    """
    decoder: Any = getattr(vae, "decoder", None)
    if decoder is None or "feat_cache" not in inspect.signature(decoder.forward).parameters:
        return cast("Decode", partial(checkpoint, decode, use_reentrant=False))
    plain = decoder.forward

    def run_chunk(chunk: torch.Tensor, first_chunk: bool, *cache: Any) -> tuple[Any, ...]:
        entries = list(cache)
        frames = plain(chunk, feat_cache=entries, feat_idx=[0], first_chunk=first_chunk)
        return frames, *entries

    def forward(
        chunk: torch.Tensor, feat_cache: list[Any], feat_idx: list[int], first_chunk: bool = False
    ) -> torch.Tensor:
        frames, *feat_cache[:] = checkpoint(run_chunk, chunk, first_chunk, *feat_cache, use_reentrant=False)
        feat_idx[0] = len(feat_cache)
        return cast("torch.Tensor", frames)

    def decode_in_checkpoints(latents: torch.Tensor) -> torch.Tensor:
        decoder.forward = forward
        try:
            return decode(latents)
        finally:
            del decoder.forward  # the class's own is found again

    return decode_in_checkpoints


class Placement:
    """Frozen modules that are on the device only while they work (text encoder, high-noise expert).

    A module's weights never change, so its copy on the host (pinned, for a CUDA device) stays: bringing it costs one
    copy, and sending it back none.

    Args:
        device: where they work.
        offload: False = all stay there.
    """

    def __init__(self, device: torch.device, offload: bool) -> None:
        self.device, self.offload = device, offload
        self._homes: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, module: nn.Module) -> None:
        """Takes charge of a frozen, whole `module`, which goes to the device, or to the host until it works."""
        module.to("cpu" if self.offload else self.device)
        self._homes[module] = []
        for tensor in (*module.parameters(), *module.buffers()) if self.offload else ():
            tensor.data = tensor.data.pin_memory() if self.device.type == "cuda" else tensor.data
            self._homes[module].append((tensor, tensor.data))

    @contextmanager
    def at_work(self, module: nn.Module) -> Iterator[None]:
        """Inside, `module` is on the device and runs without gradients: they would need its weights later."""
        for tensor, home in self._homes[module]:
            tensor.data = home.to(self.device, non_blocking=True)
        try:
            with torch.no_grad():
                yield
        finally:
            for tensor, home in self._homes[module]:
                tensor.data = home
