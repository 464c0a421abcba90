"""Between clips and latents of the embedded run: eigenfaces (Turk and Pentland 1991) in place of a video autoencoder.

As Wan's autoencoder it makes one latent frame of the first frame and one of every four after it. In a latent frame
`APPEARANCE` numbers say how the frame (or the mean of four) differs from the mean picture, along the directions in
which pictures vary most, in units of their standard deviation; `MOTION` numbers say likewise how the four differ from
their mean. Decoding is linear, so any latents give something like a face.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config

CHANNELS, GRID, BLOCK = 16, 2, 4
APPEARANCE, MOTION = 48, 16


class EigenfaceCodec(ModelMixin, ConfigMixin):
    """Linear encoder and decoder for clips of one size, (3, height, width) in [-1, 1].

    mean (d,); basis (d, APPEARANCE) with the standard deviations in its columns' lengths; motion_basis
    (BLOCK * APPEARANCE, MOTION) likewise.
    """

    @register_to_config
    def __init__(
        self,
        height: int,
        width: int,
        scale_factor_spatial: int,
        z_dim: int = CHANNELS,
        scale_factor_temporal: int = BLOCK,
        latents_mean: tuple[float, ...] = (0.0,) * CHANNELS,
        latents_std: tuple[float, ...] = (1.0,) * CHANNELS,
    ) -> None:
        super().__init__()
        self.size = (height, width)
        pixels = 3 * height * width
        shapes = {"mean": (pixels,), "basis": (pixels, APPEARANCE), "motion_basis": (BLOCK * APPEARANCE, MOTION)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    @classmethod
    def fit(cls, clips: torch.Tensor, generator: torch.Generator) -> EigenfaceCodec:
        """clips: (n, 1 + BLOCK, 3, H, W) in [-1, 1]."""
        count, _, _, height, width = clips.shape
        pixels = clips.flatten(2)  # (n, F, d)
        mean = pixels.flatten(0, 1).mean(0)
        basis = principal((pixels[:, :: BLOCK // 2] - mean).flatten(0, 1), APPEARANCE, generator)
        blocks = (pixels[:, 1:] - mean) @ (basis / basis.square().sum(0))  # (n, BLOCK, APPEARANCE)
        moves = (blocks - blocks.mean(1, keepdim=True)).reshape(count, -1)
        codec = cls(height, width, height // GRID)
        codec.load_state_dict({"mean": mean, "basis": basis, "motion_basis": principal(moves, MOTION, generator)})
        return codec

    def encode_video(self, video: torch.Tensor) -> torch.Tensor:
        """Latents (B, CHANNELS, f, GRID, GRID) with f = 1 + (F - 1) / BLOCK of a video (B, 3, F, H, W) in [-1, 1]."""
        pixels = video.transpose(1, 2).flatten(2)  # (B, F, d)
        levels = (pixels - self.mean) @ (self.basis / self.basis.square().sum(0))
        blocks = levels[:, 1:].reshape(len(video), (video.shape[2] - 1) // BLOCK, BLOCK, APPEARANCE)
        middle = blocks.mean(2)  # (B, f - 1, APPEARANCE)
        moves = (blocks - middle[:, :, None]).flatten(2) @ (self.motion_basis / self.motion_basis.square().sum(0))
        first = torch.cat([levels[:, :1], moves.new_zeros(len(video), 1, MOTION)], -1)
        latents = torch.cat([first, torch.cat([middle, moves], -1)], 1)  # (B, f, APPEARANCE + MOTION)
        return latents.unflatten(-1, (CHANNELS, GRID, GRID)).transpose(1, 2)

    def decode(self, latents: torch.Tensor, return_dict: bool = True) -> SimpleNamespace | tuple[torch.Tensor]:
        """The video (B, 3, F, H, W), not clamped, of latents (B, CHANNELS, f, GRID, GRID); as AutoencoderKLWan.decode,
        in `.sample` or a tuple."""
        numbers = latents.transpose(1, 2).flatten(2)  # (B, f, APPEARANCE + MOTION)
        levels, moves = numbers.split([APPEARANCE, MOTION], -1)
        shifts = (moves[:, 1:] @ self.motion_basis.T).unflatten(-1, (BLOCK, APPEARANCE))
        blocks = (levels[:, 1:, None] + shifts).flatten(1, 2)
        pixels = torch.cat([levels[:, :1], blocks], 1) @ self.basis.T + self.mean
        video = pixels.unflatten(-1, (3, *self.size)).transpose(1, 2)
        return SimpleNamespace(sample=video) if return_dict else (video,)


def principal(rows: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """(d, count): the directions of most variance of centred rows (n, d), each as long as its standard deviation.

    By subspace iteration from a random start, with the sign that makes the sum positive.
    """
    subspace = torch.linalg.qr(torch.randn(rows.shape[1], count + 16, generator=generator))[0]
    for _ in range(4):
        subspace = torch.linalg.qr(rows.T @ (rows @ subspace))[0]
    seen = rows @ subspace
    variances, turn = torch.linalg.eigh(seen.T @ seen / len(rows))
    directions = (subspace @ turn).flip(1)[:, :count]
    return directions * directions.sum(0).sign() * variances.flip(0)[:count].sqrt()
