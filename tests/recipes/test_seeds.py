"""`python -m recipes.seeds`: table and picture of runs that differ in their seed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from matplotlib.image import imread

from recipes import seeds

T_2 = 4.302653
"""97.5% quantile of Student's t with two degrees of freedom, from a table."""

SAMPLED = "val-core/sums/reward/mean@1"
GREEDY = "val-aux/sums/greedy/reward/mean@1"
WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a run folder of four steps, with a validation before the first, after step 2 and at the end."""

    def write(name: str, seed: int, sampled: Sequence[float], lr: str = "1e-5", steps: int = 4) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = (
            "trainer:\n"
            f"  seed: {seed}    # command line\n"
            "  total_training_steps: 4    # default\n"
            f"  default_local_dir: {folder}    # command line\n"
            "actor:\n"
            f"  optim: {{lr: {lr}}}    # default\n"
        )
        (folder / "config.yaml").write_text(config)
        lines = []
        for step in range(steps + 1):
            metrics = {} if step == 0 else {"critic/score/mean": step / 10, "timing_s/step": 60.0}
            if step % 2 == 0:
                value = sampled[step // 2]
                metrics |= {SAMPLED: value, GREEDY: value + 1, "val-aux/sums/reward/mean@1/ci95": 0.25}
            lines.append(json.dumps({"step": step, "data": metrics}))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return write


def test_the_table_has_the_mean_over_the_runs_with_its_interval(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        write_run("a", seed=1, sampled=[0.1, -20.0, 0.4]),
        write_run("b", seed=2, sampled=[0.2, -21.0, 0.4]),
        write_run("c", seed=3, sampled=[0.6, -25.0, 0.4]),
    ]
    picture = tmp_path / "picture.png"
    assert seeds.main([*map(str, folders), "--out", str(picture)]) == 0

    half = T_2 * math.sqrt(0.07 / 3)
    # deviations 2, 1, -3: variance 14 / 2
    wide_half = T_2 * math.sqrt(7 / 3)
    shown = capsys.readouterr().out
    assert "| step | 0 | 2 | 4 |" in shown
    assert f"| sums/reward/mean@1 | 0.300 ± {half:.3f} | -22.0 ± {wide_half:.1f} | 0.400 ± 0.000 |" in shown
    assert f"| sums/greedy/reward/mean@1 | 1.300 ± {half:.3f} |" in shown
    assert "Mean of 3 runs, trainer.seed=1, 2, 3" in shown
    # four steps of a minute
    assert "A step took 60.0 s (median), a run 4 minutes" in shown
    height, width, _ = imread(picture).shape
    # 11 x 4.2 inches at 110 dots per inch
    assert (width, height) == (1210, 462)


def test_a_single_run_has_the_intervals_of_its_questions(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run("a", seed=7, sampled=[0.1, 0.2, 0.4])
    assert seeds.main([str(folder), "--no-time", "--out", str(tmp_path / "picture.png")]) == 0

    shown = capsys.readouterr().out
    assert "| sums/reward/mean@1 | 0.100 ± 0.250 | 0.200 ± 0.250 | 0.400 ± 0.250 |" in shown
    # the greedy answers of this run have none
    assert "| sums/greedy/reward/mean@1 | 1.100 | 1.200 | 1.400 |" in shown
    assert "One run, trainer.seed=7; 95% intervals of the questions." in shown
    assert "A step took" not in shown


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, "b: trainer.seed=1, which .*a has, too"),
        ({"seed": 2, "lr": "3e-5"}, r"b: its settings differ from those of .*a: .*1e-5.*, .*3e-5"),
        ({"seed": 2, "steps": 3}, "b: this run is stopped at step 3 of 4"),
    ],
)
def test_runs_that_do_not_differ_in_the_seed_alone_are_refused(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str], settings: dict[str, object], message: str
) -> None:
    sampled = [0.1, 0.2, 0.4]
    folders = [write_run("a", seed=1, sampled=sampled), write_run("b", sampled=sampled, **settings)]
    assert seeds.main([str(folder) for folder in folders]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_run_whose_number_of_steps_is_not_configured_is_accepted(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a run of one epoch."""
    folder = write_run("a", seed=1, sampled=[0.1, 0.2, 0.4])
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("total_training_steps: 4", "total_training_steps: null"))
    assert seeds.main([str(folder), "--out", str(tmp_path / "picture.png")]) == 0
    assert "| sums/reward/mean@1 |" in capsys.readouterr().out


def test_a_picture_that_cannot_be_written_is_named_after_the_table(
    write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run("a", seed=1, sampled=[0.1, 0.2, 0.4])
    missing = tmp_path / "missing" / "picture.png"
    assert seeds.main([str(folder), "--out", str(missing)]) == 2
    shown = capsys.readouterr()
    assert "| sums/reward/mean@1 |" in shown.out
    assert f"--out {missing}: the picture cannot be written" in shown.err
