"""A row of the table of options without effect, and the situation in which its condition is evaluated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_lite.config.option_table import value_of
from verl_lite.machine.device import is_on_cpu


@dataclass(frozen=True)
class Situation:
    """The resolved options of a run, and what its files say. None and an empty set stand for unknown.

    Args:
        config: the options of the command.
        devices: number of devices.
        reads_images: whether the policy is a vision-language model.
        rows: training rows of a supervised run.
        unused_passes: passes that no step of the run needs, among `critic`, `reference`, `reference_model` and
            `old_log_probs`.
    """

    # each row reads the options of its own command
    config: Any
    devices: int | None = None
    reads_images: bool | None = None
    rows: int | None = None
    unused_passes: frozenset[str] = frozenset()

    @property
    def on_cpu(self) -> bool:
        return is_on_cpu(self.config.trainer.device)

    def value(self, name: str) -> object:
        """Returns the value of an option; None if this command has no such option."""
        return value_of(self.config, name)

    def beside(self, key: str, name: str) -> object:
        """Returns the value of the option `name` in the section of `key`."""
        return self.value(f"{key.rpartition('.')[0]}.{name}")


Condition = Callable[[Situation, str], bool]
"""Returns True if the option with this key has no effect in this situation."""


@dataclass(frozen=True)
class IdleOption:
    """A row of the table.

    Args:
        keys: dotted keys. A trailing dot stands for all keys of the section, a leading `*.` for any section.
        is_idle: when the keys have no effect.
        reason: why they have none.
        remedy: what to set instead.
        is_error: whether the run is refused if the command line has such a key.
        excluded: keys of these sections that have an effect.
    """

    keys: tuple[str, ...]
    is_idle: Condition
    reason: str
    remedy: str
    is_error: bool = False
    excluded: tuple[str, ...] = ()

    def names(self, key: str) -> bool:
        """Returns True if `key` is one of `keys`."""
        return key not in self.excluded and any(_matches(pattern, key) for pattern in self.keys)


def _matches(pattern: str, key: str) -> bool:
    """Returns True if an entry of `IdleOption.keys` stands for a key."""
    if pattern.startswith("*."):
        # with a dot before the key, since a section can be at the top: optim.lr of `trainer.main_sft`
        return f".{key}".endswith(pattern[1:])
    if pattern.endswith("."):
        return key.startswith(pattern)
    return key == pattern
