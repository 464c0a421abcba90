"""What users import stays where it is: the names in README, guides, notebooks and examples of the documentation.

Restructuring moves modules. A name in this table does not move without a release note and a module at its old place.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("trainer", "workers", "verl_lite")

PUBLIC: dict[str, tuple[str, ...]] = {
    "trainer": ("TrainResult", "train"),
    "trainer.callbacks": ("Callback",),
    "trainer.export": ("main",),
    "trainer.inspect": ("main",),
    "trainer.main_eval": ("main",),
    "trainer.main_generate": ("main",),
    "trainer.main_ppo": ("main",),
    "trainer.main_sft": ("main",),
    "trainer.ray_trainer": ("RayPPOTrainer",),
    "trainer.recipe": ("load_recipe",),
    "trainer.supervised.reward_training": ("RewardTrainingJob",),
    "trainer.tracking": ("TRACKERS", "TrackedRun", "read_metrics", "register_tracker"),
    "verl_lite.config": ("FSDPConfig", "ModelConfig", "OptimConfig", "PPOConfig", "RewardTrainingConfig", "SFTConfig"),
    "verl_lite.contracts": ("check_policy_loss",),
    "verl_lite.core_algos": (
        "LossInputs",
        "LossResult",
        "compute_grpo_outcome_advantage",
        "compute_policy_loss",
        "group_ids",
        "group_mean_std",
        "outcome_scores",
        "register_adv_est",
        "register_policy_loss",
    ),
    "verl_lite.envs": ("make_env", "register_env"),
    "verl_lite.envs.actions": ("ActionParser",),
    "verl_lite.envs.calculator": ("evaluate",),
    "verl_lite.errors": ("UserError",),
    "verl_lite.group_filters": ("register_group_filter",),
    "verl_lite.metrics": ("Metric",),
    "verl_lite.protocol": ("DataProto",),
    "verl_lite.rewards": ("default_compute_score", "register_reward"),
    "verl_lite.seqlen_balance": ("plan_batch",),
    "verl_lite.single_controller": ("create_worker_groups",),
    "verl_lite.single_controller.decorator": ("Dispatch", "register"),
    "verl_lite.visual_rewards": ("VisualScore", "as_pixels", "register_visual_reward"),
    "workers.engine.fsdp": ("FSDPEngine",),
    "workers.engine.packing": ("pack",),
    "workers.policy.causal_lm": ("causal_lm",),
    "workers.policy.loading": ("NetworkSpec", "load_model_config", "token_network"),
    "workers.policy.token_mixing": ("arrangement_of",),
}

COMMANDS = (
    "export inspect main_eval main_generate main_ppo main_reward_flow main_rm main_sft new_recipe plan replay report "
    "score sweep"
).split()


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_stay_where_they_are(module: str) -> None:
    imported = importlib.import_module(module)
    missing = [name for name in PUBLIC[module] if not hasattr(imported, name)]
    assert not missing, f"{module} no longer has {missing}"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_stay_where_they_are(command: str) -> None:
    assert (ROOT / "trainer" / f"{command}.py").is_file()


def documented_code() -> Iterator[tuple[str, str]]:
    """Yields (file, Python code) of the code blocks of all pages, and of the cells of all notebooks."""
    for page in sorted(ROOT.rglob("*.md")):
        relative = page.relative_to(ROOT).as_posix()
        if relative == "CHANGELOG.md" or relative.startswith((".", "tests/")):
            continue
        for block in re.findall(r"(?ms)^```python\n(.*?)^```", page.read_text(encoding="utf-8")):
            yield relative, block
    for notebook in sorted((ROOT / "recipes").rglob("*.ipynb")):
        for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield notebook.relative_to(ROOT).as_posix(), "".join(cell["source"])


def test_the_table_has_every_import_of_the_documentation() -> None:
    absent = []
    blocks = 0
    for file, code in documented_code():
        blocks += 1
        lines = [line for line in code.splitlines() if not line.lstrip().startswith(("!", "%"))]
        for node in ast.walk(ast.parse("\n".join(lines))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in PRODUCT:
                continue
            for alias in node.names:
                is_listed = alias.name in PUBLIC.get(str(node.module), ()) or f"{node.module}.{alias.name}" in PUBLIC
                if not is_listed:
                    absent.append(f"{file}: from {node.module} import {alias.name}")
    assert blocks > 20, "the pages have code"
    assert not absent, f"imports that PUBLIC does not list: {absent}"
