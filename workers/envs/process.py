"""The inside of an environment process: takes calls from the pool, runs them in threads, sends replies back.

Started by `workers.envs.handle` as a bare interpreter, so that it imports neither torch nor the caller's main module.
It tells through a page of shared memory which episodes' code runs, in which threads and since when: that is how the
pool knows, when a call is overdue or it finds this process dead, whose fault that is.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from verl_lite.envs import EnvTemplate, find_env
from verl_lite.registry import import_modules
from workers.children.framed_socket import ChildEnd
from workers.children.inside import die_with_parent, end_if_forked, redirect_prints, settle_in
from workers.envs.host import EnvHost
from workers.envs.messages import EnvId, EnvReply

CONTROL = -1
"""Number of a message that is about the process, not about an episode."""

_SWITCH_INTERVAL_S = 0.001
_REPLY_BYTES_MAX = 64 << 20
_NOBODY = -1
_CULPRIT = struct.Struct("<q")
_SLOT = struct.Struct("<dqQ")


@dataclass(frozen=True)
class ProcessOptions:
    """What an environment process has to know. modules: to import, for the environments that they register. log_path:
    where prints of environments go; None = nowhere."""

    templates: Mapping[str, EnvTemplate]
    threads: int
    modules: tuple[str, ...]
    log_path: str | None


@dataclass(frozen=True)
class Loaded:
    """The process is ready."""


@dataclass(frozen=True)
class NotLoaded:
    """Environments cannot be used. error: the traceback."""

    error: str


@dataclass(frozen=True)
class End:
    """Nobody needs the episode any more."""

    env: EnvId


@dataclass(frozen=True)
class GiveUp:
    """The call of this episode is overdue: another may run in its stead. Answered with GivenUp, if it still runs."""

    env: EnvId


@dataclass(frozen=True)
class GivenUp:
    """stack: where the call was."""

    env: EnvId
    stack: str


@dataclass(frozen=True)
class Running:
    """A call under way. since: by `time.monotonic`, one clock for all processes. thread: `threading.get_ident()`."""

    env: EnvId
    since: float
    thread: int


class ProgressPage:
    """The shared page. culprit: the episode whose code is ending the process; `slots`: one for each thread."""

    def __init__(self, fd: int, slots: int) -> None:
        self._slots = slots
        self._page = mmap.mmap(fd, self.size(slots))

    @staticmethod
    def size(slots: int) -> int:
        """In bytes."""
        return _CULPRIT.size + slots * _SLOT.size

    def clear(self) -> None:
        """Before the process starts."""
        self.culprit = None
        for slot in range(self._slots):
            self.note(slot, None)

    def note(self, slot: int, env: EnvId | None) -> None:
        """The calling thread runs this episode's code from now on. In one piece, and the time first: a reader in
        between sees an earlier episode that has just begun."""
        place = _CULPRIT.size + slot * _SLOT.size
        told = _SLOT.pack(time.monotonic(), _NOBODY if env is None else env, threading.get_ident())
        self._page[place : place + _SLOT.size] = told

    def running(self) -> list[Running]:
        """All calls under way."""
        slots = _SLOT.iter_unpack(self._page[_CULPRIT.size :])
        return [Running(env, since, thread) for since, env, thread in slots if env != _NOBODY]

    @property
    def culprit(self) -> EnvId | None:
        (env,) = _CULPRIT.unpack_from(self._page)
        return None if env == _NOBODY else env

    @culprit.setter
    def culprit(self, env: EnvId | None) -> None:
        self._page[: _CULPRIT.size] = _CULPRIT.pack(_NOBODY if env is None else env)

    def close(self) -> None:
        self._page.close()


def main(socket_fd: int, page_fd: int, slots: int, parent_pid: int) -> None:
    """Serves until the pool closes its end. First message: `ProcessOptions`, answered with Loaded or NotLoaded."""
    settle_in(parent_pid)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    channel, page = ChildEnd(socket_fd), ProgressPage(page_fd, slots)
    pid = os.getpid()

    def leave_forked_child() -> None:
        channel.leave()
        die_with_parent(pid)

    os.register_at_fork(after_in_child=leave_forked_child)
    _name_who_exits(page, pid)
    first = channel.receive()
    if first is None:
        return
    options: ProcessOptions = pickle.loads(first[1])
    redirect_prints(options.log_path, "environment")
    try:
        import_modules(options.modules)
        for template in options.templates.values():
            find_env(template.env_type)  # now, and not within the deadline of a reset
    except Exception:  # the user's module may raise anything; the pool reports it
        channel.send(CONTROL, pickle.dumps(NotLoaded(traceback.format_exc())))
        return
    channel.send(CONTROL, pickle.dumps(Loaded()))
    _serve(channel, page, options)


def _serve(channel: ChildEnd, page: ProgressPage, options: ProcessOptions) -> None:
    pid = os.getpid()

    def watch(slot: int, env: EnvId | None) -> None:
        end_if_forked(pid)
        page.note(slot, env)

    def deliver(reply: EnvReply) -> None:
        assert isinstance(reply.key, EnvId)
        channel.send(reply.key, _packed(reply))

    host = EnvHost(options.templates, options.threads, deliver, watch)
    while (frame := channel.receive()) is not None:
        message = pickle.loads(frame[1])
        if isinstance(message, End):
            host.end(message.env)
        elif isinstance(message, GiveUp):
            stack = _stack_of(page, message.env)
            if host.give_up(message.env):
                channel.send(CONTROL, pickle.dumps(GivenUp(message.env, stack)))
        else:
            host.submit(message)
    _exit(0)  # the pool is gone; what still runs is nobody's


def _packed(reply: EnvReply) -> bytes:
    try:
        packed = pickle.dumps(reply)
    except Exception as error:  # whatever objects an environment puts into info may raise anything
        reason = f"what it gave (info or frame) cannot go to another process: {type(error).__name__}: {error}"
    else:
        if len(packed) <= _REPLY_BYTES_MAX:
            return packed
        reason = f"what it gave is {len(packed) >> 20} MiB long; {_REPLY_BYTES_MAX >> 20} MiB are allowed"
    return pickle.dumps(EnvReply(reply.key, None, error=reason, seconds=reply.seconds))


def _stack_of(page: ProgressPage, env: EnvId) -> str:
    frames = sys._current_frames()
    threads = [running.thread for running in page.running() if running.env == env]
    return "".join(line for thread in threads if thread in frames for line in traceback.format_stack(frames[thread]))


_exit = os._exit


def _name_who_exits(page: ProgressPage, pid: int) -> None:
    """From now on `os._exit` notes on the page whose code calls it, which no signal and no stack would tell."""

    def exit_with_note(status: int) -> NoReturn:
        if os.getpid() == pid:
            here = [running.env for running in page.running() if running.thread == threading.get_ident()]
            page.culprit = here[0] if here else None
        _exit(status)

    os._exit = exit_with_note
