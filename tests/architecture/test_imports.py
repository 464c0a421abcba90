"""Who may import whom, by the table of the architecture, and what must work where a package is not installed.

    recipes -> trainer -> workers -> verl_lite -> torch, numpy, the standard library

Imports inside functions count as well: a lazy upward import is an upward import.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("verl_lite", "workers", "trainer", "recipes")
"""From the bottom to the top; each may import itself and those before it."""

FORBIDDEN: dict[str, tuple[str, ...]] = {
    "verl_lite/core_algos.py": ("verl_lite.protocol", "verl_lite.config", "transformers", "tensordict", "omegaconf"),
    "verl_lite/algos/*.py": (
        "verl_lite.protocol",
        "verl_lite.config",
        "verl_lite.core_algos",
        "tensordict",
        "omegaconf",
    ),
    "verl_lite/protocol.py": ("verl_lite.config", "transformers", "omegaconf"),
    "verl_lite/single_controller/*.py": ("vllm", "transformers", "verl_lite.config.loader"),
    "workers/engines/vllm_engine.py": ("workers.engines.hf_engine",),
    "workers/engines/hf_engine.py": ("workers.engines.vllm_engine",),
    "workers/*.py": ("omegaconf", "verl_lite.config.loader"),
    "trainer/*.py": ("torch.distributed", "recipes"),
}
"""Beyond the layers: what single modules must not import. A pattern's * also crosses folders."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "ray": ("verl_lite/single_controller/ray_*.py", "trainer/sweeps/tuning.py", "trainer/sweeps/trial_process.py"),
    "vllm": ("workers/engines/vllm_*.py",),
}
"""Packages that these places alone may import, so that the rest works without them."""

ABSENT = ("ray", "vllm", "flash_attn", "wandb")


def sources() -> list[Path]:
    return [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of a module's source; `from a import b` gives a.b."""
    package = module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(path: str, source: str) -> list[str]:
    """What one file imports against the table. path: relative to the root, with slashes."""
    layer = path.split("/")[0]
    above = LAYERS[LAYERS.index(layer) + 1 :]
    module = path.removesuffix(".py").replace("/", ".")
    banned = [
        *above,
        *(name for pattern, names in FORBIDDEN.items() if fnmatch.fnmatch(path, pattern) for name in names),
    ]
    banned += [
        package for package, places in ONLY_IN.items() if not any(fnmatch.fnmatch(path, place) for place in places)
    ]
    return sorted(
        {
            f"{path}:{line} imports {name}"
            for line, name in imports(source, module)
            for package in banned
            if is_within(name, package)
        }
    )


def test_no_module_imports_what_it_must_not() -> None:
    found = [
        problem
        for path in sources()
        for problem in violations(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not found, "imports against architecture.md:\n  " + "\n  ".join(found)


@pytest.mark.parametrize(
    ("path", "source", "caught"),
    [
        ("verl_lite/a.py", "import workers.rollout", True),
        ("verl_lite/a.py", "def f():\n    from trainer import steps", True),
        ("workers/a.py", "from trainer.steps import TrainingSteps", True),
        ("workers/a.py", "from verl_lite import protocol", False),
        ("trainer/a.py", "import importlib\nimportlib.import_module('recipes.quickstart')", True),
        ("trainer/a.py", "import importlib\nimportlib.import_module(f'recipes.{name}')", False),
        ("trainer/a.py", "import torch.distributed as dist", True),
        ("trainer/a.py", "from torch import distributed", True),
        ("trainer/a.py", "import vllm", True),
        ("workers/engines/vllm_engine.py", "import vllm", False),
        ("workers/engines/base.py", "from vllm import LLM", True),
        ("verl_lite/single_controller/ray_cluster.py", "import ray", False),
        ("verl_lite/single_controller/worker.py", "import ray", True),
        ("verl_lite/core_algos.py", "from verl_lite.protocol import DataProto", True),
        ("verl_lite/core_algos.py", "from verl_lite.registry import Registry", False),
        ("verl_lite/rewards/a.py", "from ...workers import x", True),
        ("verl_lite/config/printing.py", "from verl_lite.config.option_table import KEYS", False),
        ("verl_lite/a.py", "import raylib", False),
    ],
)
def test_the_walk_itself(path: str, source: str, caught: bool) -> None:
    assert bool(violations(path, source)) is caught


def run_python(code: str) -> str:
    """Run code in a fresh interpreter at the root of the checkout; gives the last line of its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_everything_imports_where_ray_vllm_flash_attn_and_wandb_are_missing() -> None:
    own_place = [place.replace("/", ".").removesuffix(".py") for places in ONLY_IN.values() for place in places]
    modules = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in sources()]
    modules = [module.removesuffix(".__init__") for module in modules]
    modules = [module for module in modules if not any(fnmatch.fnmatch(module, pattern) for pattern in own_place)]
    code = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
import importlib, json, traceback
import verl_lite, trainer, workers
failed = {{}}
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except Exception as error:
        failed[module] = traceback.format_exc(limit=-2)
print(json.dumps(failed))
"""
    failed = json.loads(run_python(code))
    assert not failed, "\n".join(f"{module}:\n{text}" for module, text in failed.items())


def test_the_packages_alone_import_nothing_heavy() -> None:
    code = """
import sys
import verl_lite, trainer, workers, verl_lite.config
print([name for name in ("torch", "ray", "vllm", "transformers", "datasets") if name in sys.modules])
"""
    assert run_python(code) == "[]"


def test_our_trainer_and_workers_are_the_ones_imported() -> None:
    """`trainer` and `workers` are common names; another installed package must not be in front of ours."""
    code = f"""
import json, {", ".join(LAYERS)}
print(json.dumps([{", ".join(f"{layer}.__file__" for layer in LAYERS)}]))
"""
    assert json.loads(run_python(code)) == [str(ROOT / layer / "__init__.py") for layer in LAYERS]


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Groups of files that import each other, however far around."""
    reach = {name: set(others) for name, others in edges.items()}
    for middle in edges:
        for name in edges:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    found = [{other for other in reach[name] if name in reach[other]} for name in edges if name in reach[name]]
    return [group for number, group in enumerate(found) if group not in found[:number]]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for types alone count as well."""
    names = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in sources()}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        module = f"{name}.__init__" if path.name == "__init__.py" else name
        found = {imported for _, imported in imports(path.read_text(encoding="utf-8"), module)}
        known = {part if part in names else part.rpartition(".")[0] for part in found}
        edges[name] = (known & names.keys()) - {name}
    assert not circles(edges)


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


WALL_CLOCK = {
    "trainer/inspect.py": "the age of a file",
    "trainer/observe/trackers.py": "the time of a metric",
    "workers/agents/endpoint/replies.py": "the time of a reply",
}


def test_no_deadline_and_no_duration_rests_on_a_clock_that_jumps() -> None:
    """Those are counted by `time.monotonic` or `time.perf_counter`: somebody may set the clock of a machine."""
    for file in sources():
        path, tree = file.relative_to(ROOT).as_posix(), ast.parse(file.read_text())
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        jumping = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow"} & {*calls}
        assert not jumping or path in WALL_CLOCK, f"{path}: {min(jumping)}()"
        assert "from time import" not in file.read_text(), path
