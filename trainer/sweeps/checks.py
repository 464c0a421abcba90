"""What is wrong with a sweep, found before any run starts: keys, values, combinations, the metric.

A value is checked by itself by the loader of the command's options (unknown keys, wrong types, verl's spellings); then
each combination of a grid, or the corners of a space without end, by the checks that the command itself would make.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from trainer.resume import flat_config
from trainer.sweeps.options import Plan, Question
from trainer.sweeps.space import Space, Value
from trainer.sweeps.targets import COMMANDS, OWN_KEYS, SEED, Target
from verl_lite.config import ConfigError
from verl_lite.errors import UserError

MOST_CORNERS = 64
"""Of a space that are looked at before it starts; every other combination is, before it runs."""
_CLOSED = ("val-core", "val-aux")
"""Families of metrics of which every name is known, whatever data and rewards are called."""
_NEAR = 0.9
"""Similarity from which an unknown name is a known one with a slip; code of users may log names of its own."""


def words_of(question: Question, values: Mapping[str, Value]) -> list[str]:
    """The words of a run's command that the question and a trial give it."""
    return [*_files(question), *question.settings, *question.space.settings(values)]


def check_question(question: Question, target: Target, plan: Plan) -> None:
    """Everything that can be told of the words by themselves. Raises UserError with all problems."""
    problems = list(_single_problems(question, target))
    if not question.metric:
        problems.append(
            "--metric is not given: what shall be compared, such as val-core/gsm8k/acc/mean@1 or critic/score/mean? "
            "metrics.jsonl of any run has the names"
        )
    words = [*question.settings, *itertools.chain(*question.space.samples())]
    if question.seeds is not None and any(_key(word) == SEED for word in words):
        problems.append(f"{SEED} is given, and seeds={list(question.seeds)} gives it to each run: leave one out")
    if not question.space.parameters and question.seeds is None:
        problems.append(
            "there is nothing to vary: give a key several values (actor.optim.lr=1e-6,3e-6), a range "
            "(actor.optim.lr=log(1e-7,1e-5)), or seeds=3"
        )
    if plan.kind == "optuna" and not question.space.parameters:
        problems.append("--optuna without a parameter has nothing to choose")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    if plan.kind == "grid":
        next(question.space.grid())  # a range without end has none


def _single_problems(question: Question, target: Target) -> Iterator[str]:
    samples = list(question.space.samples())
    for word in dict.fromkeys([*question.settings, *itertools.chain(*samples)]):
        if _key(word) in OWN_KEYS and target.options != "none":
            yield f"{word}: a sweep gives {_key(word)} to each run itself; leave it out"
    if target.schema is None:
        return
    for sample in samples:
        try:
            target.load([*_files(question), *question.settings, *sample])
        except ConfigError as error:
            yield from (problem.replace(" (command line)", "") for problem in error.problems)
            if target.name not in COMMANDS:
                yield f"words of {target.name} are checked as --options {target.options}; --options none checks nothing"


def _files(question: Question) -> list[str]:
    return [word for name in question.files for word in ("--config", name)]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").removeprefix("actor_rollout_ref.")


class Combinations:
    """Checks whole configurations: of trials, before they run.

    devices: GPUs of each run; None = on a CPU. skip_invalid: those that are refused are left out, which is no failure.
    """

    def __init__(self, question: Question, target: Target, devices: int | None, *, skip_invalid: bool = False) -> None:
        self._question, self._target, self._devices = question, target, devices
        self.skip_invalid = skip_invalid
        self._prepared = False

    def problem(self, values: Mapping[str, Value]) -> str | None:
        """What the command would say of a combination; None if it would start."""
        if self._target.schema is None:
            return None
        try:
            config = self._target.load(words_of(self._question, values)).config
            if not self._prepared:
                self._target.prepare(config)
                self._prepared = True
            self._target.check(config, self._devices)
        except UserError as error:
            return str(error)
        return None

    def config(self, values: Mapping[str, Value], more: Collection[str] = ()) -> dict[str, Any]:
        """The configuration of a trial, flat; empty where the command's words are not looked at."""
        if self._target.schema is None:
            return {}
        loaded = self._target.load([*words_of(self._question, values), *more])
        return flat_config(loaded.config)

    def check(self, plan: Plan) -> list[dict[str, Value]]:
        """Checks all combinations that may be run, or the corners; gives those to be left out.

        Raises UserError if one is refused, unless skip_invalid, or if all are.
        """
        space = self._question.space
        finite = space.is_listed(plan.kind)
        looked_at = list(itertools.islice(space.grid(), 4 * MOST_CORNERS) if finite else space.corners(MOST_CORNERS))
        refused = [(values, problem) for values in looked_at if (problem := self.problem(values)) is not None]
        if refused and (not self.skip_invalid or len(refused) == len(looked_at)):
            raise UserError(_refusals(refused, len(looked_at), finite, space))
        return [values for values, _ in refused] if finite else []

    def first(self, plan: Plan, refused: Collection[Mapping[str, Value]]) -> dict[str, Value]:
        """A combination that is not left out."""
        space = self._question.space
        combinations = space.grid() if space.is_listed(plan.kind) else space.corners(1)
        return next(values for values in combinations if values not in refused)

    def check_metric(self, values: Mapping[str, Value]) -> None:
        """Raises UserError if the metric cannot appear in a run with this configuration, as far as that is known."""
        if self._target.schema is None:
            return
        config = self._target.load(words_of(self._question, values)).config
        if "jsonl" not in getattr(config.trainer, "logger", ("jsonl",)):
            raise UserError(
                f"trainer.logger={list(config.trainer.logger)}: a sweep reads metrics.jsonl; add jsonl to the list"
            )
        if self._target.name in COMMANDS:
            check_metric_name(self._question.metric)
        if self._target.options == "ppo":
            _check_ppo_metric(self._question.metric, config)


