"""train(2N) equals train(N), kill -9, resume: bit for bit, in everything that a run leaves.

Runs are forked from a process that has already imported the libraries, train a tiny model inline, and one of them is
killed with SIGKILL in the middle of a step. What is compared: weights, moments, schedule, data position, controller,
running statistics, random states, and the history of metrics.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.tiny_model import tiny_qwen2
from trainer.checkpoint import MARKER
from trainer.tracking import read_metrics

pytestmark = pytest.mark.slow

PRELOADED = [
    "torch", "transformers", "trainer.run", "workers.rollout.hf_engine", "torch.distributed.checkpoint", "tensordict",
    "matplotlib.backends.backend_agg", "matplotlib.figure",
]  # fmt: skip
VOLATILE = ("timing", "perf/", "_per_second", "seconds", "_gb", "weight_sync", "idle_frac")
ACTOR, CRITIC = ("actor",), ("actor", "critic")
COMMON = [
    "trainer.backend=inline", "trainer.device=cpu", "rollout.name=hf", "rollout.n=2", "reward.num_workers=0",
    "data.max_prompt_length=24", "data.max_response_length=6", "actor.optim.lr=1e-3", "trainer.save_freq=1",
    "actor.ppo_mini_batch_size=2", "trainer.logger=[jsonl]", "trainer.test_freq=0", "trainer.val_before_train=false",
]  # fmt: skip


def reward_by_length(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Something that differs from answer to answer."""
    return sum(map(ord, solution_str)) % 7 / 7


