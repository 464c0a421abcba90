"""`trainer.profile_steps`: traces and tables of the chosen steps, and what the workers were used for in every step."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.profiler_util import FunctionEventAvg

from tests.set_keys import set_keys
from tests.trainer import tiny_run
from tests.trainer.checkpoint.written_checkpoint import write_checkpoint
from trainer.checkpoint.resume import flat_config, profile_folder, refuse_missed_profiles
from trainer.loop.training_loop import TrainingLoop
from verl_lite.config import PPOConfig, load_config
from verl_lite.errors import UserError
from verl_lite.machine import profiling


def ranges(trace: Path) -> set[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_files(tmp_path_factory.mktemp("profile"), ["a", "b", "c", "d"])


def test_a_run_writes_the_profiles_of_its_steps_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["trainer.total_training_steps=2", "trainer.profile_steps=[2]", "trainer.logger=[console,jsonl]"]
    options += ["algorithm.adv_estimator=gae", "actor.use_kl_loss=true", "actor.ppo_mini_batch_size=2"]
    last = tiny_run.run(folder, "profiled", *options)[-1]
    trace = folder / "profiled/profile/step_2/actor_rollout_rank_0.json.gz"
    files = [path for path in (folder / "profiled/profile").rglob("*") if path.is_file()]
    assert sorted(files) == [trace, trace.with_name("actor_rollout_rank_0.txt")], "all roles share a process"
    phases = {"gen", "ref", "values", "update_actor", "update_critic", "update_weights"}
    calls = {"run_groups", "compute_log_prob", "compute_ref_log_prob", "compute_values"}
    assert phases | calls | {"generate", "micro_batch", "optimizer_step"} <= ranges(trace)
    table = trace.with_name("actor_rollout_rank_0.txt").read_text()
    rows = table.splitlines()
    assert rows[0].split() == ["operation", "calls", "CPU", "ms", "share"] and len(rows) == 11
    times = [float(row.split()[-2]) for row in rows[1:]]
    assert times == sorted(times, reverse=True) and not {"step", "micro_batch"} & {row.split()[0] for row in rows}
    printed = capsys.readouterr().out
    assert printed.count("profile of step 2") == 1 and printed.count(rows[1].split()[0]) >= 1
    assert 0 <= last["perf/idle_frac"] < 1 and 0 <= last["perf/idle_frac/update_actor"] < 1
    assert last["perf/moved_mb/update_weights"] == pytest.approx(last["weight_sync/megabytes"])
    assert last["perf/moved_mb"] > last["perf/moved_mb/update_weights"] + last["perf/moved_mb/gen"] > 0
    assert "perf/idle_frac/adv" not in last, "the phase calls no worker"


@pytest.mark.slow
def test_every_process_of_a_ray_run_writes_a_profile(folder: Path) -> None:
    options = ["trainer.backend=ray", "trainer.total_training_steps=2", "trainer.profile_steps=[2]"]
    options += ["hybrid_engine=false", "rollout.nnodes=1", "rollout.n_gpus_per_node=1"]
    tiny_run.run(folder, "ray", *options)
    traces = {path.name.split(".")[0]: ranges(path) for path in (folder / "ray/profile/step_2").glob("*.json.gz")}
    assert sorted(traces) == ["actor_rollout_rank_0", "driver", "engine_0_rank_0"]
    assert {"update_actor", "micro_batch", "send_weights"} <= traces["actor_rollout_rank_0"]
    assert "generate" in traces["engine_0_rank_0"], "it runs in a thread"
    assert {"gen", "update_actor"} <= traces["driver"] and "micro_batch" not in traces["driver"]


def test_ranges_are_nvtx_ranges_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[str] = []
    with profiling.span("without a profile"):
        profiling.start_profile(tmp_path / "a" / "one")
        profiling.start_profile(tmp_path / "a" / "two")  # another role of the same process
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("end"))
    with profiling.span("update"):
        torch.ones(3) @ torch.ones(3)
    monkeypatch.undo()
    assert profiling.stop_profile() and not profiling.stop_profile()
    assert pushed == ["update", "end"] and ranges(tmp_path / "a/one.json.gz") == {"update"}
    assert not (tmp_path / "a/two.json.gz").exists()
    profiling.start_profile(tmp_path / "failed" / "one")
    profiling.start_profile(tmp_path / "b" / "one")  # the run of the first one failed before its end
    profiling.stop_profile()
    assert (tmp_path / "b/one.json.gz").exists() and not (tmp_path / "failed").exists()


def test_idle_share_and_moved_bytes() -> None:
    loop: Any = TrainingLoop.__new__(TrainingLoop)
    group = SimpleNamespace(world_size=2, usage=np.zeros(2))
    loop.saver = SimpleNamespace(learners={"actor": SimpleNamespace(groups=[group])})
    loop.steps, loop.timing, loop.usage = SimpleNamespace(global_step=1), {}, {}
    for name, within, seconds, size in (("step", None, 2, 2e6), ("train", None, 3, 1e6), ("reward", "step", 1, 0)):
        with loop.timed(name, within):
            group.usage = group.usage + (seconds, size)
    with loop.timed("train"), loop.timed("adv"):
        pass
    with loop.timed("train"):
        group.usage = group.usage + (1, 0)
    assert {name: list(used) for name, used in loop.usage.items()} == {
        "step": [1, 2e6], "train": [4, 1e6], "reward": [1, 0], "adv": [0, 0]
    }  # fmt: skip
    loop.usage = {"step": (6.0, 3e6), "update_actor": (4.0, 1e6), "adv": (0.0, 0)}
    loop.timing = {"step": 5.0, "update_actor": 2.5, "adv": 0.5}
    assert loop.usage_metrics() == pytest.approx(
        {
            "perf/idle_frac": 0.4,
            "perf/moved_mb": 3.0,
            "perf/idle_frac/update_actor": 0.2,
            "perf/moved_mb/update_actor": 1.0,
        }
    )


def test_the_time_on_the_gpu_orders_the_table() -> None:
    events = []
    for key, cpu, gpu in (("a", 9, 1), ("b", 1, 3000), ("step", 99, 99)):
        event = FunctionEventAvg()
        event.key, event.count, event.is_user_annotation = key, 2, key == "step"
        event.self_cpu_time_total, event.self_device_time_total = cpu, gpu
        events.append(event)
    profiler: Any = SimpleNamespace(key_averages=lambda: events)
    rows = profiling.most_expensive(profiler).splitlines()
    assert [row.split()[0] for row in rows] == ["operation", "b", "a"] and rows[1].split()[1:] == ["2", "3.0", "100.0%"]


def test_steps_that_never_occur_are_refused(tmp_path: Path) -> None:
    wrong = set_keys(PPOConfig(), trainer__profile_steps=[0, 2])
    assert list(wrong.trainer.check()) == ["trainer.profile_steps=[0, 2]: steps count from 1; remove [0]"]
    trainer = set_keys(PPOConfig(), trainer__profile_steps=[2, 5]).trainer
    refuse_missed_profiles(trainer, tmp_path, 5)
    with pytest.raises(UserError, match=r"=\[2, 5\]: this run has steps 1 to 4, so \[5\] never occur.*=\[\]"):
        refuse_missed_profiles(trainer, tmp_path, 4)
    state = {"config": flat_config(PPOConfig()), "steps": {"global_step": 3}}
    write_checkpoint(tmp_path, 3, lambda folder: None, state)
    trainer.resume_mode = "auto"
    with pytest.raises(UserError, match=r"this run has steps 4 to 9, so \[2\] never occur"):
        refuse_missed_profiles(trainer, tmp_path, 9)
    profile_folder(tmp_path, 2).mkdir(parents=True)  # the run profiled it before it was interrupted
    refuse_missed_profiles(trainer, tmp_path, 9)


def test_the_command_refuses_them_before_any_worker_starts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="this run has steps 1 to 2"):
        tiny_run.run(folder, "missed", "trainer.total_training_steps=2", "trainer.profile_steps=3")


def test_keys_of_verl() -> None:
    loaded = load_config(["model.path=m", "global_profiler.steps=[1,2]", "global_profiler.tool=nsys"])
    assert loaded.config.trainer.profile_steps == [1, 2]
    assert any("global_profiler.tool=nsys has no effect here: torch's profiler" in note for note in loaded.notes)
    assert load_config(["model.path=m", "trainer.profile_steps=null"]).config.trainer.profile_steps == []


def test_a_process_that_ends_within_a_profiled_step_does_not_crash(tmp_path: Path) -> None:
    start = f"profiling.start_profile(Path({str(tmp_path)!r}, 'a'))"
    code = f"from pathlib import Path; from verl_lite.machine import profiling; {start}"
    assert subprocess.run([sys.executable, "-c", f"{code}; raise SystemExit(3)"]).returncode == 3
