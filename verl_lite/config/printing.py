"""A configuration as text: all values with their sources, the reference of all keys, and the file saved with a run."""

from __future__ import annotations

import json
import textwrap
from functools import lru_cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_lite.config.keys import Key, Schema, join, schema_of
from verl_lite.config.ppo import PPOConfig

if TYPE_CHECKING:
    from verl_lite.config.loader import LoadedConfig

_COMMENT_COLUMN = 64


def print_config(loaded: LoadedConfig[Any]) -> str:
    """YAML of every option, resolved, with the source of each value behind it (`# command line`)."""
    schema = schema_of(type(loaded.config))
    resolved = OmegaConf.to_container(OmegaConf.structured(loaded.config), resolve=True)
    lines = [f"# {note}" for note in loaded.notes]
    lines += _render(resolved, (), loaded.provenance | _filled_in(loaded, schema), schema)
    return "\n".join(lines) + "\n"


def save_config(loaded: LoadedConfig[Any], path: str | Path) -> Path:
    """Write `print_config(loaded)`; `--config PATH` reads it back to the same configuration."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(print_config(loaded), encoding="utf-8")
    return path


def help_config(root: type = PPOConfig) -> str:
    """Every key with its type, default and sentence, by section."""
    lines = ["Options are key=value; verl's prefix actor_rollout_ref. may be given or left out."]
    section: tuple[str, ...] | None = None
    for key in schema_of(root).keys.values():
        if key.path[:-1] != section:
            section = key.path[:-1]
            lines += ["", f"{'.'.join(section)}:" if section else "top level:"]
        default = _flow(key.default)
        lines.append(f"  {key.name} = {default}   ({_type_name(key)})")
        lines += textwrap.wrap(key.doc, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def _filled_in(loaded: LoadedConfig[Any], schema: Schema) -> dict[str, str]:
    """Sources of the values that were changed after loading: devices counted, files made by a recipe."""
    changed = {}
    for name in schema.keys:
        now = reduce(getattr, name.split("."), loaded.config)
        then = OmegaConf.select(loaded.omega, name)
        if now != (OmegaConf.to_container(then, resolve=True) if OmegaConf.is_config(then) else then):
            changed[name] = "filled in at launch"
    return changed


def _type_name(key: Key) -> str:
    name = f"list of {key.item}" if key.kind == "list" else key.kind
    return name + (" or null" if key.optional else "")


def _render(node: Any, path: tuple[str, ...], provenance: dict[str, str], schema: Schema) -> list[str]:
    lines: list[str] = []
    for name, value in node.items():
        here = (*path, str(name))
        indent = "  " * len(path)
        dotted = join(here)
        if isinstance(value, dict) and value and (dotted in schema.sections or dotted not in provenance):
            lines.append(f"{indent}{_scalar(str(name))}:")
            lines += _render(value, here, provenance, schema)
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
        # A resolved text may contain what would be a reference if it were read again.
        value = value.replace("${", r"\${")
    text = yaml.safe_dump(value, width=10**6, allow_unicode=True).strip().removesuffix("...").strip()
    try:
        again = OmegaConf.to_container(OmegaConf.from_dotlist([f"value=[{text}]"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException):
        again = None
    if again == {"value": [value]} and "\n" not in text:
        return text
    # Text that YAML dialects read differently (1e-6, 12:30, yes) or over several lines: JSON's quoting is safe in all.
    return json.dumps(value, ensure_ascii=False)
