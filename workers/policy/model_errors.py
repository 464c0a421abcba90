"""The one door to what a model's folder makes libraries do: broken files and odd entries raise anything there."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_lite.errors import UserError


@contextmanager
def user_error_on_failure(problem: str, remedy: str) -> Iterator[None]:
    """What is raised inside becomes a UserError: the problem, the cause, the remedy. Want of memory stays that."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # JSONDecodeError, KeyError, SafetensorError, ZeroDivisionError ...: see the tests
        cause = " ".join(str(error).split())[:500]
        raise UserError(f"{problem} ({type(error).__name__}: {cause}): {remedy}") from error
