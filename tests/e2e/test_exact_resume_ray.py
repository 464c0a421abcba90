"""Exact resume under Ray with two ranks: train(2N) equals train(N), kill -9 of the driver, resume(N), bit for bit.

The same comparison as in `test_exact_resume`, of runs as their user starts them: two Ray actors that hold shards of one
model, with an adapter, a critic or all parameters, and the answers of the Hugging Face engine or of vLLM. The resumed
run of `make test-long` loses its Ray on the way, with trainer.max_retries=1.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_exact_resume import FOREVER, GAE
from tests.forked_runs import ACTOR, CRITIC, assert_same_end, differences, history
from tests.tiny_model import tiny_qwen2
from tests.tiny_run import TinyTask
from trainer.checkpoint.files import MARKER

pytestmark = pytest.mark.slow

RAY = ["trainer.n_gpus_per_node=2", "trainer.save_freq=1", "actor.optim.lr=1e-3", "reward.num_workers=1"]
ADAPTER = ["model.lora_rank=4", "model.lora_alpha=8", "actor.optim.lr=1e-2", "actor.use_kl_loss=true"]
HF = ["rollout.name=hf", *GAE, "trainer.async_save=true"]
VLLM = ["rollout.name=vllm", "rollout.kv_cache_memory_mb=32", "rollout.max_num_seqs=16"]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.mark.parametrize(
    ("options", "parts", "store_dies"),
    [
        pytest.param(HF, CRITIC, True, id="hf, critic, background, loses its Ray", marks=pytest.mark.long),
        pytest.param([*VLLM, *ADAPTER], ACTOR, False, id="vllm, LoRA", marks=needs_vllm),
    ],
)
def test_two_ranks_train_kill_resume_is_train(
    options: list[str], parts: tuple[str, ...], store_dies: bool, tmp_path: Path
) -> None:
    task = TinyTask(tmp_path, rows=10)  # 4 prompts a step: an epoch does not end with a step
    tiny_qwen2(tmp_path / "model", heads=2)
    options = [*RAY, *options, "actor.policy_loss.loss_mode=tests.e2e.faulty_parts:loss_that_pauses"]
    pause = tmp_path / "pause"
    whole = task.start("whole", *options, steps=FOREVER, env={"PAUSE": str(pause)})
    marker = whole.run_dir / MARKER
    whole.wait_for(lambda: marker.exists() and int(marker.read_text()) >= 4)
    os.kill(whole.process.pid, signal.SIGKILL)
    whole.process.wait()
    whole.leaves_nothing(within_s=60)
    start = f"trainer.resume_from_path={whole.run_dir}/global_step_2"
    options += ["trainer.resume_mode=resume_path", start]
    if store_dies:
        options.append("trainer.max_retries=1")
        pause.touch()  # in the second step that it makes
    resumed = task.start("resumed", *options, steps=4, env={"PAUSE": str(pause)})
    if store_dies:
        resumed.wait_for(lambda: len(list(tmp_path.glob("paused-*"))) == 2)
        [store] = [pid for pid in resumed.processes() if psutil.Process(pid).name() == "gcs_server"]
        os.kill(store, signal.SIGKILL)
        killed = time.monotonic()
        resumed.wait_for(lambda: "Starting again" in resumed.log.read_text())
        assert time.monotonic() - killed < 20
        pause.unlink()
    assert resumed.wait() == 0, resumed.output()
    resumed.leaves_nothing(within_s=0)
    models = assert_same_end(whole.run_dir, resumed.run_dir, 4, parts)
    assert {f"{part}.random_{rank}" for part in parts for rank in (0, 1)} <= set(models)
    rows = history(whole.run_dir)
    assert differences({step: rows[step] for step in (3, 4)}, history(resumed.run_dir)) == []
    assert max(row["training/rollout_probs_diff_max"] for row in rows.values()) < 1e-4, "another policy answers"
    if ADAPTER[0] in options:
        assert rows[1]["actor/kl_loss"] == 0.0 and rows[4]["actor/kl_loss"] > 1e-4, "the adapter is not in the answers"