def _refusals(refused: list[tuple[dict[str, Value], str]], looked_at: int, finite: bool, space: Space) -> str:
    what = "combinations" if finite else "corners of the space"
    lines = []
    for values, problem in refused[:3]:
        named = ", ".join(f"{name}={value}" for name, value in values.items()) or "the run"
        lines.append(f"  {named}:\n    " + problem.replace("\n", "\n    "))
    if len(refused) > 3:
        lines.append(f"  and {len(refused) - 3} more")
    hint = "" if len(refused) == looked_at else "\nChange the values, or leave these out with --skip-invalid"
    return f"{len(refused)} of {looked_at} {what} would be refused by the command:\n" + "\n".join(lines) + hint


def check_metric_name(metric: str) -> None:
    """Raises UserError for a name that no run of a command of this project logs: one that is not documented, and in a
    closed family, or very near to a documented one. Other names may come from code of users."""
    from trainer.metric_docs import find, metrics

    if find(metric) is not None:
        return
    known = [name for documented in metrics() for name in documented.names]
    listed = "`python -m trainer.metrics_reference` lists all"
    family, slash, rest = metric.partition("/")
    if family in _CLOSED:
        patterns = [name for name in known if name.startswith(f"{family}/") and "@" in name and "ci95" not in name]
        raise UserError(f"--metric {metric}: names of {family}/ are {', '.join(patterns)}; {listed}")
    families = {name.partition("/")[0] for name in known if "/" in name}
    near = difflib.get_close_matches(metric, known, n=1, cutoff=_NEAR)
    nearest = difflib.get_close_matches(family, families, n=1, cutoff=0.6) if slash and family not in families else []
    if near or nearest:
        what, meant = ("is called so", near[0]) if near else (f"begins with {family}/", f"{nearest[0]}/{rest}")
        raise UserError(f"--metric {metric}: no metric {what}; did you mean {meant}? {listed}")


def _check_ppo_metric(metric: str, config: Any) -> None:
    family = metric.partition("/")[0]
    if family not in _CLOSED:
        return
    trainer = config.trainer
    if trainer.test_freq == 0:
        raise UserError(
            f"--metric {metric}: trainer.test_freq=0, so nothing is validated after the start; set "
            "trainer.test_freq=20, or -1: only at the end"
        )
    if not config.data.val_files and not config.agentic.val_batch_size:
        raise UserError(f"--metric {metric}: data.val_files is empty, so nothing is validated; name them")
    asked, answers = metric.rpartition("@")[2].partition("/")[0], config.rollout.val_kwargs.n
    if family == "val-core" and asked.isdigit() and int(asked) != answers:
        raise UserError(
            f"--metric {metric}: validation has {answers} answers to each prompt (rollout.val_kwargs.n), so it logs "
            f"...@{answers}; write {metric.rpartition('@')[0]}@{answers}, or set rollout.val_kwargs.n={asked}"
        )


def missing_metric(metric: str, names: Collection[str], run: str) -> str:
    """What to say when a run has ended, or validated, without the metric."""
    near = difflib.get_close_matches(metric, names, n=3, cutoff=0.5)
    family = [name for name in sorted(names) if name.partition("/")[0] == metric.partition("/")[0]]
    shown = near or family[:5] or sorted(names)[:5]
    there = f"it logs {', '.join(shown)}" + (", ..." if len(names) > len(shown) else "") if names else "it logs none"
    did = f"; did you mean {near[0]}?" if near else ""
    return f"--metric {metric}: {run} does not log it{did} (of {len(names)} names {there})"
