"""Loads a configuration from a command line. Precedence: defaults < recipe < files < command line.

`load_config` reads the arguments after `python -m trainer.main_ppo` (`key=value`, `+key=value`, `++key=value`, `~key`,
`--config FILE`) and returns a `LoadedConfig`, which records the source of each value. Keys of verl and ROLL are
translated (`spellings`). Unknown keys and values of the wrong type are errors in every source; one error reports all.
`sources.py` reads the text of the sources; here their assignments are merged.
"""

import argparse
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Generic, Literal, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_lite.config import spellings
from verl_lite.config.option_table import (
    ConfigError,
    Key,
    Path,
    Schema,
    convert,
    is_interpolation,
    is_quoted,
    schema_of,
)
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.sources import COMMAND_LINE, PREFIX, Assignment, SourceReader
from verl_lite.config.supervised import SFTConfig
from verl_lite.errors import UserError

C = TypeVar("C")
# so that a function for every command takes a LoadedConfig[object]
C_co = TypeVar("C_co", covariant=True)
RecipeLoader = Callable[[str], Mapping[str, object]]
Action = Literal["run", "print", "help"]
Verbosity = Literal["quiet", "normal", "verbose"]
# of `trainer.main_ppo` without a model and data
DEFAULT_RECIPE = "quickstart"
RECIPE_FILE = "recipe.py"

_PARSER = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
_PARSER.add_argument("--config", action="append", default=[], nargs="?", const="")
_PARSER.add_argument("--help", "-h", action="store_true")
_PARSER.add_argument("--help-config", nargs="?", const="")
_PARSER.add_argument("--print-config", action="store_true")
_PARSER.add_argument("--quiet", dest="verbosity", action="store_const", const="quiet", default="normal")
_PARSER.add_argument("--verbose", dest="verbosity", action="store_const", const="verbose")
_PATHS = re.compile(r"(^|_|\.)(path|files|dir)$|class_path$")
"""Names of keys whose values are paths. A leading ~/ is expanded, because the shell leaves it in `key=~/data`."""


@dataclass
class LoadedConfig(Generic[C_co]):
    """A configuration with the sources of its values.

    Attributes:
        config: the resolved dataclasses.
        omega: the configuration with unresolved interpolations.
        provenance: source of each dotted key: "default", "recipe:NAME", "file:PATH", "command line" or another.
        notes: sentences about translated keys and keys without effect.
        action: "run", "print" (--print-config) or "help".
        verbosity: "quiet" (--quiet), "normal" or "verbose" (--verbose).
        help_prefix: prefix of the keys that --help-config prints.
    """

    config: C_co
    omega: DictConfig
    provenance: dict[str, str]
    notes: list[str]
    action: Action = "run"
    verbosity: Verbosity = "normal"
    help_prefix: str | None = None


def load_config(argv: list[str], *, recipe_loader: RecipeLoader | None = None) -> LoadedConfig[PPOConfig]:
    """Reads the command line of `trainer.main_ppo`; see `load_schema`."""
    return load_schema(argv, PPOConfig, recipe_loader=recipe_loader, default_recipe=DEFAULT_RECIPE)


def load_schema(
    argv: list[str], root: type[C], *, recipe_loader: RecipeLoader | None = None, default_recipe: str | None = None
) -> LoadedConfig[C]:
    """Reads the command line of a command whose options are the dataclass `root`.

    Args:
        argv: arguments without the program name.
        recipe_loader: returns the overrides of a recipe by name, nested or with dotted keys; None = read no recipe.
        default_recipe: recipe to use if neither a recipe nor `model.path` nor `data.train_files` is given.

    Raises:
        ConfigError: with all unknown keys, wrong values, unreadable files and unresolved references.
    """
    merge = _Merge(root, schema_of(root))
    # the words that are no switches are assignments
    options, words = _PARSER.parse_known_args(argv)
    wants_help = options.help or options.help_config is not None
    # the help is printed whatever the rest of the command line says
    if not wants_help:
        sources = [merge.reader.read_file(name) for name in options.config]
        sources.append(merge.reader.parse_words(words))
        merge.merge_sources(sources, recipe_loader, default_recipe)
    config, omega = merge.resolve()

    # one sentence for all keys that are refused for the same reason
    refusals = []
    for reason, settings in merge.refused.items():
        refusals.append(f"{', '.join(settings)}: {reason}")
    if merge.problems or refusals:
        raise ConfigError(refusals + merge.problems)

    action: Action = "run"
    if wants_help:
        action = "help"
    elif options.print_config:
        action = "print"
    # several keys can have the same note
    notes = list(dict.fromkeys(merge.notes))
    return LoadedConfig(config, omega, merge.provenance(), notes, action, options.verbosity, options.help_config)


