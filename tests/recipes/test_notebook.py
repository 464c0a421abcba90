"""The notebooks of the quickstart and of the lessons run from their first to their last cell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import ROOT, python_path

QUICKSTART = ROOT / "recipes" / "quickstart" / "quickstart.ipynb"
LESSONS = ROOT / "recipes" / "lessons"
FAILURES = "## What it looks like when it fails"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The cache of the models. All processes of the tests share it, so that each model is made once."""
    temporary = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        temporary = temporary.parent  # each process of xdist has a folder of its own in it
    folder = temporary / "models-of-notebooks"
    folder.mkdir(exist_ok=True)
    return folder


def execute(
    file: Path, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None = None, check: str = ""
) -> Any:
    """Executes a notebook in `folder` and returns it with its outputs. A cell that fails raises an exception.

    Args:
        steps: number in place of the notebook's own in the line `steps = ...`; None leaves it unchanged.
        check: code of a further last cell, with assertions about the notebook's variables.
    """
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("VERL_LITE_CACHE", str(cache))
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook: Any = nbformat.read(file, as_version=4)

    if steps is not None:
        replaced = 0
        for cell in notebook.cells:
            cell.source, count = re.subn(r"^steps = \d+$", f"steps = {steps}", cell.source, flags=re.MULTILINE)
            replaced += count
        assert replaced == 1

    if check:
        notebook.cells.append(nbformat.v4.new_code_cell(check))
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return notebook


def printed(notebook: Any) -> str:
    """Returns the text of all outputs, with one space for any white space."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return " ".join("\n".join(texts).split())


@pytest.mark.slow
def test_the_quickstart_trains_and_shows_its_curve(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = execute(QUICKSTART, tmp_path, cache, monkeypatch)
    outputs = [cell.get("outputs", []) for cell in notebook.cells]
    trained = next(outputs[place] for place, cell in enumerate(notebook.cells) if "train(\n" in cell.source)
    pictures = [output for output in trained if "image/png" in output.get("data", {})]
    assert len(pictures) == 1, "one display, which is updated"
    answers, scores, folder = (eval(each[-1]["data"]["text/plain"]) for each in outputs[-3:])
    assert list(map(len, answers)) == [2, 2]
    assert scores["val-core/data/reward/mean@1"] > 0.3 and folder == "hf"


STEPS = {"1_train": 3, "2_rewards": 20, "3_stages": 10, "4_agent": 2, "5_reading_a_run": 20}
"""Steps of the runs in the tests. Right answers, reward hacking and trends need the notebook's own number."""

CHECKS = {
    "2_rewards": """
columns = hacked.metrics[["critic/score/mean", "reward/acc/mean"]].dropna()
(score, right), (last_score, last_right) = columns.iloc[[0, -1]].values
assert last_score > score and last_right < right / 2, "the reward is exploited"
assert repaired.metrics["reward/acc/mean"].iloc[-1] > 2 * last_right, "and the repaired one is not"
""",
    "3_stages": "assert nothing.metrics['actor/grad_norm'].dropna().eq(0).all()",
    "4_agent": "assert result.metrics['env/error_rate'].dropna().eq(0).all()",
}
"""What the text of a lesson says about its runs."""


def test_each_lesson_is_executed_and_listed() -> None:
    names = sorted(file.stem for file in LESSONS.glob("*.ipynb"))
    assert names == sorted(STEPS)
    index = (LESSONS / "README.md").read_text(encoding="utf-8")
    assert all(f"]({name}.ipynb)" in index for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_lesson_runs_and_prints_the_failures_that_it_quotes(
    name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = execute(LESSONS / f"{name}.ipynb", tmp_path, cache, monkeypatch, STEPS[name], CHECKS.get(name, ""))
    sources = [cell.source for cell in notebook.cells]
    begin = next(place for place, source in enumerate(sources) if source.startswith(FAILURES))
    quotes = re.findall(r"^```text\n(.*?)^```$", "\n".join(sources[begin:]), re.DOTALL | re.MULTILINE)
    assert quotes, "the last section quotes a message"

    output = printed(notebook)
    for quote in quotes:
        words = " ".join(quote.split())
        pattern = re.escape(words).replace(re.escape("..."), ".*?")
        assert re.search(pattern, output), f"{words}\n\nwas not printed:\n{output}"


@pytest.mark.parametrize("file", [QUICKSTART, *sorted(LESSONS.glob("*.ipynb"))], ids=lambda file: file.stem)
def test_a_notebook_is_stored_without_outputs(file: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = [cell for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)
