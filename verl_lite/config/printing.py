"""A configuration as text: all values with their sources, the reference of all keys, and the file saved with a run."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_lite.config.loader import LoadedConfig
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.reads import option_reads, uncounted
from verl_lite.config.schema import Key, Schema, join, schema_of, split, value_of
from verl_lite.config.sources import SWITCHES
from verl_lite.errors import UserError

_COMMENT_COLUMN = 64
_MOST_USED = (
    "recipe model.path data.train_files data.val_files data.train_batch_size data.max_prompt_length "
    "data.max_response_length rollout.n rollout.name actor.optim.lr actor.use_kl_loss algorithm.adv_estimator "
    "reward.custom_reward_function.path trainer.total_epochs trainer.n_gpus_per_node trainer.dry_run"
)


def print_config(loaded: LoadedConfig[Any]) -> str:
    """YAML of every option, resolved, with the source of each value behind it (`# command line`)."""
    schema = schema_of(type(loaded.config))
    with uncounted():
        resolved = OmegaConf.to_container(OmegaConf.structured(loaded.config), resolve=True)
        provenance = loaded.provenance | _filled_in(loaded, schema)
    lines = [f"# {note}" for note in loaded.notes] + _render(resolved, (), provenance, schema)
    return "\n".join(lines) + "\n"


def save_config(loaded: LoadedConfig[Any], path: str | Path) -> Path:
    """Writes `print_config(loaded)`; `--config PATH` reads it back to the same configuration."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(print_config(loaded), encoding="utf-8")
    return path


def idle_options(loaded: LoadedConfig[Any], elsewhere: Iterable[set[str]] = (), at_end: bool = False) -> str | None:
    """A sentence about what the user set and nothing has read since `record_reads`; None where there is nothing.

    Args:
        elsewhere: what other processes have read.
        at_end: the run is over, so that nothing will be read later.
    """
    read, schema, idle = option_reads().union(*elsewhere), schema_of(type(loaded.config)), {}
    with uncounted():
        for name in loaded.given():
            key = schema.find(split(name))
            if key is None or key.name in read or key.read == "load" or (key.read and not at_end):
                continue
            if (value := value_of(loaded.config, key.name)) != key.default:
                idle[key.name] = _flow(value)
    when = "nothing in this run has read them" if at_end else "nothing has read them in the first step"
    shown = ", ".join(f"{name}={value}" for name, value in idle.items())
    return f"Options without effect ({when}): {shown}" if idle else None


def help_text(loaded: LoadedConfig[Any]) -> str:
    """What --help or --help-config asks for."""
    root = type(loaded.config)
    if loaded.help_prefix is not None:
        return help_config(root, loaded.help_prefix)
    keys = schema_of(root).keys
    module = getattr(sys.modules["__main__"].__spec__, "name", "trainer.main_ppo")
    lines = [f"usage: python -m {module} key=value ...   (switches: {SWITCHES})", ""]
    lines += ["Each key is explained by --help-config PREFIX, such as --help-config actor.optim. There are", ""]
    for start in dict.fromkeys(key.path[0] for key in keys.values()):
        below = [name for name in keys if name.startswith(f"{start}.")]
        doc = root.__dataclass_fields__[start].metadata["doc"]
        lines.append(f"  {start + '.' * bool(below):<14} {doc}" + (f" ({len(below)} keys)" if below else ""))
    used = [keys[name] for name in _MOST_USED.split() if name in keys]
    lines += ["", "Most used:", "", *(f"  {key.name} = {_flow(key.default)}" for key in used)]
    return "\n".join(lines) + "\n"


def help_config(root: type = PPOConfig, prefix: str = "") -> str:
    """Every key that begins with `prefix` with its type, default and sentence, by section. Raises UserError if none."""
    lines, section = ["Options are key=value; verl's prefix actor_rollout_ref. may be given or left out."], None
    schema = schema_of(root)
    keys = [key for key in schema.keys.values() if f"{key.name}.".startswith(prefix)]
    if not keys:
        near = schema.nearest(prefix) or sorted({key.path[0] for key in schema.keys.values()})
        raise UserError(f"--help-config {prefix}: no key begins so; there are {', '.join(near)}")
    for key in keys:
        if key.path[:-1] != section:
            section = key.path[:-1]
            lines += ["", f"{'.'.join(section)}:" if section else "top level:"]
        lines.append(f"  {key.name} = {_flow(key.default)}   ({_type_name(key)})")
        lines += textwrap.wrap(key.doc, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _filled_in(loaded: LoadedConfig[Any], schema: Schema) -> dict[str, str]:
    """Sources of the values that were changed after loading: devices counted, files made by a recipe."""
    changed = {}
    for name in schema.keys:
        then = OmegaConf.select(loaded.omega, name)
        if value_of(loaded.config, name) != (OmegaConf.to_object(then) if OmegaConf.is_config(then) else then):
            changed[name] = "filled in at launch"
    return changed


def _type_name(key: Key) -> str:
    name = f"list of {key.item}" if key.kind == "list" else key.kind
    return name + (" or null" if key.optional else "")


def _render(node: Any, path: tuple[str, ...], provenance: dict[str, str], schema: Schema) -> list[str]:
    lines: list[str] = []
    for name, value in node.items():
        here = (*path, str(name))
        indent, dotted = "  " * len(path), join(here)
        if isinstance(value, dict) and value and (dotted in schema.sections or dotted not in provenance):
            lines += [f"{indent}{_scalar(str(name))}:", *_render(value, here, provenance, schema)]
        else:
            text = f"{indent}{_scalar(str(name))}: {_flow(value)}"
            lines.append(f"{text:<{_COMMENT_COLUMN}} # {provenance.get(dotted, 'default')}")
    return lines


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    return _scalar(value)


@lru_cache(maxsize=4096, typed=True)
def _scalar(value: Any) -> str:
    """One plain value on one line, such that OmegaConf's loader reads the same value and type back."""
    if isinstance(value, str):
        value = value.replace("${", r"\${")  # a resolved text may contain what would be a reference if read again
    text = yaml.safe_dump(value, width=10**6, allow_unicode=True).strip().removesuffix("...").strip()
    try:
        again = OmegaConf.to_container(OmegaConf.from_dotlist([f"value=[{text}]"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException):
        again = None
    if again == {"value": [value]} and "\n" not in text:
        return text
    # Text that YAML dialects read differently (1e-6, 12:30, yes) or over several lines: JSON's quoting is safe in all.
    return json.dumps(value, ensure_ascii=False)
