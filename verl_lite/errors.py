"""What the user can mend: one base class, so that commands show the message without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Wrong input. The message names the key or file, the value found, what was expected and what to change."""
