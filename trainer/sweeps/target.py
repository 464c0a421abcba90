"""The command that a sweep runs: its options, and what is wrong with a sweep of it, found before any run starts."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.metric_docs import find, metrics
from trainer.sweeps.options import Question, Search
from trainer.sweeps.space import MOST_LISTED, Value, combinations, words_of
from verl_lite.config import ConfigError, LoadedConfig, Schema, did_you_mean, load_schema, schema_of
from verl_lite.errors import UserError

SCHEMAS = {
    "ppo": "verl_lite.config:PPOConfig",
    "sft": "verl_lite.config:SFTConfig",
    "rm": "verl_lite.config:RewardTrainingConfig",
    "reward_flow": "verl_lite.config.diffusion:RewardFlowConfig",
}
"""Classes of options by name; `none` is a command whose words are not looked at."""

COMMANDS = {f"trainer.main_{name}": name for name in SCHEMAS}

SEED = "trainer.seed"
OWN_KEYS = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.resume_mode", "trainer.resume_from_path")
"""Keys that a sweep gives to each run itself."""

_DEFAULT_RECIPES = {"ppo": "quickstart", "reward_flow": "reward_flow"}
_MOST_LOOKED_AT = 256
"""Combinations that are checked before the start; every other one is before it runs."""
_CLOSED = ("val-core", "val-aux")
"""Families of metrics of which every name is known, whatever data and rewards are called."""


@dataclass(frozen=True)
class Target:
    """A command and the question that is asked of it.

    Args:
        options: name of its options in `SCHEMAS`, or none. gpus: of each run; None = on a CPU.
    """

    question: Question
    options: str
    gpus: int | None = None

    @classmethod
    def of(cls, question: Question) -> Target:
        return cls(question, question.options or COMMANDS.get(question.command, "ppo"))

    @property
    def _schema(self) -> Schema | None:
        if self.options == "none":
            return None
        module, _, name = SCHEMAS[self.options].partition(":")
        return schema_of(getattr(importlib.import_module(module), name))

    def has(self, key: str) -> bool:
        """Whether the command takes this key; one whose words are not looked at takes seed and own keys."""
        return key in (SEED, *OWN_KEYS[::2]) if self._schema is None else key in self._schema.keys

    def words(self, values: Mapping[str, Value], seed: int | None = None) -> list[str]:
        """Of a run's command line, after python: what the question and a trial give it."""
        question, name = self.question, self.question.command
        files = [word for file in question.files for word in ("--config", file)]
        words = [*files, *question.settings, *words_of(question.space, values)]
        words += [] if seed is None else [f"{SEED}={seed}"]
        return [*([name] if name.endswith(".py") else ["-m", name]), *words]

    def load(self, values: Mapping[str, Value]) -> LoadedConfig[Any] | None:
        """The configuration of a trial; None where the command's words are not looked at. Raises ConfigError."""
        schema, words = self._schema, self.words(values)
        if schema is None:
            return None
        words = words[1:] if self.question.command.endswith(".py") else words[2:]
        if "recipe" not in schema.keys:
            return load_schema(words, schema.root)
        from trainer.recipe import recipe_overrides

        usual = _DEFAULT_RECIPES[self.options]
        return load_schema(words, schema.root, recipe_loader=recipe_overrides, default_recipe=usual)

    def problem(self, values: Mapping[str, Value]) -> str | None:
        """What the command would say of a combination; None if it would start."""
        try:
            loaded = self.load(values)
            if loaded is not None:
                self._check(loaded.config)
        except UserError as error:
            return str(error).replace(" (command line)", "")
        return None

    def prepare(self, values: Mapping[str, Value]) -> None:
        """Lets the recipe make its model and data, once and not in all runs at the same time."""
        from trainer.recipe import prepare_recipe

        if self.has("recipe") and (loaded := self.load(values)) is not None:
            prepare_recipe(loaded.config)

    def _check(self, config: Any) -> None:
        if self.options in ("sft", "rm"):
            from trainer.supervised.loop import check

            return check(config)
        if self.gpus is not None and config.trainer.n_gpus_per_node is None:
            config.trainer.n_gpus_per_node = self.gpus
        if self.options == "ppo":
            from trainer.run import resolve_slots
            from verl_lite.config.checks import validate

            validate(config, slots=resolve_slots(config), available=self.gpus)
        else:
            from verl_lite.config.diffusion_checks import validate_reward_flow

            validate_reward_flow(config, count=self.gpus, available=self.gpus)


def find_target(question: Question) -> Target:
    """The target of a question. Raises UserError if the command is not there, or its options are not known."""
    name, options = question.command, question.options
    if options not in (None, "none", *SCHEMAS):
        raise UserError(f"--options {options}: expected one of {', '.join(SCHEMAS)}, none")
    if not (Path(name).is_file() if name.endswith(".py") else _is_module(name)):
        known = f"{', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}"
        raise UserError(f"--command {name}: there is no such file or module; the commands here are {known}")
    return Target.of(question)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def planned(question: Question, search: Search) -> list[dict[str, Value]] | None:
    """All combinations that may be run; None where the space is drawn from, since it has no end or is very large."""
    listed = [parameter.values() for parameter in question.space]
    size = 1
    for values in listed:
        size *= MOST_LISTED + 1 if values is None else len(values)
    if search.kind == "optuna" or (search.kind == "random" and size > MOST_LISTED):
        return None
    return list(combinations(question.space))


