"""A run that fails leaves a dump; its replay fails in the same way, inline, and passes once the cause is mended."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked_runs import Forked, Runs
from trainer.checkpoint.crash_dump import read_dump
from trainer.replay import main as replay
from verl_lite.errors import UserError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

LOSS = """
from verl_lite.core_algos import compute_policy_loss_vanilla
STEP = [0]
def loss(*args, **kwargs):
    STEP[0] += 1
    if STEP[0] > {good}:
        raise ArithmeticError("the loss of step 2 is broken")
    return compute_policy_loss_vanilla(*args, **kwargs)
"""


def dump_of(runs: Forked, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The dump of a run whose loss, in broken_loss.py, fails in its second step."""
    (runs.folder / "broken_loss.py").write_text(LOSS.format(good=4))
    monkeypatch.setenv("PYTHONPATH", str(runs.folder))
    monkeypatch.syspath_prepend(str(runs.folder))
    monkeypatch.delitem(sys.modules, "broken_loss", raising=False)  # another test's
    options = ["actor.policy_loss.loss_mode=broken_loss:loss", "actor.ppo_max_token_len_per_gpu=8192"]
    process, run_dir, log = runs.start("run", *options, "trainer.total_training_steps=3")
    process.join(120)
    text = log.read_text()
    assert process.exitcode == 1 and "python -m trainer.replay" in text, text[-3000:]
    return run_dir / "crash" / "step_2"


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    bypass = "algorithm.rollout_correction.bypass_mode=true"  # old_log_probs are part of the batch
    return dump_of(Runs(tmp_path, 8, 4, ["actor.ppo_mini_batch_size=4", bypass]), monkeypatch)


def test_the_replay_fails_alike_and_passes_when_mended(failed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = read_dump(failed)
    assert (dump.step, dump.phase) == (2, "update_actor")
    assert dump.checkpoint is not None and dump.checkpoint.endswith("global_step_1")
    assert dump.batch is not None and "token_level_scores" in dump.batch and "advantages" not in dump.batch
    assert "old_log_probs" in dump.batch
    assert dump.sampling is not None and len(dump.batch) == 8
    assert "ArithmeticError" in (failed / "error.txt").read_text()
    assert "most recent call first" in (failed / "stacks.txt").read_text()
    assert {"python", "torch", "transformers"} <= json.loads((failed / "versions.json").read_text()).keys()

    import broken_loss  # type: ignore[import-not-found]

    broken_loss.STEP[0] = 1
    with pytest.raises(ArithmeticError, match="step 2"):
        replay([str(failed)])
    assert not (failed / "replay" / "crash").exists(), "a replay is not to be replayed"
    assert "Step 2, which failed in update_actor: answers from the dump" in capsys.readouterr().out
    broken_loss.STEP[0] = -100
    done = replay([str(failed), f"trainer.default_local_dir={failed / 'mended'}"])
    assert done == 0, capsys.readouterr().out
    assert not (failed / "mended" / "crash").exists()


def test_pdb_stops_where_the_error_is_raised(failed: Path) -> None:
    """On a terminal, as its user has it: the prompt comes in the frame of the loss, with its names."""
    (failed.parents[2] / "broken_loss.py").write_text(LOSS.format(good=0))  # in a new process it fails at once
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer.replay", str(failed), "--pdb"],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=failed, close_fds=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{failed.parents[2]}", "TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    try:
        before = read_until(terminal, "(Pdb) ")
        assert "ArithmeticError: the loss of step 2 is broken" in before, before[-3000:]
        assert "broken_loss.py" in before and "raise ArithmeticError" in before, before[-3000:]
        os.write(terminal, b"p 'steps', STEP, sorted(kwargs)\n")
        assert "('steps', [1]," in read_until(terminal, "(Pdb) ")
        os.write(terminal, b"w\n")
        stack = read_until(terminal, "(Pdb) ")
        assert "ray_trainer.py" in stack and "update_actor" in stack, "the workers' frames are in this process"
        os.write(terminal, b"q\n")
        after = read_until(terminal, "The run failed: ")
        assert "Traceback" in after
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def read_until(terminal: int, text: str) -> str:
    """What comes from a terminal up to a text."""
    found, deadline = "", time.monotonic() + 240
    while text not in found:
        assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], found[-3000:]
        try:
            found += os.read(terminal, 4096).decode(errors="replace")
        except OSError as end:  # the other side is closed
            raise AssertionError(found[-3000:]) from end
    return found


def test_no_dump_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no crash dump there; expected RUN/crash/step_N"):
        read_dump(tmp_path)
