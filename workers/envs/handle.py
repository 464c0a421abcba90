"""One environment process as the pool sees it: start it, send calls, take replies, say what is overdue and whose fault
its death is. How it is started and ended: `workers.children.process`.
"""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
from dataclasses import replace

from workers.children.framed_socket import OwnerEnd
from workers.children.process import ChildProcess
from workers.envs.messages import Call, EnvId, EnvReply
from workers.envs.process import (
    CONTROL,
    End,
    GivenUp,
    GiveUp,
    Loaded,
    NotLoaded,
    ProcessOptions,
    ProgressPage,
    Running,
)

Message = Loaded | NotLoaded | GivenUp | EnvReply


class EnvProcess:
    """An environment process, started by the constructor, in a thread that has to outlive it.

    episodes: those that live there. is_loaded: it has said so. is_retiring: it gets no new episodes. asked_at: when it
    was told to give up a call, by episode, until it answers.
    """

    def __init__(self, options: ProcessOptions) -> None:
        slots = 2 * options.threads  # a thread that hangs is replaced
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as page, theirs:
            page.truncate(ProgressPage.size(slots))
            self._page = ProgressPage(page.fileno(), slots)
            self._page.clear()
            arguments = f"{theirs.fileno()}, {page.fileno()}, {slots}, {os.getpid()}"
            run = f"from workers.envs.process import main; main({arguments})"
            self.child = ChildProcess(run, pass_fds=(theirs.fileno(), page.fileno()), log_path=options.log_path)
        self.channel = OwnerEnd(ours)
        self.log_path = options.log_path
        self.threads = options.threads
        self.episodes: set[EnvId] = set()
        self.is_loaded = False
        self.is_retiring = False
        self.asked_at: dict[EnvId, float] = {}
        self.given_up = 0
        self.started_at = self.last_sign_at = time.monotonic()
        self.channel.send(CONTROL, pickle.dumps(options))

    def send(self, message: Call | End | GiveUp) -> None:
        """Never blocks."""
        self.last_sign_at = time.monotonic()
        self.channel.send(CONTROL, pickle.dumps(message))

    def give_up(self, env: EnvId) -> None:
        """Tells it that a call is overdue, once; `GivenUp` or the reply answers."""
        if env not in self.asked_at:
            self.asked_at[env] = time.monotonic()
            self.send(GiveUp(env))

    def receive(self) -> list[Message]:
        """What it said. Sets channel.is_closed if it is dead."""
        messages: list[Message] = []
        for number, packed in self.channel.receive():
            self.last_sign_at = time.monotonic()
            try:
                message = pickle.loads(packed)
            except Exception as error:  # objects that an environment made up may do anything when they are put together
                reason = f"what it gave (info or frame) cannot be read here: {type(error).__name__}: {error}"
                message = EnvReply(number, None, error=reason)
            if isinstance(message, EnvReply):
                message = replace(message, key=number)
                self.asked_at.pop(number, None)
            elif isinstance(message, GivenUp):
                self.asked_at.pop(message.env, None)
                self.given_up += 1
            messages.append(message)
        return messages

    def overdue(self, timeout_s: float) -> list[EnvId]:
        """Episodes whose call has run for longer than that."""
        before = time.monotonic() - timeout_s
        return [call.env for call in self._running() if call.since < before]

    def is_idle(self) -> bool:
        """Whether no episode's code runs."""
        return not self._running()

    def suspects(self) -> list[EnvId]:
        """Of a dead process, or one that answers nothing: the episodes that may have done it. One, if that is known."""
        if self._page.culprit is not None:
            return [self._page.culprit]
        running = self._running()
        crashed = self.child.crashed_thread()
        return [call.env for call in running if call.thread == crashed] or [call.env for call in running]

    def kill(self) -> None:
        """Ends the process and all that it started. What it has said can still be received."""
        self.child.kill()

    def close(self) -> None:
        """Frees what the pool holds of a killed process."""
        self.channel.close()
        self.child.close()
        self._page.close()

    def _running(self) -> list[Running]:
        """The calls under way of episodes that live here; not those that were given up."""
        return [call for call in self._page.running() if call.env in self.episodes]