def check(target: Target, search: Search, *, skip_invalid: bool = False) -> list[dict[str, Value]]:
    """Everything that can be told before a sweep starts; prepares the recipe.

    Returns:
        Combinations that the command would refuse, to be left out (skip_invalid).

    Raises:
        UserError: with all problems.
    """
    question = target.question
    words = [
        *question.settings,
        *(w for parameter in question.space for v in parameter.ends() for w in parameter.words(v)),
    ]
    keys = dict.fromkeys(word.partition("=")[0].lstrip("+~").removeprefix("actor_rollout_ref.") for word in words)
    problems = [f"{key}: a sweep gives it to each run itself; leave it out" for key in keys if key in OWN_KEYS]
    if question.seeds is not None and SEED in keys:
        problems.append(f"{SEED} is given, and --seeds gives it to each run: leave one out")
    if not question.space and (question.seeds is None or search.kind != "grid"):
        problems.append(
            "there is nothing to vary: give a key several values (actor.optim.lr=1e-6,3e-6), a range "
            "(actor.optim.lr=log(1e-7,1e-5)), or --seeds 3"
        )
    if not question.metric:
        problems.append("--metric is not given: what shall be compared, such as val-core/gsm8k/acc/mean@1?")
    if problems:
        raise UserError("\n".join(problems))
    plan = planned(question, search)
    looked_at = list(itertools.islice(plan or combinations(question.space, corners=True), _MOST_LOOKED_AT))
    with suppress(ConfigError):  # which is told below
        target.prepare(looked_at[0])
    refused = [(values, problem) for values in looked_at if (problem := target.problem(values)) is not None]
    if refused and (not skip_invalid or len(refused) == len(looked_at)):
        raise UserError(_refusals(refused, len(looked_at)))
    good = next(values for values in looked_at if values not in [left_out for left_out, _ in refused])
    _check_metric(target, good)
    return [values for values, _ in refused]


def _refusals(refused: Sequence[tuple[Mapping[str, Value], str]], looked_at: int) -> str:
    if len({problem for _, problem in refused}) == 1 and len(refused) == looked_at:
        return refused[0][1]
    lines = [f"{len(refused)} of {looked_at} combinations would be refused by the command:"]
    for values, problem in refused[:3]:
        named = ", ".join(f"{name}={value}" for name, value in values.items())
        lines.append(f"  {named}:\n    " + problem.replace("\n", "\n    "))
    hint = "Change the values" if len(refused) == looked_at else "Change the values, or leave these out: --skip-invalid"
    return "\n".join([*lines, *([f"  and {len(refused) - 3} more"] if len(refused) > 3 else []), hint])


def _check_metric(target: Target, values: Mapping[str, Value]) -> None:
    """Raises UserError if the metric cannot appear in a run with this configuration, as far as that is known."""
    loaded, metric = target.load(values), target.question.metric
    if loaded is None:
        return
    if target.question.command in COMMANDS:
        check_metric_name(metric)
    family = metric.partition("/")[0]
    if target.options != "ppo" or family not in _CLOSED:
        return
    config = loaded.config
    if config.trainer.test_freq == 0 or not (config.data.val_files or config.agentic.val_batch_size):
        raise UserError(
            f"--metric {metric}: nothing is validated: name data.val_files, and set trainer.test_freq=20, or -1: only "
            "at the end"
        )
    asked, answers = metric.rpartition("@")[2].partition("/")[0], config.rollout.val_kwargs.n
    if family == "val-core" and asked.isdigit() and int(asked) != answers:
        raise UserError(
            f"--metric {metric}: validation has {answers} answers to each prompt (rollout.val_kwargs.n), so it logs "
            f"...@{answers}; write {metric.rpartition('@')[0]}@{answers}, or set rollout.val_kwargs.n={asked}"
        )


def check_metric_name(metric: str) -> None:
    """Raises UserError for a name that no run of a command of this project logs: one that is not documented, and in a
    closed family, or very near to a documented one. Other names may come from code of users."""
    if find(metric) is not None:
        return
    known = [name for documented in metrics() for name in documented.names]
    family, slash, rest = metric.partition("/")
    if family in _CLOSED:
        names = [name for name in known if name.startswith(f"{family}/") and "@" in name and "ci95" not in name]
        raise UserError(f"--metric {metric}: names of {family}/ are {', '.join(names)}")
    families = {name.partition("/")[0] for name in known if "/" in name}
    near = difflib.get_close_matches(metric, known, n=1, cutoff=0.9)
    if not near and slash and family not in families:
        near = [f"{found}/{rest}" for found in difflib.get_close_matches(family, families, n=1, cutoff=0.6)]
    if near:
        raise UserError(
            f"--metric {metric}: no metric is called so; did you mean {near[0]}? trainer/METRICS.md has all"
        )


def missing_metric(metric: str, names: Collection[str], run: str) -> str:
    """What to say when a run has ended, or validated, without the metric."""
    near = difflib.get_close_matches(metric, names, n=3, cutoff=0.5)
    meant = f"; did you mean {near[0]}?" if near else ""
    shown = ", ".join(near or sorted(names)[:5]) or "none"
    return f"--metric {metric}: {run} does not log it{meant} (of {len(names)} names it logs {shown})"