def is_recipe_path(name: str) -> bool:
    """Returns True if the recipe name is the path of a folder or file, not a name or module."""
    return os.sep in name or name.startswith((".", "~")) or name.endswith(".py")


@dataclass
class _Merge(Generic[C]):
    """The merged assignments of the sources read so far.

    Attributes:
        root: the dataclass of the options.
        schema: the options of the command.
        leaves: last assignment of each leaf.
        notes: sentences for the user.
        problems: sentences that refuse the configuration.
        refused: keys and values by the sentence that refuses them.
        written: values of files and command line, by the key that is written there.
        reader: reads the sources; shares `problems`.
        keys: the keys of verl and ROLL for these options; None if the command has no such keys.
        speaks_verl: True if users of verl and ROLL paste whole configurations of this command.
    """

    root: type[C]
    schema: Schema
    leaves: dict[Path, Assignment] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    written: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        root: type = self.root
        tables = {PPOConfig: spellings.ppo_keys, SFTConfig: spellings.sft_keys}
        self.speaks_verl = root is PPOConfig
        self.keys = tables[root]() if root in tables else None
        self.reader = SourceReader(self.schema, self.problems)

    def value(self, name: str) -> object:
        """Returns the current value of a leaf; None if the key does not exist."""
        assignment = self.leaves.get(tuple(name.split(".")))
        if assignment is not None:
            return assignment.value
        key = self.schema.keys.get(name)
        if key is None:
            return None
        return key.default

    def source(self, name: str) -> str:
        """Returns the source of the current value of a leaf."""
        assignment = self.leaves.get(tuple(name.split(".")))
        if assignment is None:
            return "default"
        return assignment.source

    def set(self, name: str, value: object, source: str) -> None:
        """Sets a leaf to a value that no source contains, such as one that follows from other options."""
        path = tuple(name.split("."))
        self.leaves[path] = Assignment(path, value, source)

    # ------------------------------------------------------------------------------------------------ sources

    def merge_sources(
        self, sources: list[list[Assignment]], recipe_loader: RecipeLoader | None, default_recipe: str | None
    ) -> None:
        """Merges the recipe and the sources, and sets the options that follow from others.

        Args:
            sources: the assignments of each file, then those of the command line.
            recipe_loader, default_recipe: see `load_schema`.
        """
        # before the first translation, because the meaning of some keys of ROLL depends on keys of all sources
        for source in sources:
            for assignment in source:
                self.written[".".join(assignment.path)] = assignment.value
        assignments: list[Assignment] = []
        for source in sources:
            assignments += self.translate(source)

        # the recipe comes first, so that every source overrides it, although a source may name it
        of_recipe = self.recipe(assignments, recipe_loader, default_recipe)
        for assignment in of_recipe + assignments:
            self.assign(assignment)
        self.derive()
        if self.speaks_verl:
            self.notes += spellings.left_out(self.written, self.value, self.source)

    def recipe(
        self, assignments: list[Assignment], loader: RecipeLoader | None, default: str | None
    ) -> list[Assignment]:
        """Returns the assignments of the recipe: the last one that is named, or the default without model and data.

        Args:
            assignments: those of files and command line.
            loader, default: see `load_schema`.
        """
        if "recipe" not in self.schema.keys or loader is None:
            return []
        recipes = [assignment.value for assignment in assignments if assignment.path == ("recipe",)]
        if default is not None and not recipes and not _has_model_or_data(assignments):
            self.set("recipe", default, "default, because neither model.path nor data.train_files is given")
            recipes = [default]
        # recipe=null turns the default off
        if not recipes or recipes[-1] is None:
            return []
        recipe = str(recipes[-1])
        try:
            overrides = loader(recipe)
            leaves = self.reader.flatten(overrides, (), f"recipe:{recipe}")
            return self.translate(leaves)
        except UserError as error:
            self.problems.append(str(error))
            return []

    # ------------------------------------------------------------------------------------------------ merging

    def translate(self, source: Iterable[Assignment]) -> list[Assignment]:
        """Returns the assignments of one source under the names used here, without ignored and refused keys.

        On the command line the last assignment of an option counts, whatever name it has there. A file has no order:
        its renamed keys come first, so that an assignment under the name used here overrides them.
        """
        translated: list[Assignment] = []
        renamed_in_file: list[Assignment] = []
        for written in _last_of_each(source):
            assignment = replace(written, value=_strip_prefix(written.value))
            if not assignment.path:
                self.problems.append(
                    f"{PREFIX}={assignment.value} ({assignment.source}): the sections below {PREFIX} are expected"
                )
                continue
            # verl's placeholder for a required value
            if assignment.value == "???":
                continue
            verdict = self._verdict(assignment)
            # the references to a variable of a file are replaced already
            if verdict is None and assignment.path[0] in self.reader.variables:
                continue
            if verdict is None or assignment.reset:
                translated.append(assignment)
                continue

            if verdict.refusal:
                self.refused.setdefault(verdict.refusal, []).append(assignment.shown())
            if verdict.note:
                self.notes.append(verdict.note)
            if assignment.source == COMMAND_LINE:
                translated += _renamed(assignment, verdict)
            else:
                renamed_in_file += _renamed(assignment, verdict)
        translated = renamed_in_file + translated
        self.problems += self.contradictions(translated)
        return translated

    def _verdict(self, assignment: Assignment) -> spellings.Verdict | None:
        """Returns the translation of a key of verl or ROLL; None for a key that is written as here."""
        if self.keys is None:
            return None
        name = ".".join(assignment.path)
        verdict = self.keys.choose_group(name, assignment.value)
        # an option of the same name takes precedence over a key of verl
        if verdict is None and not self.reader.exists(name):
            verdict = self.keys.translate(name, assignment.value, self.written)
        return verdict

    def contradictions(self, assignments: list[Assignment]) -> Iterator[str]:
        """Yields a problem for each key of verl that has to equal an option of the same source, and does not."""
        if self.keys is None:
            return
        # `_renamed` appends the key of verl to the source
        own_values: dict[Path, object] = {}
        for assignment in assignments:
            if ", as " not in assignment.source:
                own_values[assignment.path] = assignment.value

        for assignment in assignments:
            written_as = assignment.source.partition(", as ")[2]
            entry = self.keys.entries.get(written_as)
            if entry is None or not entry.must_equal:
                continue
            value = assignment.value
            own_value = own_values.get(assignment.path, value)
            if own_value != value:
                name = ".".join(assignment.path)
                yield f"{written_as}={value}: here it is {name}, which is {own_value}: give both one value"

    def assign(self, assignment: Assignment) -> None:
        """Sets one leaf, or adds a problem."""
        path = assignment.path
        name = ".".join(path)
        key = self.schema.find(path)
        # takes back what the recipe and earlier sources have set
        if assignment.reset and (key is not None or name in self.schema.sections):
            for leaf in list(self.leaves):
                if _is_below(leaf, path):
                    del self.leaves[leaf]
            return
        if key is None:
            self.problems.append(f"{assignment.shown()}: {self._unknown(name)}")
            return

        assignment = self.worded_number(key, assignment)
        value = assignment.value
        # otherwise it is an entry of a free dictionary, which has no declared type
        is_option = path == key.path
        if is_option:
            # None is Python's word for null, which YAML reads as a text: it would be the name of a folder, for example
            takes_null = key.optional or key.kind == "list"
            if value == "None" and takes_null and not is_quoted(assignment.raw):
                self.problems.append(f"{assignment.shown()}: write null for no value")
                return
            try:
                value = convert(key, value, assignment.raw)
            except (ValueError, OverflowError):
                self.problems.append(f"{assignment.shown()}: {key.describe()}")
                return

        if key.kind == "dict":
            # an entry replaces the entries of earlier layers above and below it
            for leaf in list(self.leaves):
                if leaf != path and (_is_below(leaf, path) or _is_below(path, leaf)):
                    del self.leaves[leaf]
            # an empty dictionary has no leaf, and `flatten` yields the entries of others; a reference to a whole
            # dictionary is a leaf until it is resolved
            if is_option and not is_interpolation(value):
                return
        elif self.keys is not None:
            value, note = self.keys.same_meaning(name, value)
            if note:
                self.notes.append(note)
        self.leaves[path] = replace(assignment, value=_expand(name, value))

    def worded_number(self, key: Key, assignment: Assignment) -> Assignment:
        """Returns the assignment with a number in place of verl's word for it, such as after_each_epoch."""
        if self.keys is None or key.kind != "int" or not isinstance(assignment.value, str):
            return assignment
        number, note = self.keys.same_meaning(key.name, assignment.value)
        if number == assignment.value:
            return assignment
        if note:
            self.notes.append(note)
        return replace(assignment, value=number, raw=None)

    def _unknown(self, name: str) -> str:
        """Returns the message for an unknown key: removed option, group of options, or the nearest keys."""
        gone = getattr(self.root, "gone", {})  # any dataclass can be loaded
        if name in gone:
            return str(gone[name])
        members = [key for key in self.schema.keys if key.startswith(f"{name}.")]
        if members:
            examples = ", ".join(members[:3])
            return f"{name} is a group of options, such as {examples}"
        nearest = self.schema.nearest(name)
        if nearest:
            return f"there is no such key; did you mean {' or '.join(nearest)}?"
        return "there is no such key; --help-config lists all keys."

    def derive(self) -> None:
        """Sets the options that follow from others, and adds problems of omitted options."""
        for name in self.schema.keys:
            self._derive_switch(name)
        if self.speaks_verl:
            self._check_critic()
        if "trainer.experiment_name" in self.schema.keys and self.value("trainer.experiment_name") is None:
            self._name_run()

    def _derive_switch(self, name: str) -> None:
        """Turns off dynamic batch sizes if `name` is the size of a micro-batch, as verl does."""
        section, _, leaf = name.rpartition(".")
        if not leaf.endswith("micro_batch_size_per_gpu"):
            return
        # rollout and ref have a switch of their own for the passes that compute log-probs
        pass_prefix = "log_prob_" if leaf.startswith("log_prob") else ""
        switch = f"{section}.{pass_prefix}use_dynamic_bsz"
        if switch not in self.schema.keys:
            return
        size = self.value(name)
        # a switch that the same or a later source sets counts
        is_later = _rank(self.source(name)) > _rank(self.source(switch))
        if size is not None and is_later:
            self.set(switch, False, f"implied by {name}")
            self.notes.append(f"{switch}=false, because {name}={size} is given")

    def _check_critic(self) -> None:
        """Adds a problem if a user of verl sets options of the critic and relies on verl's default estimator."""
        names: list[str] = []
        for path, assignment in self.leaves.items():
            # a recipe (rank 1) is not what the user wrote
            if path[0] == "critic" and _rank(assignment.source) > 1:
                names.append(".".join(path))
        if names and self.source("algorithm.adv_estimator") == "default":
            self.problems.append(
                f"{', '.join(names)}: the default estimator here is grpo, which has no critic (verl's is gae): say "
                "algorithm.adv_estimator=gae, or leave all critic.* out"
            )

    def _name_run(self) -> None:
        """Names the run by its recipe and the time."""
        if self.value("trainer.resume_mode") == "auto" and self.source("trainer.default_local_dir") == "default":
            self.problems.append(
                "trainer.resume_mode=auto continues the newest checkpoint of trainer.default_local_dir, which is "
                "new in every run without a name: set trainer.experiment_name"
            )
        # the last part of a name, of a module or of a path: recipes/gsm8k/recipe.py is gsm8k
        recipe = str(self.value("recipe") or "run")
        path = recipe.removesuffix(".py").removesuffix("/recipe")
        title = re.split(r"[/.]", path)[-1]
        # two runs may start within one second in the same folder; their folders must differ
        name = f"{title}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        self.set("trainer.experiment_name", name, "made from recipe, date and time")

    def resolve(self) -> tuple[C, DictConfig]:
        """Returns the configuration as dataclasses and as OmegaConf. An unresolved reference adds a problem."""
        nested: dict[str, object] = {}
        for path, assignment in self.leaves.items():
            section = nested
            for part in path[:-1]:
                inner = section.setdefault(part, {})
                assert isinstance(inner, dict)
                section = inner
            section[path[-1]] = assignment.value
        # structured, so that OmegaConf compares resolved references with the types of their options
        omega = OmegaConf.structured(self.root)
        try:
            omega = cast(DictConfig, OmegaConf.merge(omega, nested))
            config = OmegaConf.to_object(omega)
            assert isinstance(config, self.root)
            return config, omega
        except OmegaConfBaseException as error:
            names = [str(error.full_key)]
            if not error.full_key:  # OmegaConf does not name an option that refers to no dictionary but needs one
                names = [".".join(path) for path, leaf in self.leaves.items() if is_interpolation(leaf.value)]
            settings = ""
            for name in names:
                if name in self.schema.keys:
                    settings += f"{name}={self.value(name)} "
            reason = " ".join(str(error).split())
            self.problems.append(f"{settings}cannot be resolved: {reason}")
            # the caller raises this problem together with all others
            return self.root(), omega

    def provenance(self) -> dict[str, str]:
        """Returns the source of each key and of each entry of a free dictionary."""
        # a dictionary with entries has no source of its own
        paths_above: set[Path] = set()
        for path in self.leaves:
            for depth in range(1, len(path)):
                paths_above.add(path[:depth])

        sources = {}
        for name, key in self.schema.keys.items():
            if key.path not in paths_above:
                sources[name] = "default"
        for path, assignment in self.leaves.items():
            sources[".".join(path)] = assignment.source
        return sources


