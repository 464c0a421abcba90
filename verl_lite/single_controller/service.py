"""A service: one object that the driver and its workers call, in a process of its own (`ray_service.py`) or here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class ServiceHandle(Protocol):
    """One object in a process of its own. Can be given to workers as an argument."""

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Start a method and go on. What it raises is raised by the next `call`, whoever makes it.

        Sends of one sender arrive in their order; nothing is promised about those of different senders.
        """

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method and wait for its answer."""

    def stop(self) -> None:
        """End the service."""


class LocalService:
    """A service in this process. `send` runs the method at once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._object = make()
        self._failed: Exception | None = None

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(self._object, method)(*args, **kwargs)
        except Exception as error:  # raised by the next call
            self._failed = self._failed or error

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        return getattr(self._object, method)(*args, **kwargs)

    def stop(self) -> None:
        self._object = None
