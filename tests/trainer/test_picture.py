"""curve.png: drawn from what a run leaves, whatever parts of it are there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from trainer import picture
from trainer.picture import draw_curve


def write(folder: Path, steps: dict[int, dict[str, float | None]]) -> Path:
    rows = [json.dumps({"step": step, "data": data}) for step, data in steps.items()]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def full_step(step: int) -> dict[str, float | None]:
    return {
        "critic/score/mean": 0.3 + step / 1000,
        "response_length/mean": 7.0,
        "response_length/max": 12.0,
        "response_length/min": 3.0,
        "timing_s/gen": 1.0,
        "timing_s/update_actor": 2.0,
        "timing_s/step": 3.5,
    }


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were made, to look inside."""
    figures: list[Figure] = []

    class Kept(Figure):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            figures.append(self)

    monkeypatch.setattr(picture, "Figure", Kept)
    return figures


@pytest.mark.parametrize("count", [1, 3, 300])
def test_a_run_of_any_length_is_drawn(tmp_path: Path, drawn: list[Figure], count: int) -> None:
    steps: dict[int, dict[str, float | None]] = {0: {"val-core/a/b/reward/mean@4": 0.3}}
    steps |= {step: full_step(step) for step in range(1, count + 1)}
    steps[count] |= {"val-core/a/b/reward/mean@4": 0.8, "val-aux/a/b/greedy/reward/mean@1": 0.9, "x": None}
    path = draw_curve(write(tmp_path, steps))
    assert path == tmp_path / "curve.png" and path.read_bytes().startswith(b"\x89PNG")
    reward, validation, length, time = drawn[0].axes
    assert reward.lines[0].get_xydata().tolist() == [[s, pytest.approx(0.3 + s / 1000)] for s in range(1, count + 1)]
    labels = [text.get_text() for text in validation.get_legend().get_texts()]
    assert labels == ["a/b", "a/b (greedy)"]
    assert validation.lines[0].get_xydata().tolist() == [[0, 0.3], [count, 0.8]]
    stack = [text.get_text() for text in time.get_legend().get_texts()]
    assert stack == ["other", "update_actor", "gen"]
    tops = [bar.get_y() + bar.get_height() for bar in time.patches]
    assert max(tops) == pytest.approx(3.5) and len(time.patches) == 3 * min(count, 120)
    for panel in (reward, validation, length, time):
        assert panel.get_title() and panel.get_ylabel() and panel.get_xlabel() == "training step"


def test_parts_that_were_not_logged_are_left_out(tmp_path: Path, drawn: list[Figure]) -> None:
    assert draw_curve(write(tmp_path, {1: {"critic/score/mean": 0.5}})) is not None
    assert "nothing was validated" in [text.get_text() for text in drawn[0].axes[1].texts]


def test_no_picture_without_training_steps(tmp_path: Path) -> None:
    assert draw_curve(tmp_path) is None
    assert draw_curve(write(tmp_path, {0: {"val-core/a/reward/mean@1": 0.3}})) is None


def test_smoothing_is_the_mean_of_the_last_values() -> None:
    assert picture._smooth(np.array([1.0, 3.0, 5.0, 9.0]), 2).tolist() == [1.0, 2.0, 4.0, 7.0]
