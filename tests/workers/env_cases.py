"""An environment that does what its action says, the bad things too; and what tests of the pool of them share."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from verl_lite.envs import EnvTemplate
from workers.agents.env_pool import EnvPool, EnvReply

HERE = "tests.workers.env_cases"
MIB = 1 << 20

held: list[bytes] = []
running: list[int] = [0, 0]
"""Calls that run now, and the most that ever ran at one time."""
_counting = threading.Lock()


class Obedient:
    """Observation: the seed and all actions so far. An action is a word and an argument: see `_do`."""

    def __init__(self, drift: bool = False, first: str = "") -> None:
        self.drift, self.first = drift, first
        self.said: list[str] = []
        self.seed = 0

    def reset(self, seed: int) -> tuple[Any, ...]:
        self.seed, self.said = seed, []
        if self.first:
            self._do(self.first)
        return self._observation(), {"env_instruction": "Obey.", "pid": os.getpid(), "object": id(self)}

    def step(self, action: str) -> Any:
        with _counting:
            running[0] += 1
            running[1] = max(running)
        try:
            gave = self._do(action)
        finally:
            with _counting:
                running[0] -= 1
        self.said.append(action)
        ends = action == "end"
        metrics = {"action_is_valid": bool(action)}
        info = {"metrics": metrics, "pid": os.getpid(), "most": running[1], "has_torch": "torch" in sys.modules}
        usual = (self._observation(), float(len(self.said)), ends, False, info)
        return usual if gave is None else gave

    def _observation(self) -> str:
        return f"seed {self.seed}: {' '.join(self.said)}" + (f" at {os.getpid()}" if self.drift else "")

    def _do(self, action: str) -> Any:
        word, _, argument = action.partition("|")
        if word == "sleep":
            time.sleep(float(argument))
        if word == "raise":
            raise RuntimeError("no such move")
        if word == "leave":
            sys.exit(3)
        if word in BAD_RESULTS:
            return BAD_RESULTS[word]
        return self._harm(word, argument)

    def _harm(self, word: str, argument: str) -> None:
        if word == "segfault":
            import ctypes

            ctypes.string_at(0)
        if word == "exit":
            os._exit(int(argument or 9))
        if word == "kill":
            os.kill(os.getpid(), 9)
        if word == "freeze":  # holds the interpreter's lock: no thread of the process goes on
            re.match("(a+)+$", "a" * 60 + "b")
        if word == "fork" and os.fork() == 0 and argument:
            time.sleep(float(argument))
        if word == "leak":
            held.append(b"x" * (int(argument) * MIB))


BAD_RESULTS: Mapping[str, Any] = {
    "nothing": 5,
    "four": ("text", 0.0, False, {}),
    "nan": ("text", float("nan"), False, False, {}),
    "infinite": ("text", float("-inf"), False, False, {}),
    "word": ("text", "much", False, False, {}),
    "bytes": (b"text", 0.0, False, False, {}),
    "none": (None, 0.0, False, False, {}),
    "half": ("\ud800", 0.0, False, False, {}),
    "flag": ("text", 0.0, "no", False, {}),
    "info": ("text", 0.0, False, False, ["a"]),
    "metric": ("text", 0.0, False, False, {"metrics": {"speed": "high"}}),
    "mode": ("text", 0.0, False, False, {"metrics_agg_mode": {"speed": "median"}}),
}


class Odd(Obedient):
    """Gives things that do not travel."""

    def step(self, action: str) -> Any:
        things = {"lock": _counting, "trap": Trap(), "long": "x" * (70 * MIB)}
        return "text", 0.0, False, False, {"thing": things[action]}


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


class Forgetful(Obedient):
    """Begins each episode in another way, whatever its seed is, or refuses a second episode."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.refuses, self.episodes = refuses, 0

    def reset(self, seed: int) -> tuple[Any, ...]:
        if self.refuses and self.episodes:
            raise RuntimeError("only one episode")
        self.episodes += 1
        return super().reset(time.monotonic_ns())


def templates(**others: EnvTemplate) -> dict[str, EnvTemplate]:
    return {"obey": template("obey"), **others}


def template(tag: str, env_type: str = "Obedient", **options: Any) -> EnvTemplate:
    return EnvTemplate(tag=tag, env_type=f"{HERE}:{env_type}", **options)


def replies(pool: EnvPool, number: int, patience_s: float = 60.0) -> dict[Hashable, EnvReply]:
    """The next `number` replies, by key."""
    found: dict[Hashable, EnvReply] = {}
    until = time.monotonic() + patience_s
    while len(found) < number:
        assert time.monotonic() < until, f"{len(found)} of {number} replies after {patience_s} s"
        for reply in pool.poll(0.5):
            assert reply.key not in found
            found[reply.key] = reply
    return found


def begin(pool: EnvPool, *keys: Hashable, tag: str = "obey", seed: int = 1) -> dict[Hashable, EnvReply]:
    for key in keys:
        pool.reset(key, tag, seed)
    return replies(pool, len(keys))


def step(pool: EnvPool, **actions: str) -> dict[Hashable, EnvReply]:
    for key, action in actions.items():
        pool.step(key, action)
    return replies(pool, len(actions))


MakePool = Callable[..., EnvPool]
