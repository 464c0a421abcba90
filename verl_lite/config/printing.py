"""Prints a configuration with the sources of its values, writes it to a file, and prints the help of all keys."""

import dataclasses
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import yaml
from omegaconf import DictKeyType, OmegaConf

from verl_lite.config.loader import LoadedConfig
from verl_lite.config.option_table import Key, Schema, schema_of, value_of
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.sources import SWITCHES
from verl_lite.errors import UserError

_COMMENT_COLUMN = 64
# shown by --help
_MOST_USED = (
    "recipe model.path data.train_files data.val_files data.train_batch_size data.max_prompt_length "
    "data.max_response_length rollout.n rollout.name actor.optim.lr actor.use_kl_loss algorithm.adv_estimator "
    "reward.custom_reward_function.path trainer.total_epochs trainer.n_gpus_per_node trainer.dry_run"
)


def print_config(loaded: LoadedConfig[object]) -> str:
    """Returns YAML of all resolved options, with the source of each value as a comment (`# command line`)."""
    schema = schema_of(type(loaded.config))
    sources = dict(loaded.provenance)
    for name in schema.keys:
        loaded_value = OmegaConf.select(loaded.omega, name)
        if OmegaConf.is_config(loaded_value):
            loaded_value = OmegaConf.to_object(loaded_value)
        if value_of(loaded.config, name) != loaded_value:
            # number of devices, files that a recipe wrote
            sources[name] = "filled in at launch"

    lines = [f"# {note}" for note in loaded.notes]
    resolved = OmegaConf.to_container(OmegaConf.structured(loaded.config), resolve=True)
    assert isinstance(resolved, dict)
    lines += _render(resolved, (), sources, schema)
    return "\n".join(lines) + "\n"


def save_config(loaded: LoadedConfig[object], path: str | Path) -> Path:
    """Writes `print_config(loaded)`, from which `--config PATH` loads the same configuration."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(print_config(loaded), encoding="utf-8")
    return path


def help_text(loaded: LoadedConfig[object]) -> str:
    """Returns the text of --help or --help-config."""
    root: type = type(loaded.config)
    if loaded.help_prefix is not None:
        return help_config(root, loaded.help_prefix)
    keys = schema_of(root).keys
    # the name of the command under `python -m`; a program that calls this function has no such name
    module = getattr(sys.modules["__main__"].__spec__, "name", "trainer.main_ppo")
    lines = [f"usage: python -m {module} key=value ...   (switches: {SWITCHES})", ""]
    lines += ["--help-config PREFIX explains keys, such as --help-config actor.optim. The sections are:", ""]
    for field in dataclasses.fields(root):
        lines.append(f"  {field.name:<14} {field.metadata['doc']}")

    lines += ["", "Most used:", ""]
    for name in _MOST_USED.split():
        if name in keys:
            lines.append(f"  {name} = {_default(keys[name].default)}")
    return "\n".join(lines) + "\n"


def help_config(root: type = PPOConfig, prefix: str = "") -> str:
    """Returns type, default and help of all keys that begin with `prefix`. Raises UserError if there are none."""
    schema = schema_of(root)
    all_keys = schema.keys.values()
    # with a dot at the end, so that the prefix `actor.optim.lr.` selects this key alone
    keys = [key for key in all_keys if f"{key.name}.".startswith(prefix)]
    if not keys:
        near = schema.nearest(prefix) or sorted({key.path[0] for key in all_keys})
        raise UserError(f"--help-config {prefix}: no key begins with this prefix; there are {', '.join(near)}")

    lines = ["Options are key=value; verl's prefix actor_rollout_ref. is optional."]
    for key in keys:
        lines.append(f"  {key.name} = {_default(key.default)}   ({_values_text(key)})")
        lines += textwrap.wrap(key.doc, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _values_text(key: Key) -> str:
    """Returns the values that an option accepts, in words."""
    if isinstance(key.expects, tuple):
        text = " | ".join(key.expects)
    elif key.kind == "list":
        text = f"list of {key.item}"
    else:
        text = key.kind
    return f"{text} or null" if key.optional else text


def _render(
    node: Mapping[DictKeyType, object], path: tuple[str, ...], sources: dict[str, str], schema: Schema
) -> list[str]:
    """Returns the YAML lines of a mapping, with the source of each value as a comment.

    Args:
        node: the mapping.
        path: the parts of its key.
        sources: the source of each value by its dotted key.
        schema: the options of the command.
    """
    lines: list[str] = []
    indentation = "  " * len(path)
    for name, value in node.items():
        start = f"{indentation}{_flow(str(name))}:"
        path_of_value = (*path, str(name))
        dotted = ".".join(path_of_value)
        # a free dictionary that one source gives whole stays on one line; else each entry has a source of its own
        has_lines = dotted in schema.sections or dotted not in sources
        if isinstance(value, dict) and value and has_lines:
            lines.append(start)
            lines += _render(value, path_of_value, sources, schema)
        else:
            setting = f"{start} {_flow(value)}"
            source = sources.get(dotted, "default")
            lines.append(f"{setting:<{_COMMENT_COLUMN}} # {source}")
    return lines


class _OneLine(yaml.SafeDumper):
    """Dumps YAML on one line that OmegaConf reads back unchanged.

    Text other than plain words is quoted, because OmegaConf parses `1e-6` as a number and `${` as a reference.
    """

    def ignore_aliases(self, data: object) -> bool:
        # no anchors (&id001) for a list that occurs twice
        return True

    def text(self, text: str) -> yaml.ScalarNode:
        """Returns a text as YAML writes it, in quotation marks unless it consists of plain words."""
        is_plain = re.fullmatch(r"[A-Za-z_/][\w/.-]*( [\w/.-]+)*", text, re.ASCII)
        style = None if is_plain else '"'
        escaped = text.replace("${", r"\${")
        return self.represent_scalar("tag:yaml.org,2002:str", escaped, style)


_OneLine.add_representer(str, _OneLine.text)


def _default(value: object) -> str:
    """Formats a default value for the help. `${...}` is not escaped, because it refers to another key."""
    return _flow(value).replace(r"\\${", "${")


def _flow(value: object) -> str:
    """Formats a value as YAML on one line."""
    # in a list whose brackets are removed again, because YAML ends a single value by a line with `...`; wider than any
    # value, because YAML would break a longer line
    text: str = yaml.dump(
        [value], Dumper=_OneLine, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False
    )
    return text.strip()[1:-1]
