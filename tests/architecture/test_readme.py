"""The README stays true: its commands exist, its options load, its links lead somewhere, its code runs."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from trainer.ray_trainer import RayPPOTrainer
from verl_lite.config import load_config

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("recipes", "verl_lite", "trainer", "tests")
NOTEBOOKS = sorted(ROOT.glob("recipes/**/*.ipynb"))
TEXTS = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/**/*.md"))])
PAGES = [*TEXTS, *NOTEBOOKS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_links_exist(page: Path) -> None:
    text = page.read_text()
    for module in set(re.findall(r"python -m ([\w.]+)", text)):
        assert importlib.util.find_spec(module), f"{page.name}: python -m {module}"
    for name in set(re.findall(r"python -m tests\.bench (\w+)", text)):
        assert (ROOT / "tests" / "bench" / f"{name}.py").exists(), f"{page.name}: bench {name}"
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
    named = re.findall(r"`((?:verl_lite|trainer|workers|tests)/[\w/]+\.(?:py|md|js))`", text)
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_benchmark_is_on_their_page() -> None:
    told = set(re.findall(r"python -m tests\.bench (\w+)", (ROOT / "tests" / "bench" / "README.md").read_text()))
    files = [path for path in (ROOT / "tests" / "bench").glob("*.py") if "def main(" in path.read_text()]
    assert told == {path.stem for path in files} - {"__main__", "step_ours", "step_trl"}  # the two sides of `step`


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert targets == {"demo", "test"}, "the README has two commands"
    for target in targets:
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_training_command_loads() -> None:
    command = re.search(r"python -m trainer\.main_ppo \\\n(.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert command is not None
    arguments = command[1].replace("\\\n", " ").split()
    config = load_config(arguments).config
    assert config.rollout.n == 8
    assert config.reward.custom_reward_function.path == "my_reward.py"


def test_the_loop_in_the_readme_is_the_trainers() -> None:
    block = re.search(r"```python\n(def fit.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    assert block[1] == textwrap.dedent(inspect.getsource(RayPPOTrainer.fit)).rstrip()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
