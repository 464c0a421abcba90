"""The notebook of the quickstart runs from its first to its last cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import ROOT, python_path

NOTEBOOK = ROOT / "recipes" / "quickstart" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_trains_and_shows_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.get("outputs", []) for cell in notebook.cells]
    trained = next(outputs[place] for place, cell in enumerate(notebook.cells) if "train(\n" in cell.source)
    pictures = [output for output in trained if "image/png" in output.get("data", {})]
    assert len(pictures) == 1, "one display, which is updated"
    answers, scores, folder = (eval(each[-1]["data"]["text/plain"]) for each in outputs[-3:])
    assert list(map(len, answers)) == [2, 2]
    assert scores["val-core/data/reward/mean@1"] > 0.3 and folder == "hf"
    assert not any(cell.outputs for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code")
