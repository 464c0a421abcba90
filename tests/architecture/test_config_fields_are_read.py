"""Every option is read by some code: an option that nothing reads would be a lie to whoever sets it.

A search of the source, not a run (`verl_lite.config.fields` records that): the option's name as an attribute, in the
packages outside the files that load, check, plan with and print the configuration. Names of one word (`n`, `seed`,
`path`) count only behind their section's name, or what holds options.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl_lite.config import Key, PPOConfig, RewardTrainingConfig, SFTConfig, schema_of
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.config.flow_grpo import FlowGRPOConfig

ROOT = Path(__file__).resolve().parents[2]
ONLY_SHOWN = ("verl_lite/config/", "trainer/plan.py", "trainer/planner/")
"""How paths begin of modules that load, check, plan with or show options; a value that only they read has no effect."""

READS = tuple(f"verl_lite/config/{name}.py" for name in ("rollout_correction", "pools", "distillation"))
"""What of these makes numbers of options for the code that computes with them."""

READ_BY_KEY = ROOT / "verl_lite" / "config" / "micro_batches.py"
"""The sizes of micro-batches, a table of dotted keys whose values the driver and the planner read."""

READ_BY_THE_LOADER = {
    "recipe",
    "distillation.enabled",  # by `DistillationConfig.is_active`
    "distillation.distillation_loss.use_policy_gradient",  # by a conflict: it has to agree with loss_mode
}
KINDS = ("_config", "_options")


def source() -> str:
    """All code that may read an option."""
    paths = (path for top in ("verl_lite", "workers", "trainer", "recipes") for path in (ROOT / top).rglob("*.py"))
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    kept = [path for name, path in named.items() if name in READS or not name.startswith(ONLY_SHOWN)]
    return "\n".join(path.read_text(encoding="utf-8") for path in kept)


def attributes(text: str) -> dict[str, set[str]]:
    """By attribute what it is read from, as the text has it; "" for a name in getattr."""
    found: dict[str, set[str]] = {}
    for holder, name in re.findall(r"(?=\b((?:self\.)?\w+(?:\[\w+\])?)\.(\w+)\b(?!\s*=[^=]))", text):
        found.setdefault(name, set()).add(holder)
    for name in re.findall(r"getattr\([^)'\"]*['\"](\w+)['\"]", text):
        found.setdefault(name, set()).add("")
    return found


def is_read(key: Key, found: dict[str, set[str]]) -> bool:
    holders = found.get(key.path[-1], set())
    known = {*key.path[:-1], "", "config", "options", "settings"}
    is_known = any(holder in known or holder.startswith("self.") or holder.endswith(KINDS) for holder in holders)
    return is_known if "_" not in key.path[-1] else bool(holders)


@pytest.fixture(scope="module")
def found() -> dict[str, set[str]]:
    read = attributes(source())
    for section, name in re.findall(r'"(\w+)\.(\w+)"', READ_BY_KEY.read_text(encoding="utf-8")):
        read.setdefault(name, set()).add(section)
    return read


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig, RewardTrainingConfig, RewardFlowConfig, FlowGRPOConfig])
def test_every_option_is_read_by_some_code(root: type, found: dict[str, set[str]]) -> None:
    keys = schema_of(root).keys
    assert [name for name, key in keys.items() if name not in READ_BY_THE_LOADER and not is_read(key, found)] == []


def test_an_option_that_nobody_reads_is_found() -> None:
    keys = schema_of(PPOConfig).keys

    def reads(name: str, text: str) -> bool:
        return is_read(keys[name], attributes(text))

    assert reads("actor.clip_ratio_low", "x = cfg.clip_ratio_low or 1")
    assert not reads("actor.clip_ratio_low", "cfg.clip_ratio_low = 3; clip_ratio_low")
    assert reads("rollout.n", "self.config.rollout.n") and reads("rollout.n", "n = options.n")
    assert not reads("rollout.n", "x.n")
