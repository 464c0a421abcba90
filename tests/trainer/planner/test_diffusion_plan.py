"""The plan of reward flow: published counts, frozen parts by hand, a measured step, and the guide."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.set_keys import set_keys
from tests.workers.diffusion.tiny_wan import tiny_pipeline
from trainer import plan as plan_command
from trainer.planner.diffusion_memory import count, launch_plan, plan, published_shape, read_shape
from trainer.planner.memory_table import GIB
from verl_lite.config import load_schema, schema_of
from verl_lite.config.conflicts import conflict_problems
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import UserError

pytest.importorskip("diffusers")
SHARD = "low-noise expert, this rank's shard"
A14B, TI2V = "wan2.2-i2v-a14b", "wan2.2-ti2v-5b"


def config(num_frames: int = 5, **options: Any) -> RewardFlowConfig:
    """Clips of 5 frames of 64 x 64, of two steps one with gradient; unless longer ones are asked for. options: of
    model."""
    made = RewardFlowConfig()
    made.data.num_frames = num_frames
    if num_frames == 5:
        made.data.height = made.data.width = 64
        made.sampler.num_inference_steps, made.sampler.mid_timestep, made.sampler.final_timestep = 2, 1, 1
    set_keys(made.model, **options)
    return made


@pytest.mark.slow
def test_counts_are_the_published_ones() -> None:
    """Wan2.2's names say 14 B and 5 B; Wan-VAE has 127 M, Wan2.2-VAE 705 M, umt5-xxl's encoder 5.68 B. bf16: 2 bytes
    each; of the adapter 12 (weight and two moments). Blocks recomputed, steps not: of the step are kept 40
    inputs of 32 tokens x 5120 in bf16, and 512 tokens of text."""
    a14b = plan(config(checkpoint_steps=False), published_shape(A14B), 1)
    adapter = 40 * 32 * (8 * (5120 + 5120) + 2 * (5120 + 13824))
    assert a14b.always[SHARD] == a14b.always["high-noise expert"] == 2 * 14_288_901_184
    assert a14b.always["text encoder"] == 2 * 5_680_910_336 and a14b.always["adapter, Adam"] == 12 * adapter
    kept = a14b.phases["decoding"]["kept by the steps"]
    assert kept == pytest.approx(2 * 5120 * (40 * 32 + 512), rel=0.06)
    for name, autoencoder in ((A14B, 127e6), (TI2V, 705e6)):
        assert count(published_shape(name).vae) == pytest.approx(autoencoder, rel=2e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_pipeline(tmp_path_factory.mktemp("wan"), vae="wan")


@pytest.mark.slow
def test_what_is_offloaded_sharded_and_recomputed(folder: str) -> None:
    shape = read_shape(folder)
    one, eight = plan(config(), shape, 1), plan(config(offload_frozen=True), shape, 8)
    assert eight.always[SHARD] == one.always[SHARD] / 8
    moved = ("high-noise expert", "text encoder")
    assert eight.host == {name: one.always[name] for name in moved} and not one.host
    assert not set(moved) & set(eight.always)
    off = dict.fromkeys(("checkpoint_steps", "checkpoint_decode", "enable_gradient_checkpointing"), False)
    assert one.peak < plan(config(**off), shape, 1).peak


@pytest.mark.slow
def test_planned_is_what_a_step_takes(tmp_path: Path) -> None:
    """The bytes of live tensors at the peak of a train step within 5%."""
    from tests.bench.reward_flow_live import configured, measure, wan_pipeline

    found = measure(configured(wan_pipeline(tmp_path / "wan", layers=2, channels=8), 9, 48, ()), warm_up=False)
    assert found.planned == pytest.approx(found.live, rel=0.05)


@pytest.mark.slow
def test_the_command_and_wrong_input(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"model.path={folder}", "data.num_frames=5", "data.height=64", "data.width=64"]
    arguments += [f"sampler.{name}" for name in ("num_inference_steps=2", "mid_timestep=1", "final_timestep=1")]
    arguments = ["--command", "main_reward_flow", *arguments, "--memory_gb"]
    assert plan_command.main([*arguments, "0.1"]) == 1
    out = capsys.readouterr().out
    assert "clip 5 x 64 x 64; 1 device" in out and "does not fit 0.1 GiB" in out and "on a GPU only" in out
    assert plan_command.main([*arguments, "0"]) == 2
    assert plan_command.main([*arguments, "1", "--fit"]) == 2
    assert "--fit with --command main_reward_flow: only main_ppo has it" in capsys.readouterr().err
    made = config()
    made.model.path = str(tmp_path / "copy")
    shutil.copytree(folder, tmp_path / "copy")
    assert launch_plan(made, 1) == "1 GiB (calculated)"
    (tmp_path / "copy" / "text_encoder" / "config.json").unlink()
    with pytest.raises(UserError, match=r"text_encoder.*config.json is missing.*--like"):
        read_shape(str(tmp_path / "copy"))
    assert launch_plan(made, 1) == ""


# -- the guide ---------------------------------------------------------------------------------------------------------

GUIDE = Path(__file__).parents[3] / "trainer" / "DIFFUSION.md"


def commands(module: str) -> list[list[str]]:
    """The arguments of the guide's commands that run `module`."""
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    found = [shlex.split(block.replace("\\\n", " ")) for block in blocks]
    return [words[3:] for words in found if words[:3] == ["python", "-m", module]]


def test_every_key_of_the_guide_exists_and_fits() -> None:
    """Whole command lines, and each key in backticks."""
    lines = commands("trainer.main_reward_flow")
    assert len(lines) == 1
    for line in lines:
        loaded = load_schema(line, RewardFlowConfig).config
        assert list(conflict_problems(loaded)) == []
        assert loaded.model.offload_frozen
        assert set(loaded.model.fused_loras) <= {"transformer", "transformer_2"}
    keys = re.findall(r"`((?:model|data|sampler|actor|trainer|reward)\.[a-z_0-9]+)=?[^`]*`", GUIDE.read_text("utf-8"))
    assert set(keys) <= set(schema_of(RewardFlowConfig).keys)


@pytest.mark.long
def test_memory_in_the_guide_is_the_planner_s(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the first row of the table of devices, to the GiB that it is rounded to, two with `offload_frozen`, of which
    one is by the guide's command, which fits."""
    [row] = re.findall(r"^\| 17 \| (.*) \|$", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    cells = [int(cell) for cell in row.split(" | ")]
    made = config(num_frames=17, offload_frozen=True)
    made.reward.kwargs = {"embedder": "glintr100.onnx"}
    ti2v = plan(made, published_shape(TI2V), 1)
    assert ti2v.always[SHARD] == 2 * 4_999_787_712 and cells[1] == round(ti2v.device_bytes / GIB)
    (line,) = commands("trainer.plan")
    assert plan_command.main([*line, "data.num_frames=17"]) == 0
    [found] = re.findall(r"^one device \(GPU\) +([\d.]+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert cells[3] == round(float(found))
