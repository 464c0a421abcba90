"""Every option that a message names exists, so that a user can follow its advice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from verl_lite.config import PPOConfig, RewardTrainingConfig, SFTConfig
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.config.flow_grpo import FlowGRPOConfig
from verl_lite.config.option_table import schema_of
from verl_lite.config.spellings import ppo_keys, sft_keys

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("verl_lite", "workers", "trainer", "recipes")
ROOTS = (PPOConfig, SFTConfig, RewardTrainingConfig, RewardFlowConfig, FlowGRPOConfig)
KEYS = {name: key for root in ROOTS for name, key in schema_of(root).keys.items()}
SECTIONS = {name for root in ROOTS for name in schema_of(root).sections}
FOREIGN = {*ppo_keys().entries, *sft_keys().entries, *RewardFlowConfig.gone}
"""Names of verl and ROLL, and of removed options, which messages may repeat."""
FILES = ("py", "pt", "pkl", "safetensors", "jsonl", "yaml")
NO_OPTIONS = {
    "data.meta_info",  # the attribute of a batch
    "data.KEY",  # placeholders of usage lines
    "reward.KEY",
}
TOPS = "|".join(sorted({name.partition(".")[0] for name in SECTIONS}))
OPTION = re.compile(rf"(?<![\w./~{{-])((?:{TOPS})(?:\.[A-Za-z_]\w*)+)(?![\w/(])(\{{?)")


def is_known(name: str, *, is_beginning: bool = False) -> bool:
    """True if `name` is an option, a section, an entry of a free dictionary, a foreign name or a module."""
    if name in KEYS or name in SECTIONS or name in FOREIGN or name in NO_OPTIONS:
        return True
    if name.rpartition(".")[2] in FILES:
        return True
    if (is_beginning or name.endswith("_")) and any(key.startswith(name) for key in KEYS):
        return True
    parts = name.split(".")
    above = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    if any(key in KEYS and KEYS[key].kind == "dict" for key in above):
        return True
    is_below_foreign = any(key in FOREIGN and "." in key for key in above)
    module = ROOT.joinpath(*parts)
    is_module = module.with_suffix(".py").is_file() or module.is_dir()
    return is_below_foreign or is_module or name == "trainer.train"


def messages(path: Path) -> Iterator[str]:
    """Yields the texts of a file of code, with `{` for values, without docstrings; or all texts of a table."""
    if path.suffix == ".yaml":
        yield from _texts(yaml.safe_load(path.read_text(encoding="utf-8")))
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[int] = set()  # docstrings, and the parts of f-strings
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{" for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, dict):
        for entry in content.values():
            yield from _texts(entry)
    elif isinstance(content, list):
        for entry in content:
            yield from _texts(entry)
    elif isinstance(content, str):
        yield content


@pytest.mark.parametrize("package", PACKAGES)
def test_every_option_that_a_message_names_exists(package: str) -> None:
    paths = [*(ROOT / package).rglob("*.py"), *(ROOT / package).glob("config/*.yaml")]
    unknown = {
        f"{path.relative_to(ROOT)}: {match[1]}"
        for path in paths
        for text in messages(path)
        for match in OPTION.finditer(text)
        if not is_known(match[1], is_beginning=bool(match[2]))
    }
    assert not unknown


def test_the_check_sees_a_name_that_does_not_exist() -> None:
    assert not is_known("actor.clip_rato") and not is_known("rollout.val_kwargs.temprature")
    assert is_known("distillation.teachers.NAME.path") and is_known("data.train_batch_size")
    assert [match[1] for match in OPTION.finditer("set actor.clip_rato=1, or leave it")] == ["actor.clip_rato"]
