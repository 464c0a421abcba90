"""Compares the options that the user gave with the table, and reports those without effect."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_lite.config.idle_options.ppo_rows import PPO_ROWS
from verl_lite.config.idle_options.shared_rows import SFT_ROWS, SHARED_ROWS, SUPERVISED_ROWS
from verl_lite.config.idle_options.table import IdleOption, Situation
from verl_lite.config.loader import LoadedConfig
from verl_lite.config.option_table import Key, schema_of, setting_text, value_of
from verl_lite.config.ppo import PPOConfig
from verl_lite.config.sources import COMMAND_LINE
from verl_lite.config.supervised import SFTConfig, SupervisedConfig


@dataclass
class IdleReport:
    """Sentences about the idle options that the user gave: notes, and problems that end the run."""

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def idle_options(
    loaded: LoadedConfig[object], situation: Situation, rows: Sequence[IdleOption] | None = None
) -> IdleReport:
    """Returns the report on the options of a command line and its files.

    Args:
        loaded: the configuration with the source of each value.
        situation: the resolved configuration.
        rows: the table; None = the table of the command.
    """
    report = IdleReport()
    table = table_of(type(situation.config)) if rows is None else rows
    unreported = _keys_of_user(loaded)
    for row in table:
        notes: list[str] = []
        problems: list[str] = []
        # a copy, because an option is removed when it is reported
        for name, (key, source) in list(unreported.items()):
            if not row.names(name) or not row.is_idle(situation, name):
                continue
            value = value_of(situation.config, name)
            is_problem = row.is_error and source.startswith(COMMAND_LINE)
            if not is_problem and value == key.default:
                continue
            # the first row that fits gives the reason
            del unreported[name]
            settings = problems if is_problem else notes
            settings.append(_as_written(name, value, source))
        report.notes += _sentences(row, notes)
        report.problems += _sentences(row, problems)
    return report


def table_of(root: type) -> Sequence[IdleOption]:
    """Returns the rows for the options of a command, which the dataclass `root` declares."""
    if issubclass(root, PPOConfig):
        return (*PPO_ROWS, *SHARED_ROWS)
    if issubclass(root, SFTConfig):
        return (*SFT_ROWS, *SUPERVISED_ROWS, *SHARED_ROWS)
    if issubclass(root, SupervisedConfig):
        return (*SUPERVISED_ROWS, *SHARED_ROWS)
    return SHARED_ROWS


def _keys_of_user(loaded: LoadedConfig[object]) -> dict[str, tuple[Key, str]]:
    """Returns the options that the user gave, with their sources. An entry of a dictionary counts as its option."""
    schema = schema_of(type(loaded.config))
    options: dict[str, tuple[Key, str]] = {}
    for name, source in loaded.provenance.items():
        # not defaults, recipes, and values that follow from others
        if not source.startswith((COMMAND_LINE, "file:")):
            continue
        path = tuple(name.split("."))
        key = schema.find(path)
        if key is not None:
            options.setdefault(key.name, (key, source))
    return options


def _as_written(name: str, value: object, source: str) -> str:
    """Returns `key=value`, with the name that the user wrote if it was translated."""
    # the loader appends the written name to the source
    _, _, written_as = source.partition(", as ")
    setting = setting_text(name, value)
    if not written_as:
        return setting
    return f"{setting} (given as {written_as})"


def _sentences(row: IdleOption, settings: list[str]) -> list[str]:
    """Returns the sentence about the options of a row; none without options."""
    if not settings:
        return []
    verb = "has" if len(settings) == 1 else "have"
    return [f"{', '.join(settings)} {verb} no effect here: {row.reason}; {row.remedy}"]
