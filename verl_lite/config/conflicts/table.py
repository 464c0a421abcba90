"""A row of the table of conflicts, and the message that is built from it."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from verl_lite.config.fields import Problems
from verl_lite.config.option_table import setting_text, value_of

C = TypeVar("C")
"""The options of the commands that have the row, such as `PPOConfig`."""

Condition = Callable[[C, Any], object]
"""Receives the configuration and the value of the row's key, whose type is that of the option. Returns a true value if
they are in conflict."""

Text = str | Callable[[C], str]
"""A text, or a function that builds it from the configuration."""


@dataclass(frozen=True)
class Conflict(Generic[C]):
    """A row of the table.

    Args:
        keys: dotted keys, each of which alone can cause the conflict. A part `*` stands for any entry of a free
            dictionary, as in `data.sources.*.n`.
        is_violated: condition under which the configuration is refused.
        reason: why the values cannot work together, or what is expected.
        remedy: what to set instead.
        beside: the options that the key is in conflict with. The message shows their values.
    """

    keys: tuple[str, ...]
    is_violated: Condition[C]
    reason: Text[C]
    remedy: Text[C]
    beside: tuple[str, ...] = ()

    def problems(self, config: C, out_of_range: Collection[str]) -> Problems:
        """Yields a message for each key that is in conflict.

        Args:
            config: the configuration.
            out_of_range: keys with a value outside their range, of which nothing else is reported.
        """
        # the message would show the wrong value, which is the first thing to correct
        if any(key in out_of_range for key in self.beside):
            return
        for pattern in self.keys:
            for key, value in _settings(config, pattern):
                if key not in out_of_range and self.is_violated(config, value):
                    yield self.message(config, key, value)

    def message(self, config: C, key: str, value: object) -> str:
        """Returns `KEY=VALUE with OTHER=VALUE: REASON: REMEDY`."""
        settings = setting_text(key, value)
        others = [setting_text(other, value_of(config, other)) for other in self.beside]
        if others:
            settings += f" with {' and '.join(others)}"
        return f"{settings}: {_text(self.reason, config)}: {_text(self.remedy, config)}"


def _text(text: Text[C], config: C) -> str:
    """Returns a text of a row, which may have to be built from the configuration."""
    return text if isinstance(text, str) else text(config)


def _settings(config: object, pattern: str) -> Iterator[tuple[str, object]]:
    """Yields the keys that a pattern stands for, with their values."""
    name, star, leaf = pattern.partition(".*.")
    if not star:
        yield pattern, value_of(config, pattern)
        return
    entries = value_of(config, name)
    assert isinstance(entries, Mapping)
    for entry, options in entries.items():
        # an entry of another form is reported by the section's `check`
        if isinstance(options, Mapping) and options.get(leaf) is not None:
            yield f"{name}.{entry}.{leaf}", options[leaf]
