"""curve.png: drawn from what a run leaves, whatever parts of it are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from trainer.observe import picture
from trainer.observe.picture import draw_curve
from trainer.supervised.loop import CURVES


def write(folder: Path, steps: dict[int, dict[str, float | None]]) -> Path:
    rows = [json.dumps({"step": step, "data": data}) for step, data in steps.items()]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def full_step(step: int) -> dict[str, float | None]:
    lengths = {"response_length/mean": 7.0, "response_length/max": 12.0, "response_length/min": 3.0}
    times = {"timing_s/gen": 1.0, "timing_s/update_actor": 2.0, "timing_s/step": 3.5}
    return {"critic/score/mean": 0.3 + step / 1000, **lengths, **times}


@pytest.mark.parametrize("count", [1, 3, 300])
def test_a_run_of_any_length_is_drawn(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(picture, "Figure", lambda **options: figures.append(Figure(**options)) or figures[-1])
    steps: dict[int, dict[str, float | None]] = {0: {"val-core/a/b/reward/mean@4": 0.3}}
    steps |= {step: full_step(step) for step in range(1, count + 1)}
    steps[count] |= {"val-core/a/b/reward/mean@4": 0.8, "val-aux/a/b/greedy/reward/mean@1": 0.9, "x": None}
    path = draw_curve(write(tmp_path, steps))
    assert path == tmp_path / "curve.png" and path.read_bytes().startswith(b"\x89PNG")
    reward, validation, _, time = figures[0].axes
    values = [[step, pytest.approx(0.3 + step / 1000)] for step in range(1, count + 1)]
    assert reward.lines[0].get_xydata().tolist() == values
    if count == 300:  # beside it the mean of the last 15
        assert reward.lines[1].get_ydata()[-1] == pytest.approx(0.3 + 0.293)
    assert [text.get_text() for text in validation.get_legend().get_texts()] == ["a/b", "a/b (greedy)"]
    assert validation.lines[0].get_xydata().tolist() == [[0, 0.3], [count, 0.8]]
    assert [text.get_text() for text in time.get_legend().get_texts()] == ["gen", "update_actor", "other"]
    tops = [bar.get_y() + bar.get_height() for bar in time.patches]
    assert max(tops) == pytest.approx(3.5) and len(time.patches) == 3 * min(count, 120)
    assert all(panel.get_title() and panel.get_ylabel() and panel.get_xlabel() for panel in figures[0].axes)


def test_what_was_not_logged_is_left_out_and_without_a_training_step_there_is_no_picture(tmp_path: Path) -> None:
    assert draw_curve(tmp_path) is None
    assert draw_curve(write(tmp_path, {0: {"val-core/a/reward/mean@1": 0.3}})) is None
    assert draw_curve(write(tmp_path, {1: {"critic/score/mean": 0.5}})) is not None


def test_a_supervised_run_shows_its_losses_accuracy_and_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(picture, "Figure", lambda **options: figures.append(Figure(**options)) or figures[-1])
    val = {"val/loss": 0.7, "val/rewards/accuracies": 0.5, "val/rewards/margins": 0.1, "val/logps/chosen": -15.0}
    steps = {1: {"timing_s/step": 1.0, "train/loss": 0.6, "train/grad_norm": 2.0, "train/lr": 3e-4} | val}
    assert draw_curve(write(tmp_path, steps), *CURVES)
    loss, validation, norm, rate = figures[0].axes
    shown = [
        (text.get_text(), line.get_ydata()[0])
        for text, line in zip(validation.get_legend().get_texts(), validation.lines, strict=True)
    ]
    assert shown == [("loss", 0.7), ("rewards/accuracies", 0.5), ("rewards/margins", 0.1)]
    assert [panel.lines[0].get_ydata()[0] for panel in (loss, norm, rate)] == [0.6, 2.0, 3e-4]
    assert all(panel.get_title() and panel.get_ylabel() and panel.get_xlabel() for panel in figures[0].axes)
