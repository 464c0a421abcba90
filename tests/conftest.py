"""For all tests: a run that a test makes logs nothing that trainer/METRICS.md does not explain.

`nothing_stays` is for those that import or register something of their own, `ranks` for those of several processes.

After each test the run folders among its fixtures are looked at: a path, or an object with `run_dir`. With
RECORD_METRICS=FILE the names that were logged are appended to it, for `python -m tests.unlogged_metrics FILE`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.ranks import OnRanks, Ranks
from trainer.observe.metric_docs import find
from verl_lite.registry import importing

FOLDERS = ("", "*/", "*/*/", "*/*/*/")
OF_USERS = "my_recipe/"  # what the guide's example logs
_read: dict[Path, int] = {}


@pytest.fixture
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of a test's folder, paths, and what it registers are gone after it."""
    from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl_lite.envs import ENVS
    from verl_lite.group_filters import GROUP_FILTERS

    monkeypatch.setattr(sys, "path", list(sys.path))
    registries: list[Any] = [ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, GROUP_FILTERS, ENVS]
    modules, before = set(sys.modules), [dict(registry) for registry in registries]
    yield
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__path__", getattr(sys.modules[name], "__file__", ""))):
            del sys.modules[name]
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    with importing():
        return (yield)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that form groups of up to four; they start when they are first needed, which takes seconds."""
    with Ranks(4, timeout_s=600) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_ranks(ranks: Ranks) -> OnRanks:
    """Runs a function on two of them."""
    return functools.partial(ranks.run, size=2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    result = yield
    names = logged_names(run_files(getattr(item, "funcargs", {}).values()))
    if names and (record := os.environ.get("RECORD_METRICS")):
        with open(record, "a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in sorted(names))
    unknown = sorted(name for name in set(names) if find(name) is None and not name.startswith(OF_USERS))
    assert not unknown, f"logged and not explained: {', '.join(unknown)}. Add a line to trainer/METRICS.md"
    return result


def run_files(values: Iterable[Any]) -> Iterator[Path]:
    """metrics.jsonl of the runs in these fixtures' folders: beside a command's config.yaml, or the model of a
    supervised training."""
    for value in values:
        folder = value if isinstance(value, Path) else getattr(value, "run_dir", None)
        if isinstance(folder, Path) and folder.is_dir():
            for depth in FOLDERS:
                yield from (file for file in folder.glob(f"{depth}metrics.jsonl") if _is_run(file.parent))


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "hf").is_dir()


def logged_names(files: Iterable[Path]) -> set[str]:
    """Names in files that were not read at their present size yet."""
    names: set[str] = set()
    for file in files:
        size = file.stat().st_size
        if _read.get(file) == size:
            continue
        _read[file] = size
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                names |= set(json.loads(line).get("data", {}))
            except json.JSONDecodeError:
                continue  # cut off by the death that the test is about
    return names