def reward_by_parity(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """Something that is equal for about half of all pairs of answers."""
    total = sum(map(ord, solution_str))
    return {"score": total % 7 / 7, "acc": total % 2}


class ByScore:
    """A sampler whose next prompt depends on the scores of the last step."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self.size, self.start, self.given = len(data_source), 0, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size - self.given % self.size):
            self.given += 1
            yield (self.start + self.given) % self.size

    def update(self, batch: Any) -> dict[str, float]:
        assert "advantages" in batch
        self.start += round(7 * float(batch.batch["token_level_scores"].sum()))
        return {"start": self.start}

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.given = state["start"], state["given"]


def main_in_child(argv: list[str], folder: str, log: str) -> None:
    os.chdir(folder)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from trainer.main_ppo import main

    sys.exit(main(argv))


class Runs:
    """Starts runs in one folder."""

    def __init__(self, folder: Path, rows: int, batch: int, options: list[str]) -> None:
        self.folder = folder
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        data = folder / "train.jsonl"
        prompts = [
            {
                "prompt": [{"role": "user", "content": f"{row}+{row}"}],
                "data_source": ("odd", "even")[row % 2],
                "reward_model": {"ground_truth": str(2 * row)},
            }
            for row in range(rows)
        ]
        data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        self.options = [
            *COMMON,
            f"model.path={tiny_qwen2(folder / 'model')}",
            f"data.train_files={data}",
            f"data.train_batch_size={batch}",
            f"reward.custom_reward_function.path={__file__}",
            "reward.custom_reward_function.name=reward_by_length",
            *options,
        ]

    def start(self, name: str, *options: str) -> tuple[BaseProcess, Path, Path]:
        run_dir, log = self.folder / name, self.folder / f"{name}-{time.monotonic_ns()}.log"
        argv = [*self.options, f"trainer.default_local_dir={run_dir}", *options]
        process = self.context.Process(target=main_in_child, args=(argv, str(self.folder), str(log)))
        process.start()
        return process, run_dir, log

    def finish(self, name: str, *options: str) -> Path:
        process, run_dir, log = self.start(name, *options)
        process.join(300)
        assert process.exitcode == 0, log.read_text()[-4000:]
        return run_dir

    def kill_after(self, step: int, name: str, *options: str) -> Path:
        """Kills the run once the checkpoint of `step` is complete: it is in the next step by then."""
        process, run_dir, log = self.start(name, *options)
        marker = run_dir / MARKER
        deadline = time.monotonic() + 300
        while not (marker.exists() and int(marker.read_text()) >= step):
            assert process.is_alive() and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.002)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        return run_dir


def models_of(checkpoint: Path, parts: tuple[str, ...]) -> dict[str, Any]:
    """Weights, moments and counters, by name."""
    result = {}
    for part in parts:
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            dcp_to_torch_save(checkpoint / part, file.name)
            state = torch.load(file.name, weights_only=False)
        result |= {f"{part}.{name}": value for name, value in state.items()}
        for random in sorted((checkpoint / part).glob("random_*.pt")):  # of each rank
            result[f"{part}.{random.stem}"] = torch.load(random, weights_only=False)
    return result


def driver_state(checkpoint: Path) -> dict[str, Any]:
    state = torch.load(checkpoint / "data.pt", weights_only=False)
    free = ("trainer.default_local_dir", "trainer.resume_", "trainer.experiment_name", "trainer.total_training_steps")
    state["config"] = {name: value for name, value in state["config"].items() if not name.startswith(free)}
    return state


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Places at which two nested states are not bit-equal."""
    if isinstance(left, dict) and isinstance(right, dict):
        names = sorted({*left, *right}, key=str)
        lost = object()
        return [x for name in names for x in differences(left.get(name, lost), right.get(name, lost), f"{path}/{name}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        return [x for i, pair in enumerate(zip(left, right, strict=True)) for x in differences(*pair, f"{path}/{i}")]
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return [] if left.dtype == right.dtype and torch.equal(left, right) else [path]
    if hasattr(left, "shape") and hasattr(right, "shape"):
        return [] if left.shape == right.shape and (left == right).all() else [path]
    if hasattr(left, "__dict__") and type(left) is type(right):
        return differences(vars(left), vars(right), path)
    return [] if left == right else [path]


def history(run_dir: Path) -> dict[int, dict[str, float]]:
    return {
        step: {name: x for name, x in row.items() if not any(part in name for part in VOLATILE)}
        for step, row in read_metrics(run_dir / "metrics.jsonl").items()
    }


OFF_POLICY = ["actor.ppo_epochs=2", "actor.shuffle=true", "actor.optim.lr_warmup_steps=3"]
KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=50"]

GAE = ["algorithm.adv_estimator=gae", "algorithm.lam=0.9", "critic.optim.lr=1e-3"]
WARM_UP = [*GAE, "trainer.critic_warmup=2"]
RUNNING = [
    "algorithm.adv_estimator=reinforce", "algorithm.norm_mean_type=running", "algorithm.norm_std_type=running",
    "trainer.async_save=true", "data.sources={odd: {weight: 3}, even: {weight: 1}}",
]  # fmt: skip
LORA = ["model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=[q_proj,down_proj]", "actor.use_kl_loss=true"]
LORA += [f"data.sampler.class_path={__file__}", "data.sampler.class_name=ByScore"]
FILTERED = [
    "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc", "data.sources.odd.n=3",
    "reward.custom_reward_function.name=reward_by_parity", "reward.overlong_buffer.enable=true",
    "reward.overlong_buffer.len=3",
]  # fmt: skip
ALL_LINEAR = ["model.lora_rank=4", "model.lora_alpha=8", *GAE, "trainer.critic_warmup=1", "trainer.async_save=true"]


@pytest.mark.parametrize(
    ("rows", "batch", "killed_after", "total", "options", "parts"),
    [
        pytest.param(12, 4, 2, 4, [], ACTOR, id="mid-epoch"),
        pytest.param(12, 4, 3, 5, OFF_POLICY, ACTOR, id="epoch boundary, off-policy, shuffled"),
        pytest.param(10, 4, 3, 7, KL, ACTOR, id="rows do not divide, boundary, adaptive KL"),
        pytest.param(10, 4, 4, 5, [], ACTOR, id="only the last step is left", marks=pytest.mark.long),
        pytest.param(12, 4, 1, 3, WARM_UP, CRITIC, id="critic, within its warm-up", marks=pytest.mark.long),
        pytest.param(12, 4, 2, 3, [*GAE, "trainer.critic_warmup=1"], CRITIC, id="critic, after its warm-up"),
        pytest.param(12, 4, 2, 3, RUNNING, ACTOR, id="running statistics, saved in the background, a mixture"),
        pytest.param(12, 4, 2, 4, LORA, ACTOR, id="LoRA on named layers, its own reference, a sampler that learns"),
        pytest.param(14, 4, 3, 4, FILTERED, ACTOR, id="dynamic sampling, prompts with their own number of answers"),
        pytest.param(10, 4, 2, 4, ALL_LINEAR, CRITIC, id="LoRA on all layers, critic", marks=pytest.mark.long),
    ],
)
def test_train_kill_resume_is_train(
    rows: int, batch: int, killed_after: int, total: int, options: list[str], parts: tuple[str, ...], tmp_path: Path
) -> None:
    runs = Runs(tmp_path, rows, batch, options)
    length = f"trainer.total_training_steps={total}"
    whole = runs.finish("whole", length)
    killed = runs.kill_after(killed_after, "killed", length)
    start = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={killed}/global_step_{killed_after}"]
    runs.finish("killed", length, *start)
    ends = [folder / f"global_step_{total}" for folder in (whole, killed)]
    models = [models_of(end, parts) for end in ends]
    assert len(models[0]) > 20 and differences(*models) == []
    states = [driver_state(end) for end in ends]
    assert {"steps", "kl_coef", "running_moments", "random", "config"} <= set(states[0]) and differences(*states) == []
    assert differences(history(whole), history(killed)) == [] and len(history(whole)) == total
    if options is LORA:
        starts = [row["sampler/start"] for row in history(whole).values()]
        assert len(set(starts)) == total, "the sampler hears of every step"
    first = models_of(whole / "global_step_1", parts)
    assert differences(first, models[0]), "training changes nothing: equality shows nothing"


def test_a_budget_that_ends_loses_no_step_and_a_larger_one_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 60, 2, [*FILTERED, "trainer.total_training_steps=4", "trainer.save_freq=-1"])
    whole = runs.finish("whole")
    asked = [row["groups/gen_batches"] for row in history(whole).values()]
    budget = int(max(asked[1:]) - 1)
    assert asked[0] <= budget, asked
    process, ended, log = runs.start("ended", f"algorithm.filter_groups.max_num_gen_batches={budget}")
    process.join(120)
    assert process.exitcode == 2 and "its budget of generation batches is used up" in log.read_text()
    done = next(step for step, number in enumerate(asked) if number > budget)
    assert int((ended / MARKER).read_text()) == done == len(history(ended))
    runs.finish("ended", "trainer.resume_mode=auto")
    assert differences(*(models_of(folder / "global_step_4", ACTOR) for folder in (whole, ended))) == []
    assert differences(*(driver_state(folder / "global_step_4") for folder in (whole, ended))) == []
    assert differences(history(whole), history(ended)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_saves_and_the_rest_is_as_if_nothing_had_been(number: signal.Signals, tmp_path: Path) -> None:
    runs = Runs(tmp_path, 12, 4, ["trainer.total_training_steps=5", "trainer.save_freq=-1"])
    whole = runs.finish("whole")
    process, stopped, log = runs.start("stopped")
    while not (stopped / "metrics.jsonl").exists():
        assert process.is_alive(), log.read_text()[-4000:]
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(120)
    text = log.read_text()
    assert process.exitcode == 130, text[-4000:]
    assert f"{number.name}: stopping after this step" in text and "trainer.resume_mode=auto" in text
    assert 1 <= int((stopped / MARKER).read_text()) < 5
    runs.finish("stopped", "trainer.resume_mode=auto")
    assert differences(*(models_of(folder / "global_step_5", ACTOR) for folder in (whole, stopped))) == []
    assert differences(history(whole), history(stopped)) == []


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 4, 4, [])
    run_dir = runs.finish("run", "trainer.total_training_steps=2")
    before = (run_dir / "metrics.jsonl").read_text()
    process, _, log = runs.start("run", "trainer.total_training_steps=2", "trainer.resume_mode=auto")
    process.join(120)
    assert process.exitcode == 2 and "nothing is left to do" in log.read_text()
    assert (run_dir / "metrics.jsonl").read_text() == before


def test_other_data_and_other_settings_are_refused(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 4, 4, [])
    runs.finish("run", "trainer.total_training_steps=1")
    resume = ["trainer.total_training_steps=2", "trainer.resume_mode=auto"]
    process, _, log = runs.start("run", *resume, "rollout.n=3")
    process.join(120)
    assert process.exitcode == 2 and "rollout.n: 2 in the checkpoint, 3 now" in log.read_text()
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text().replace("1+1", "1+2"))
    process, _, log = runs.start("run", *resume)
    process.join(120)
    assert process.exitcode == 2 and "The training prompts are not those of the checkpoint" in log.read_text()
