"""Where the recipe begins: a flow-matching model that learnt from carelessly captioned images, and the prompts."""

from __future__ import annotations

from pathlib import Path

import torch

from recipes.flow_grpo.model import TinyFlow
from recipes.flow_grpo.world import PROMPTS, captioned_images

NAME = "flow_grpo"
IMAGES, IMAGES_SEED, MODEL_SEED = 20_000, 1, 1
STEPS, BATCH, PEAK_LR = 1200, 160, 3e-3


def build(folder: Path) -> None:
    """Writes model/ and prompts.txt into `folder`."""
    pretrained(lambda line: print(f"{NAME}: {line}", flush=True)).save_pretrained(str(folder / "model"))
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")


def pretrained(report: object = None, steps: int = STEPS) -> TinyFlow:
    """A model trained by flow matching: mean of (v(x_t, t) - (x_1 - x_0))^2 with t uniform (Liu et al. 2023)."""
    images, captions = captioned_images(IMAGES, IMAGES_SEED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(MODEL_SEED)
        network = TinyFlow()
        data, conditions = images * 2 - 1, network.encode(captions)
        optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_LR, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=0.05)
        total = 0.0
        for step in range(1, steps + 1):
            rows = torch.randint(0, len(data), (BATCH,))
            noise, sigma = torch.randn(BATCH, *network.latent_shape), torch.rand(BATCH)
            mixed = torch.lerp(data[rows], noise, sigma.view(-1, 1, 1, 1))
            loss = (network(mixed, sigma, conditions[rows]) - (noise - data[rows])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
            if step % 250 == 0 and callable(report):
                report(f"flow matching, step {step}/{steps}  loss {total / 250:.3f}")
                total = 0.0
    return network


def made_from() -> list[Path]:
    """The files that decide what `build` writes."""
    return [Path(__file__).with_name(name) for name in ("start.py", "model.py", "world.py")]
