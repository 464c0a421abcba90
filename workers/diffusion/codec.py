"""The way between clips and latents: a video VAE behind two calls, with the latents normalised as the model knows them.

A VAE is diffusers' AutoencoderKLWan, or a module with its `decode` and its `config` that encodes by
`encode_video(video) -> latents`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verl_lite.errors import UserError


class LatentCodec:
    """vae: frozen. Its weights' dtype is that of the computation; latents and frames are fp32 on both sides."""

    def __init__(self, vae: nn.Module) -> None:
        self.vae: Any = vae
        config: Any = self.vae.config
        self.channels = int(config.z_dim)
        self.temporal_factor = int(config.scale_factor_temporal)
        self.spatial_factor = int(config.scale_factor_spatial)
        self._mean = torch.tensor(config.latents_mean, dtype=torch.float32).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(config.latents_std, dtype=torch.float32).view(1, -1, 1, 1, 1)

    def latent_shape(self, frames: int, height: int, width: int, multiple: int = 1) -> tuple[int, int, int, int]:
        """(C, T, h, w) of a clip's latents. multiple: that h and w have to be of, a transformer's patch.

        Raises UserError for a clip that the VAE cannot bring back at its own size.
        """
        if frames < 1 or (frames - 1) % self.temporal_factor:
            raise UserError(
                f"data.num_frames={frames}: this pipeline takes {self.temporal_factor} k + 1 frames, such as "
                f"{(frames - 1) // self.temporal_factor * self.temporal_factor + 1}"
            )
        sides = self.spatial_factor * multiple
        if height % sides or width % sides:
            raise UserError(
                f"data.height={height}, data.width={width}: this pipeline takes multiples of {sides} "
                "(data.side_multiple)"
            )
        t = (frames - 1) // self.temporal_factor + 1
        return self.channels, t, height // self.spatial_factor, width // self.spatial_factor

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """Normalised latents (b, C, T, h, w) of a clip (b, 3, F, H, W) in [-1, 1]: the most likely ones."""
        video = video.to(self.vae.dtype)
        if hasattr(self.vae, "encode_video"):
            latents = self.vae.encode_video(video)
        else:
            latents = self.vae.encode(video).latent_dist.mode()
        latents = latents.float()
        return (latents - self._mean.to(latents.device)) / self._std.to(latents.device)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Frames (b, F, 3, H, W) in [-1, 1] of normalised latents (b, C, T, h, w), differentiable."""
        plain = latents * self._std.to(latents.device) + self._mean.to(latents.device)
        video = self.vae.decode(plain.to(self.vae.dtype), return_dict=False)[0]
        return video.float().clamp(-1, 1).transpose(1, 2)
