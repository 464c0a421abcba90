"""Trades time for memory in reward flow: recomputes the video decoder in the backward pass, offloads frozen modules.

Gradients with and without these tools are equal. `trainer.plan` predicts the memory that they save.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Decode = Callable[[torch.Tensor], torch.Tensor]
CacheEntry: TypeAlias = torch.Tensor | str | None
"""An entry of diffusers' feature cache: the last frames before a convolution, "Rep" after one frame, None at first."""


def checkpointed_decode(decode: Decode, vae: nn.Module) -> Decode:
    """Wraps `decode` so that the backward pass recomputes its activations instead of keeping them.

    A decoder that processes chunks of time with a feature cache (as in `AutoencoderKLWan`) gets one checkpoint per
    chunk: only the cache's tensors are kept between forward and backward, and the activations of at most one chunk
    exist at a time.

    Args:
        decode: turns latents into frames with `vae`.
        vae: video autoencoder, whose decoder's `forward` is replaced during a call.
    """
    # without a feature cache, the whole decoder is one checkpoint
    decoder: nn.Module | None = getattr(vae, "decoder", None)
    if decoder is None or "feat_cache" not in inspect.signature(decoder.forward).parameters:
        return cast("Decode", partial(checkpoint, decode, use_reentrant=False))
    plain = decoder.forward

    def run_chunk(chunk: torch.Tensor, first_chunk: bool, *cache: CacheEntry) -> tuple[CacheEntry, ...]:
        # a copy for the decoder to write to, because the backward pass runs this once more
        entries = list(cache)
        frames = plain(chunk, feat_cache=entries, feat_idx=[0], first_chunk=first_chunk)
        return frames, *entries

    def forward(
        chunk: torch.Tensor,
        feat_cache: list[CacheEntry],
        feat_idx: list[int],
        first_chunk: bool = False,
    ) -> torch.Tensor:
        frames, *entries = checkpoint(run_chunk, chunk, first_chunk, *feat_cache, use_reentrant=False)
        # in place: the autoencoder passes the same list with the next chunk
        feat_cache[:] = entries
        feat_idx[0] = len(feat_cache)
        return cast("torch.Tensor", frames)

    def decode_in_checkpoints(latents: torch.Tensor) -> torch.Tensor:
        decoder.forward = forward
        try:
            return decode(latents)
        finally:
            # the attribute hid the method of the class, which works again
            del decoder.forward

    return decode_in_checkpoints


class Placement:
    """Holds frozen modules (text encoder, high-noise expert) and keeps each on the device only while it is in use.

    The weights of these modules never change, so their host copies (pinned for a CUDA device) remain valid: moving a
    module to the device costs one copy, and removing it from the device costs none.

    Args:
        device: device on which the modules compute.
        offload: True moves modules to the host between uses; False keeps them on the device.
    """

    def __init__(self, device: torch.device, offload: bool) -> None:
        self.device = device
        self.offload = offload
        # per module: its tensors, each with its values on the host; no tensors without offloading
        self._homes: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, module: nn.Module) -> None:
        """Registers a frozen, unsharded `module` and moves it to the device, or to the host if `offload` is set."""
        module.to("cpu" if self.offload else self.device)
        self._homes[module] = []
        if not self.offload:
            return

        # copies from pinned memory do not block the host (`non_blocking` in `at_work`)
        is_pinned = self.device.type == "cuda"
        for tensor in (*module.parameters(), *module.buffers()):
            if is_pinned:
                tensor.data = tensor.data.pin_memory()
            home = tensor.data
            self._homes[module].append((tensor, home))

    @contextmanager
    def at_work(self, module: nn.Module) -> Iterator[None]:
        """Keeps `module` on the device inside the context, where gradients are disabled."""
        for tensor, home in self._homes[module]:
            tensor.data = home.to(self.device, non_blocking=True)
        try:
            # a backward pass would need the weights after they have left the device
            with torch.no_grad():
                yield
        finally:
            for tensor, home in self._homes[module]:
                tensor.data = home
