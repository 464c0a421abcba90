"""What `python -m trainer.main_sft` and `trainer.main_rm` do around their training. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainer.console import Console, following
from verl_lite.config import SupervisedConfig, help_config, load_schema, print_config, save_config

if TYPE_CHECKING:
    from trainer.supervised.loop import Trained

Options = TypeVar("Options", bound=SupervisedConfig)


def run(argv: list[str], options: type[Options], train: Callable[[Options, Callable[[str], None]], Trained]) -> int:
    """Does what the command line asks for: the help, the configuration, or the training. Returns the exit status.

    train: trains as configured, and reports each line of progress.
    """
    loaded = load_schema(argv, options)
    if loaded.action != "run":
        print(help_config(options) if loaded.action == "help" else print_config(loaded))
        return 0
    console, folder = Console(verbosity=loaded.verbosity), Path(loaded.config.trainer.default_local_dir).expanduser()
    with following(folder / "logs", console):
        result = train(loaded.config, console.progress)
    save_config(loaded, folder / "config.yaml")
    shown = "".join(f", validation {name} {value:.3f}" for name, value in result.val.items())
    print(f"wrote {result.folder} after {result.steps} steps, loss {result.loss:.3f}{shown}")
    return 0
