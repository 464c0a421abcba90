"""The codec of the embedded run: eigenfaces (Turk and Pentland 1991) in place of a video autoencoder.

Like Wan's autoencoder it encodes the first frame as one latent frame, and each following block of four frames as one.
A latent frame holds the principal components of the block's mean frame, in units of their standard deviations.
Decoding is linear, so all latents decode to something like a face.
"""

from __future__ import annotations

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config

# channels of Wan's latents
CHANNELS = 16
# side of a latent frame, which a transformer with patches of this size reads as one token
GRID = 2
# frames in one latent frame, as in Wan's autoencoder
BLOCK = 4
NUMBERS = CHANNELS * GRID * GRID


class EigenfaceCodec(ModelMixin, ConfigMixin):
    """Linear encoder and decoder for clips with frames (3, size, size) in [-1, 1].

    Attributes:
        mean: (d,) mean frame.
        basis: (d, NUMBERS) principal directions; the norm of a column is the standard deviation.
    """

    @register_to_config
    def __init__(
        self,
        size: int,
        scale_factor_spatial: int,
        z_dim: int = CHANNELS,
        scale_factor_temporal: int = BLOCK,
        latents_mean: tuple[float, ...] = (0.0,) * CHANNELS,
        latents_std: tuple[float, ...] = (1.0,) * CHANNELS,
    ) -> None:
        super().__init__()
        # `register_to_config` keeps all arguments; those with names of Wan's autoencoder are read by `LatentCodec`
        self.size = size
        pixels = 3 * size**2
        self.mean = torch.nn.Parameter(torch.zeros(pixels), requires_grad=False)
        self.basis = torch.nn.Parameter(torch.zeros(pixels, NUMBERS), requires_grad=False)

    @classmethod
    def fit(cls, clips: torch.Tensor) -> EigenfaceCodec:
        """Fits a codec to clips (n, 1 + BLOCK, 3, H, W) in [-1, 1]. Uses torch's random state for a low-rank SVD."""
        side = clips.shape[-1]
        codec = cls(side, side // GRID)
        pixels = clips.flatten(2)  # (n, F, d)
        codec.mean.data = pixels.flatten(0, 1).mean(0)

        frames = pixels[:, :: BLOCK // 2]
        centred = (frames - codec.mean).flatten(0, 1)
        # more directions than are used make the low-rank approximation of the used ones better
        _, singular_values, directions = torch.svd_lowrank(centred, NUMBERS + 16, niter=4)

        scaled = directions[:, :NUMBERS] * singular_values[:NUMBERS]
        codec.basis.data = scaled / len(centred) ** 0.5
        return codec

    def encode_video(self, video: torch.Tensor) -> torch.Tensor:
        """Encodes a video (B, 3, F, H, W) in [-1, 1] as (B, CHANNELS, f, GRID, GRID) with f = 1 + (F - 1) / BLOCK."""
        pixels = video.transpose(1, 2).flatten(2)  # (B, F, d)
        first_frame = pixels[:, :1]
        later_frames = pixels[:, 1:]
        blocks = later_frames.unflatten(1, (-1, BLOCK))
        latent_frames = torch.cat([first_frame, blocks.mean(2)], 1)

        # the columns of the basis are orthogonal, so this is its pseudo-inverse
        squared_norms = self.basis.square().sum(0)
        inverse = self.basis / squared_norms
        numbers = (latent_frames - self.mean) @ inverse

        latents = numbers.unflatten(-1, (CHANNELS, GRID, GRID))
        return latents.transpose(1, 2)

    def decode(self, latents: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        """Decodes latents (B, CHANNELS, f, GRID, GRID) into a video (B, 3, F, H, W), not clamped."""
        numbers = latents.transpose(1, 2).flatten(2)
        decoded = numbers @ self.basis.T + self.mean  # (B, f, d)
        first_frame = decoded[:, :1]
        # a block becomes equal frames, because only its mean is encoded
        blocks = decoded[:, 1:]
        later_frames = blocks.repeat_interleave(BLOCK, 1)
        pixels = torch.cat([first_frame, later_frames], 1)

        frames = pixels.unflatten(-1, (3, self.size, self.size))
        video = frames.transpose(1, 2)
        # a tuple, as diffusers' autoencoders return with return_dict=False
        return (video,)
