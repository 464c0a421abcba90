"""A run that fails leaves a capsule; its replay fails in the same way, inline, and passes once the cause is mended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_exact_resume import Runs
from trainer.capsule import read_capsule
from trainer.replay import main as replay
from verl_lite.errors import UserError

pytestmark = pytest.mark.slow

LOSS = """
from verl_lite.core_algos import compute_policy_loss_vanilla
STEP = [0]
def loss(*args, **kwargs):
    STEP[0] += 1
    if STEP[0] > {good}:
        raise ArithmeticError("the loss of step 2 is broken")
    return compute_policy_loss_vanilla(*args, **kwargs)
"""


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The capsule of a run whose loss fails in its second step."""
    (tmp_path / "broken_loss.py").write_text(LOSS.format(good=1))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["actor.policy_loss.loss_mode=broken_loss:loss", "actor.ppo_mini_batch_size=4"]
    runs = Runs(tmp_path, 8, 4, [*options, "actor.ppo_max_token_len_per_gpu=4096", "trainer.total_training_steps=3"])
    process, run_dir, log = runs.start("run")
    process.join(120)
    text = log.read_text()
    assert process.exitcode == 1 and "python -m trainer.replay" in text, text[-3000:]
    return run_dir / "crash" / "step_2"


def test_the_capsule_holds_the_step(failed: Path) -> None:
    capsule = read_capsule(failed)
    assert (capsule.step, capsule.phase) == (2, "update_actor")
    assert capsule.checkpoint is not None and capsule.checkpoint.endswith("global_step_1")
    assert capsule.batch is not None and "token_level_scores" in capsule.batch and "advantages" not in capsule.batch
    assert len(capsule.prompts) == 4 and len(capsule.batch) == 8
    assert "ArithmeticError" in (failed / "error.txt").read_text()
    assert "MainThread" in (failed / "stacks.txt").read_text()
    assert {"python", "torch", "transformers"} <= json.loads((failed / "versions.json").read_text()).keys()


def test_the_replay_fails_alike_and_passes_when_mended(failed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import broken_loss  # type: ignore[import-not-found]

    broken_loss.STEP[0] = 1
    with pytest.raises(ArithmeticError, match="step 2"):
        replay([str(failed)])
    assert "Step 2, which failed in update_actor: answers from the capsule" in capsys.readouterr().out
    broken_loss.STEP[0] = -100
    done = replay([str(failed), f"trainer.default_local_dir={failed / 'mended'}"])
    assert done == 0, capsys.readouterr().out
    assert not (failed / "mended" / "crash").exists()


def test_no_capsule_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no capsule there; expected a folder RUN/crash/step_N"):
        read_capsule(tmp_path)