def _is_below(path: Path, section: Path) -> bool:
    """Returns True for the path of a section itself, and of everything below it."""
    return path[: len(section)] == section


def _has_model_or_data(assignments: Iterable[Assignment]) -> bool:
    """Returns True if one of the assignments sets `model.path` or `data.train_files`."""
    keys = (("model", "path"), ("data", "train_files"))
    for assignment in assignments:
        is_set = assignment.value not in (None, [])
        if assignment.path in keys and is_set:
            return True
    return False


def _renamed(assignment: Assignment, verdict: spellings.Verdict) -> Iterator[Assignment]:
    """Yields the assignments of the options that a translated key sets."""
    written_as = ".".join(assignment.path)
    source = f"{assignment.source}, as {written_as}"
    for key, value in verdict.settings.items():
        # the text on the command line is that of the written value
        raw = assignment.raw if value == assignment.value else None
        yield Assignment(tuple(key.split(".")), value, source, raw)


def _last_of_each(source: Iterable[Assignment]) -> list[Assignment]:
    """Returns the last assignment of each key of a source, in the order of the source."""
    last: dict[Path, Assignment] = {}
    for assignment in source:
        # removed first, so that the key moves to the place of its last assignment
        last.pop(assignment.path, None)
        last[assignment.path] = assignment
    return list(last.values())


def _strip_prefix(value: object) -> object:
    """Removes verl's prefix from references such as `${actor_rollout_ref.actor.optim.lr}`."""
    if is_interpolation(value):
        return re.sub(rf"(?<=[{{:,]){PREFIX}\.", "", value)
    if isinstance(value, list):
        return [_strip_prefix(item) for item in value]
    return value


def _expand(name: str, value: object) -> object:
    """Expands `~/` in paths, and makes the path of a recipe absolute so that it is valid in any folder."""
    if isinstance(value, list):
        return [_expand(name, item) for item in value]
    if not isinstance(value, str):
        return value
    if name == "recipe" and is_recipe_path(value):
        return str(FilePath(value).expanduser().absolute())
    if value.startswith("~/") and _PATHS.search(name):
        return os.path.expanduser(value)
    return value


def _rank(source: str) -> int:
    """Returns the precedence of a source: 0 = default, 1 = recipe, 2 = file, 3 = command line."""
    order = ("default", "recipe:", "file:", COMMAND_LINE)
    for rank, start in enumerate(order):
        if source.startswith(start):
            return rank
    # a value that follows from other options
    return 0
