"""The smallest run there is, whole and in this process: its files, its options, what it leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tiny_model import tiny_qwen2
from tests.tiny_run import REWARD, good_row, write_rows
from trainer.launch.ppo_job import run_ppo
from trainer.ray_trainer import RayPPOTrainer


def write_files(folder: Path, texts: Sequence[str], reward: str = REWARD, **model: int) -> Path:
    """policy/, reward.py and prompts.jsonl of these questions."""
    tiny_qwen2(folder / "policy", **model)
    prompts = [[{"role": "user", "content": text}] for text in texts]
    changes = ({"prompt": prompt, "reward_model": {"ground_truth": "truth"}} for prompt in prompts)
    write_rows(folder / "prompts.jsonl", (good_row(row, "talk") | change for row, change in enumerate(changes)))
    (folder / "reward.py").write_text(reward)
    return folder


def options_of(folder: Path, name: str = "run") -> list[str]:
    """Options of a run in folder/name, of four prompts a step and one optimizer step; later ones win over them."""
    return [
        f"model.path={folder}/policy", f"data.train_files={folder}/prompts.jsonl", "data.train_batch_size=4",
        "data.max_prompt_length=48", "data.max_response_length=6", "actor.ppo_mini_batch_size=4", "rollout.n=2",
        "rollout.name=hf", "reward.num_workers=0", f"reward.custom_reward_function.path={folder}/reward.py",
        "trainer.backend=inline", "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.save_freq=0",
        "trainer.total_epochs=9", "trainer.logger=[jsonl]", f"trainer.default_local_dir={folder}/{name}",
        f"trainer.rollout_data_dir={folder}/{name}/kept",
    ]  # fmt: skip


def run(
    folder: Path, name: str, *options: str, trainer_class: type[RayPPOTrainer] | None = None
) -> list[dict[str, float]]:
    """The metrics of each logged step."""
    assert run_ppo([*options_of(folder, name), *options], trainer_class=trainer_class) == 0
    return [json.loads(line)["data"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def samples(folder: Path, name: str, step: int) -> list[dict[str, Any]]:
    """The rows that a training step of the run learnt from."""
    return [json.loads(line) for line in (folder / name / "kept" / f"{step}.jsonl").read_text().splitlines()]
