"""The commands that can be swept, and what a sweep has to know of each: its options and how they are checked.

Takes a command's name (`trainer.main_ppo`, another module, or a file FILE.py) and the name of its options; gives a
`Target`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_lite.config import LoadedConfig, Schema, did_you_mean, load_schema, schema_of
from verl_lite.errors import UserError

SCHEMAS = {
    "ppo": "verl_lite.config:PPOConfig",
    "sft": "verl_lite.config:SFTConfig",
    "rm": "verl_lite.config.reward_training:RewardTrainingConfig",
    "reward_flow": "verl_lite.config.diffusion:RewardFlowConfig",
}
"""Classes of options by name; `none` is a command whose words are not looked at."""

COMMANDS = {
    "trainer.main_ppo": "ppo",
    "trainer.main_sft": "sft",
    "trainer.main_rm": "rm",
    "trainer.main_reward_flow": "reward_flow",
}

_DEFAULT_RECIPES = {"ppo": "quickstart", "reward_flow": "reward_flow"}

SEED = "trainer.seed"
FOLDER = "trainer.default_local_dir"
NAME = "trainer.experiment_name"
RESUME = "trainer.resume_mode"
OWN_KEYS = (FOLDER, NAME, RESUME, "trainer.resume_from_path", "trainer.share_devices")
"""Keys that a sweep gives to each run itself."""


@dataclass(frozen=True)
class Target:
    """A command. name: module or file. options: name of its options in `SCHEMAS`, or none."""

    name: str
    options: str

    @property
    def words(self) -> list[str]:
        """Of the command line, after python."""
        return [self.name] if self.name.endswith(".py") else ["-m", self.name]

    @property
    def schema(self) -> Schema | None:
        """Its options; None where they are not looked at."""
        if self.options == "none":
            return None
        module, _, name = SCHEMAS[self.options].partition(":")
        return schema_of(getattr(importlib.import_module(module), name))

    def has(self, key: str) -> bool:
        """Whether it takes this key; a command whose words are not looked at takes seed and folder."""
        schema = self.schema
        return key in (SEED, FOLDER) if schema is None else key in schema.keys

    def load(self, arguments: Sequence[str]) -> LoadedConfig[Any]:
        """Its configuration from a command line. Raises ConfigError."""
        schema = self.schema
        assert schema is not None, "a command without options has no configuration"
        if "recipe" not in schema.keys:
            return load_schema(list(arguments), schema.root)
        from trainer.recipe import recipe_overrides

        usual = _DEFAULT_RECIPES[self.options]
        return load_schema(list(arguments), schema.root, recipe_loader=recipe_overrides, default_recipe=usual)

    def prepare(self, config: Any) -> None:
        """Lets the recipe make its model and data, once and not in all runs at the same time."""
        if self.has("recipe"):
            from trainer.recipe import prepare_recipe

            prepare_recipe(config)

    def check(self, config: Any, devices: int | None) -> None:
        """What the command itself would check before it starts. devices: GPUs of each run; None = on a CPU.

        Raises UserError with all problems.
        """
        if self.options in ("sft", "rm"):
            from trainer.supervised.loop import check

            check(config)
            return
        if devices is not None and config.trainer.n_gpus_per_node is None:
            config.trainer.n_gpus_per_node = devices
        if self.options == "ppo":
            from trainer.run import resolve_slots
            from verl_lite.config.checks import validate

            validate(config, slots=resolve_slots(config), available=devices)
        elif self.options == "reward_flow":
            from verl_lite.config.checks.diffusion import validate as validate_flow

            validate_flow(config, count=devices, available=devices)


def find_target(name: str, options: str | None) -> Target:
    """The target of that name. Raises UserError if there is none, or if its options are not known."""
    known = ", ".join(COMMANDS)
    if options is not None and options not in (*SCHEMAS, "none"):
        raise UserError(f"--options {options}: expected one of {', '.join(SCHEMAS)}, none")
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"--command {name}: there is no such file; the commands here are {known}")
    elif not _is_module(name):
        raise UserError(f"--command {name}: Python finds no such module; known: {known}{did_you_mean(name, COMMANDS)}")
    return Target(name, options or COMMANDS.get(name, "ppo"))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False
