"""What `trainer.max_retries` does with the error that ended a try; the tries themselves are made up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from trainer import build, run
from trainer.cli import failure_text
from verl_lite.errors import NoRoomError, StalledError, WorkerDiedError

ARGV = ["trainer.device=cpu", "model.path=m", "data.train_files=d.jsonl", "trainer.default_local_dir=/runs/x"]
Tries = Callable[..., list[str]]


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> Tries:
    """Runs the command with tries that end so; gives the resume_mode of each."""

    def run_with(*ends: Exception | None, retries: int) -> list[str]:
        modes, left = [], list(ends)

        def train(job, loaded, *args) -> int:
            modes.append(loaded.config.trainer.resume_mode)
            error = left.pop(0)
            if error is not None:
                raise error
            return 0

        monkeypatch.setattr(run, "train", train)
        monkeypatch.setattr(run, "guarded", nullcontext)
        assert build.run_ppo([*ARGV, f"trainer.max_retries={retries}"]) == 0
        return modes

    return run_with


def test_a_lost_worker_and_a_stall_start_again_from_the_last_checkpoint(tries: Tries) -> None:
    assert tries(WorkerDiedError("one"), StalledError("two"), None, retries=2) == ["disable", "auto", "auto"]


def test_one_loss_too_many_is_the_end(tries: Tries) -> None:
    with pytest.raises(WorkerDiedError, match="two"):
        tries(WorkerDiedError("one"), WorkerDiedError("two"), retries=1)


def test_what_a_retry_would_not_mend_is_the_end(tries: Tries) -> None:
    with pytest.raises(ZeroDivisionError):
        tries(ZeroDivisionError(), retries=3)


def test_no_room_at_the_start_is_the_users_to_mend(tries: Tries) -> None:
    with pytest.raises(NoRoomError, match="^1 of 2 machines$"):
        tries(NoRoomError("1 of 2 machines"), retries=1)


def test_no_room_after_a_loss_ends_with_the_loss_and_the_command_that_goes_on(tries: Tries) -> None:
    with pytest.raises(WorkerDiedError, match="machine b left") as caught:
        tries(WorkerDiedError("machine b left"), NoRoomError("1 of 2 machines"), retries=2)
    text = failure_text(caught.value)
    assert "Starting again failed: 1 of 2 machines" in text
    assert "trainer.default_local_dir=/runs/x trainer.resume_mode=auto" in text
    assert text.endswith("The run failed: WorkerDiedError: machine b left")
