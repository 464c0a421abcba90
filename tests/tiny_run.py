"""A run of the main command that is small enough to be started several times in a test, and known by a mark of its own.

`TinyTask` writes a model, data and a reward; `start` runs `python -m trainer.main_ppo` on them in a process with an own
TMPDIR. Everything the run starts inherits the mark, so that what it leaves behind is found without names, beside other
runs of anybody.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.tiny_model import tiny_qwen2
from verl_lite.machine.process_table import marked_processes
from verl_lite.single_controller.watcher import shared_memory_of

ROOT = Path(__file__).resolve().parents[1]
MARK = "VERL_LITE_TEST_RUN"
PATIENCE_S = 600.0
OPTIONS = [
    "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.test_freq=0", "trainer.val_before_train=false",
    "trainer.logger=[jsonl]", "trainer.save_freq=0", "rollout.name=hf", "rollout.n=2", "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4", "data.max_prompt_length=24", "data.max_response_length=6",
    "ray_kwargs.ray_init.num_cpus=2", "ray_kwargs.ray_init.object_store_memory_mb=80",
]  # fmt: skip
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 7
"""


def good_row(number: int, source: str = "sums") -> dict[str, Any]:
    """A row as it should be: a sum and its result."""
    return {
        "prompt": [{"role": "user", "content": f"{number}+{number}"}],
        "data_source": source,
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"index": number},
    }


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """As lines of JSON."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def python_path() -> str:
    """Returns a PYTHONPATH with this project before the folders of the present one."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class TinyRun:
    """One run in a process of its own."""

    def __init__(self, argv: list[str], run_dir: Path, env: dict[str, str]) -> None:
        self.run_dir, self.mark = run_dir, uuid.uuid4().hex
        self.temp = Path(tempfile.mkdtemp(prefix="vt-", dir="/tmp"))
        self.log = run_dir.parent / f"{run_dir.name}-{self.mark[:8]}.log"
        self.shared: set[str] = set()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer.main_ppo", *argv, f"trainer.default_local_dir={run_dir}"],
                cwd=run_dir.parent,
                env={**os.environ, "PYTHONPATH": python_path(), "TMPDIR": str(self.temp), MARK: self.mark, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored where tests run under nohup
            )

    def processes(self) -> list[int]:
        """All that the run started and is alive; notes the shared memory that they have mapped."""
        pids = marked_processes(MARK, self.mark)
        self.shared |= shared_memory_of(pids)
        return pids

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Waits for its end, looking at it meanwhile; gives the exit status."""
        deadline = time.monotonic() + patience_s
        while True:
            self.processes()
            try:
                return self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                assert time.monotonic() < deadline, self.output()

    def wait_for_step(self, step: int) -> None:
        """Waits until the metrics of this step are logged."""
        metrics = self.run_dir / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= step)

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        """Waits for something that happens while the run lives, looking at the run meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_true():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            self.processes()
            time.sleep(0.25)

    def send(self, number: signal.Signals) -> None:
        """A signal to the driver alone."""
        self.processes()
        self.process.send_signal(number)

    def leftovers(self) -> list[object]:
        """What there is of the run: processes, files in its TMPDIR, shared memory."""
        files = [str(path) for path in self.temp.iterdir() if not path.name.startswith("torchinductor_")]
        return [*self.processes(), *files, *(name for name in self.shared if Path(name).exists())]

    def leaves_nothing(self, within_s: float) -> None:
        """Asserts that there is nothing of it left within some seconds."""
        deadline = time.monotonic() + within_s
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.2)
        left = self.leftovers()
        commands = [Path(f"/proc/{one}/cmdline") for one in left if isinstance(one, int)]
        shown = [path.read_bytes().replace(b"\0", b" ") for path in commands if path.exists()]
        assert left == [], f"{left} {shown}\n{self.output()}"

    def output(self) -> str:
        """The end of what it printed."""
        return self.log.read_text()[-6000:]

    def close(self) -> None:
        """Ends what a failing test left."""
        for pid in [*self.processes(), *([self.process.pid] if self.process.poll() is None else [])]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.temp, ignore_errors=True)


class TinyTask:
    """A model, data and a reward in `folder`, and the options that name them."""

    def __init__(self, folder: Path, reward: str = REWARD, rows: int = 8) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reward.py").write_text(reward)
        self.options = [
            *OPTIONS,
            f"model.path={tiny_qwen2(folder / 'model')}",
            f"data.train_files={write_rows(folder / 'train.jsonl', map(good_row, range(rows)))}",
            f"reward.custom_reward_function.path={folder / 'reward.py'}",
        ]

    def start(self, name: str, *options: str, steps: int = 2, env: dict[str, str] | None = None) -> TinyRun:
        """Starts a run of that name."""
        argv = [*self.options, f"trainer.total_training_steps={steps}", *options]
        return TinyRun(argv, self.folder / name, env or {})


def permitting(folder: Path, bits: int) -> list[Path]:
    """What there is of a run, its folder included, that has some of these permissions."""
    return [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & bits]
