"""`python -m trainer.new_recipe NAME [--to FOLDER]`: writes a recipe that runs at once, to be made one's own.

FOLDER/NAME gets recipe.py (settings), reward.py (a reward), estimator.py (an advantage estimator), run.sh and
README.md. It trains the model of recipes/quickstart until its settings name another. Nothing is written over.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import sys
from pathlib import Path

from trainer.ending import command

RECIPE = '''"""NAME: what is tried here, in a sentence."""

from __future__ import annotations

from pathlib import Path

from recipes.quickstart import recipe as quickstart

from . import estimator  # noqa: F401  registers the estimator, here and in worker processes

# To replace a stage, subclass the trainer in a file of this folder and name it here:
#     from .stages import MyTrainer as trainer_class


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return quickstart.overrides() | {  # its small model, data and sizes; replace them by your own:
        # "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
        # "data.train_files": ["train.parquet"],
        # "data.val_files": ["test.parquet"],
        "reward.custom_reward_function.path": str(Path(__file__).with_name("reward.py")),
        "reward.custom_reward_function.name": "compute_score",
        "algorithm.adv_estimator": "NAME",
        "trainer.total_training_steps": 40,
    }


prepare = quickstart.prepare  # makes the small model where the run wants it; a function of yours may make data
'''

REWARD = '''"""The reward of NAME. It runs in processes of its own, which start faster without torch."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """The share of characters that are right, so that a nearly right answer is worth something.

    `score` is what is learnt from, `acc` what validation calls accuracy; any other number becomes a metric.
    An exception is no 0: the answer is left out and counted in reward/error_rate.
    """
    answer = solution_str.strip()
    right = sum(given == wanted for given, wanted in zip(answer, ground_truth, strict=False))
    return {
        "score": right / max(len(answer), len(ground_truth), 1),
        "acc": float(answer == ground_truth),
        "has_right_length": float(len(answer) == len(ground_truth)),
    }
'''

ESTIMATOR = '''"""The advantage estimator of NAME; `verl_lite.contracts.check_adv_estimator` tests its promises."""

from __future__ import annotations

from typing import Any

import torch

from verl_lite.core_algos import group_ids, group_mean_std, outcome_scores, register_adv_est


@register_adv_est("NAME")
def NAME(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The score less the mean score of the answers to the same question.

    token_level_rewards, response_mask: (B, T). index: (B,), equal for answers to one question. Returns advantages and
    returns, (B, T), 0 where the mask is 0. Any other column is an argument of its name: see verl_lite/README.md.
    """
    scores = outcome_scores(token_level_rewards, response_mask)  # (B,)
    groups, number = group_ids(index, scores.device)
    means, _stds, _counts = group_mean_std(scores, groups, number, response_mask.bool().any(dim=-1))
    advantages = (scores - means[groups].to(scores.dtype)).unsqueeze(-1)
    advantages = torch.where(response_mask.bool(), advantages, 0)
    return advantages, advantages
'''

RUN = """#!/usr/bin/env bash
# The recipe; further key=value arguments win over its settings.
set -euo pipefail
exec "${PYTHON:-python}" -m trainer.main_ppo recipe="$(cd "$(dirname "$0")" && pwd)" "$@"
"""

README = """# NAME

What is tried, and why it should work. Source: paper, thread, idea.

    python -m trainer.main_ppo recipe=PLACE          # or run.sh, with further key=value arguments

| setting | why |
|---|---|
| `algorithm.adv_estimator=NAME` | `estimator.py`: score less the mean of the group |
| reward | `reward.py`: share of right characters |

## Result

Command, date, hardware, wall time, seeds. `curve.png` of the run folder belongs here.

| accuracy | sampled before | sampled after | greedy before | greedy after |
|---|---|---|---|---|
| mean | | | | |

## A real model on GPUs

    python -m trainer.main_ppo recipe=PLACE model.path=Qwen/Qwen2.5-0.5B-Instruct data.train_files=train.parquet \\
        data.val_files=test.parquet data.max_prompt_length=512 data.max_response_length=1024 actor.optim.lr=1e-6

## What failed

What was tried and did not work, with its numbers.
"""

FILES = {
    "__init__.py": '"""The recipe NAME."""\n',
    "recipe.py": RECIPE,
    "reward.py": REWARD,
    "estimator.py": ESTIMATOR,
    "run.sh": RUN,
    "README.md": README,
}


def write_recipe(name: str, to: Path) -> Path:
    """Writes the folder to/name; returns it. Raises UserError for a name that Python cannot import from there, or a
    folder that exists."""
    from verl_lite.errors import UserError

    folder = to.expanduser().absolute() / name
    if problem := name_problem(name, folder):
        raise UserError(f"NAME={name!r}: {problem}; expected small letters, digits and _, for example my_recipe")
    if folder.exists():
        raise UserError(f"{folder} exists already, and nothing is written over: choose another NAME or --to FOLDER")
    if not folder.parent.is_dir():
        raise UserError(f"--to {to}: there is no folder {folder.parent}; make it first")
    folder.mkdir()
    for file, text in FILES.items():
        (folder / file).write_text(text.replace("NAME", name).replace("PLACE", place_of(folder)), encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    return folder


def name_problem(name: str, folder: Path) -> str | None:
    """Why a recipe in `folder` cannot have this name; None if it can. The estimator has the same name."""
    from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        return "the recipe is a Python package and a name in a registry"
    if keyword.iskeyword(name):
        return "Python has this word for itself"
    if name in ADV_ESTIMATOR_REGISTRY:
        return "an advantage estimator has this name already"
    if not (folder.parent / "__init__.py").exists() and importlib.util.find_spec(name) is not None:
        return "a module of this name can be imported already, and would be found instead"
    return None


def place_of(folder: Path) -> str:
    """What to give to recipe=: the name for a folder of recipes/, else the path, from here if it is below."""
    from trainer.recipe import BUILT_IN

    if folder.parent == BUILT_IN:
        return folder.name
    return f"./{folder.relative_to(Path.cwd())}" if folder.is_relative_to(Path.cwd()) else str(folder)


@command
def main(argv: list[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainer.new_recipe", description="Writes a recipe that runs.")
    parser.add_argument("name", metavar="NAME", help="of the recipe: small letters, digits and _")
    parser.add_argument(
        "--to", type=Path, default=Path("."), help="folder that gets the folder NAME; default: this one"
    )
    options = parser.parse_args(argv)
    folder = write_recipe(options.name, options.to)
    print(f"wrote {folder}: {', '.join(FILES)}\n")
    print(f"  run it        python -m trainer.main_ppo recipe={place_of(folder)}")
    print("  change it     recipe.py has the settings; the guide is recipes/README.md of verl_lite")
    return 0


if __name__ == "__main__":
    sys.exit(main())
