"""Conversion of errors that libraries raise for a broken or unsupported model folder into `UserError`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_lite.errors import UserError


@contextmanager
def user_error_on_failure(problem: str, remedy: str) -> Iterator[None]:
    """Turns exceptions raised inside into `UserError`: problem, cause, remedy. Out-of-memory errors pass through."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # JSONDecodeError, KeyError, SafetensorError, ZeroDivisionError ...: see the tests
        # on one line, and not longer: some libraries put the content of a file into the message
        cause = " ".join(str(error).split())[:500]
        raise UserError(f"{problem} ({type(error).__name__}: {cause}): {remedy}") from error
