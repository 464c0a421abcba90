"""A small flow-matching model that learns to draw squares in seconds: a residual network over all pixels of an image.

It implements `workers.diffusion.sde_policy.FlowNetwork`: `encode` turns prompts into conditions, `forward` computes the
velocity, `decode` turns latents, which are pixels in this model, into frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from recipes.flow_grpo.world import SIZE, WORDS, captioned_images

WIDTH = 160
BLOCKS = 3
# sines and cosines each that encode sigma
FREQUENCIES = 16
LEAST_SIGMA = 0.05
"""Lower bound of the divisor in v = (x - x_0) / sigma, where x_0 is the image that the network predicts."""
WEIGHTS_FILE = "model.safetensors"

# of the pretraining
IMAGES = 20_000
IMAGES_SEED = 1
MODEL_SEED = 1
STEPS = 1200
BATCH = 160
PEAK_LR = 3e-3


class Block(nn.Module):
    """A residual block x + W2 silu(W1 norm(x)) with adaptive layer norm: the condition sets its scale and shift."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        modulation = self.modulation(condition)
        scale, shift = modulation.chunk(2, dim=-1)
        modulated = self.norm(x) * (1 + scale) + shift

        hidden = nn.functional.silu(self.inner(modulated))
        return x + self.outer(hidden)


class TinyFlow(nn.Module):
    """Predicts the velocity of SIZE x SIZE images in [-1, 1], conditioned on the words of a prompt."""

    latent_shape = (3, SIZE, SIZE)

    def __init__(self) -> None:
        super().__init__()
        num_values = math.prod(self.latent_shape)
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.time = nn.Linear(2 * FREQUENCIES, WIDTH)
        self.pixels = nn.Linear(num_values, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.image = nn.Linear(WIDTH, num_values)

    @classmethod
    def from_pretrained(cls, folder: str) -> TinyFlow:
        """Loads a model from a folder that `save_pretrained` wrote."""
        network = cls()
        weights = load_file(Path(folder) / WEIGHTS_FILE)
        network.load_state_dict(weights)
        return network

    def save_pretrained(self, folder: str) -> None:
        """Writes the weights into `folder`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), Path(folder) / WEIGHTS_FILE)

    def encode(self, prompts: Sequence[str]) -> torch.Tensor:
        """Returns (n, len(WORDS)), 1 for the words in each prompt and 0 for the others."""
        rows = []
        for prompt in prompts:
            words = prompt.split()
            rows.append([float(word in words) for word in WORDS])
        return torch.tensor(rows)

    def forward(self, latents: torch.Tensor, sigma: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Returns the velocity (n, 3, SIZE, SIZE) of latents (n, 3, SIZE, SIZE).

        Args:
            latents: noisy images, in the dtype of the computation.
            sigma: (n,), fp32.
            condition: (n, len(WORDS)).
        """
        dtype = latents.dtype
        waves = _waves(sigma).to(dtype)
        words = condition.to(dtype) @ self.words.weight
        time = self.time(waves)
        embedding = nn.functional.silu(words + time)

        x = self.pixels(latents.flatten(1))
        for block in self.blocks:
            x = block(x, embedding)
        pixels = self.image(self.norm(x))
        image = pixels.view_as(latents)

        # from x = (1 - sigma) x_0 + sigma x_1 follows v = x_1 - x_0 = (x - x_0) / sigma
        divisor = sigma.clamp(min=LEAST_SIGMA).to(dtype)
        return (latents - image) / divisor.view(-1, 1, 1, 1)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Converts latents to frames (n, 1, 3, SIZE, SIZE) in [0, 1]."""
        images = (latents + 1) / 2
        return images.clamp(0, 1).unsqueeze(1)


def _waves(sigma: torch.Tensor) -> torch.Tensor:
    """Returns sines and cosines of sigma (n,) at rates from 1 to 100, (n, 2 FREQUENCIES)."""
    highest_log = math.log(100.0)
    logs_of_rates = torch.linspace(0, highest_log, FREQUENCIES, device=sigma.device)
    rates = logs_of_rates.exp()
    angles = sigma[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def pretrained(tell: Callable[[str], None] = print, steps: int = STEPS) -> TinyFlow:
    """Trains a model by flow matching: mean of (v(x_t, t) - (x_1 - x_0))^2 with t uniform (Liu et al. 2023).

    Args:
        tell: called with lines on the progress.
        steps: number of optimizer steps.
    """
    images, captions = captioned_images(IMAGES, IMAGES_SEED)
    data = images * 2 - 1
    # the caller's random state stays as it is
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(MODEL_SEED)
        network = TinyFlow()
        conditions = network.encode(captions)
        optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_LR, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=0.05)
        total = 0.0
        for step in range(1, steps + 1):
            rows = torch.randint(0, len(data), (BATCH,))
            clean = data[rows]
            noise = torch.randn(BATCH, *network.latent_shape)
            sigma = torch.rand(BATCH)
            mixed = torch.lerp(clean, noise, sigma.view(-1, 1, 1, 1))
            velocity = network(mixed, sigma, conditions[rows])
            error = velocity - (noise - clean)
            loss = error.square().mean()

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
            if step % 250 == 0:
                # the mean since the last line, because single losses vary with sigma
                tell(f"flow matching, step {step}/{steps}  loss {total / 250:.3f}")
                total = 0.0
    return network
