"""Reward flow through its command: a run that is killed with SIGKILL and resumed leaves what one without interruption
leaves, bit for bit; one that is stopped says how to go on."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.forked_runs import Forked, assert_same_end, differences, history
from tests.tiny_run import permitting
from tests.workers.diffusion.tiny_wan import MeanColourReward, tiny_pipeline

pytest.importorskip("diffusers")
pytest.importorskip("av")
pytestmark = pytest.mark.slow

STEPS = 4
OPTIONS = [
    "trainer.backend=inline", "trainer.device=cpu", "trainer.logger=[jsonl]", "trainer.save_freq=1",
    "trainer.test_freq=0", "trainer.video_freq=0", "data.num_frames=5", "data.train_batch_size=2", "model.lora_rank=4",
    "model.checkpoint_steps=false", "model.checkpoint_decode=false", "model.enable_gradient_checkpointing=false",
    "sampler.num_inference_steps=4", "sampler.mid_timestep=2", "sampler.final_timestep=3", "actor.optim.lr=1e-2",
    "actor.optim.lr_scheduler_type=cosine", "actor.optim.lr_warmup_steps=2",
    "actor.fsdp_config.wrap_policy.min_num_params=10000000",
]  # fmt: skip


class Runs(Forked):
    """Of `trainer.main_reward_flow` on a tiny pipeline and three clips."""

    module = "trainer.main_reward_flow"
    preloaded = ["torch", "diffusers", "trainer.diffusion.reward_flow", "trainer.launch.run", "peft", "tensordict"]

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        lines = ["video,prompt"]
        for row in range(3):
            (folder / f"clip{row}").mkdir()
            for frame in range(5):
                picture = Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
                picture.save(folder / f"clip{row}" / f"{frame}.png")
            lines.append(f"clip{row},a red face")
        (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
        options = [
            *OPTIONS,
            f"model.path={tiny_pipeline(folder / 'pipeline')}",
            f"data.train_files={folder / 'metadata.csv'}",
            f"reward.name={MeanColourReward.__module__}:{MeanColourReward.__name__}",
        ]
        super().__init__(folder, options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("reward_flow"))


def test_killed_and_resumed_is_the_same_bit_for_bit(runs: Runs) -> None:
    length, resumed = f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=auto"
    runs.finish("whole", length)
    assert not permitting(runs.folder / "whole", 0o077), "its user's alone"
    runs.kill_after(2, "killed", length)
    runs.finish("killed", length, resumed)
    whole, killed = (runs.folder / name / f"global_step_{STEPS}" for name in ("whole", "killed"))
    assert_same_end(whole.parent, killed.parent, STEPS)
    assert history(whole.parent) == history(killed.parent)
    weights = [load_file(folder / "lora" / "pytorch_lora_weights.safetensors") for folder in (whole, killed)]
    assert differences(*weights) == [] and any(bool(weight.any()) for weight in weights[0].values())


def test_a_stopped_run_says_how_to_go_on(runs: Runs) -> None:
    _, printed = runs.end_after(1, "stopped", signal.SIGTERM, "trainer.total_training_steps=50")
    assert "SIGTERM: stopping after this step, with a checkpoint" in printed
    [command] = [line.strip() for line in printed.splitlines() if "trainer.main_reward_flow" in line]
    assert command.startswith("python -m trainer.main_reward_flow ")
    assert command.endswith(f"trainer.default_local_dir={runs.folder / 'stopped'} trainer.resume_mode=auto")
