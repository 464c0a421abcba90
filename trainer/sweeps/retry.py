"""Why a run ended, and what is done about it.

| cause | what is done |
|---|---|
| out of memory | again, with smaller micro-batches: the gradient does not depend on them |
| a device or worker lost | again on another device, from its last checkpoint |
| a device taken by somebody else meanwhile | again, elsewhere or later; this counts as no retry |
| wrong input (exit status 2) | not again; its words stand in the table |
| stopped by a signal that the sweep did not send | not again: somebody wanted that |
| anything else | once again: it may have been the machine |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainer.cli import WRONG_INPUT

_SHOWN_LINES = 3
_LINE_LENGTH = 300
_MOST_TAKEN = 10
"""Times that somebody else is faster; then something else is wrong."""


class Cause(StrEnum):
    """Of a run's end."""

    DONE = "done"
    OUT_OF_MEMORY = "out of memory"
    LOST_DEVICE = "lost device"
    DEVICE_TAKEN = "device taken"
    WRONG_INPUT = "wrong input"
    STOPPED = "stopped"
    SWEEP_DIED = "sweep died"
    UNKNOWN = "error"


_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|\bMemoryError\b|the machine's memory ran out|"
    r"No available memory for the cache blocks|Cannot allocate memory|"
    r"CUBLAS_STATUS_ALLOC_FAILED"
)
_LOST_DEVICE = re.compile(
    r"WorkerDiedError|ClusterLostError|its process ended without an exception|uncorrectable ECC|GPU is lost|"
    r"fallen off the bus|CUDA error: (unspecified launch failure|an illegal memory access|"
    r"unknown error|device not ready|hardware)|NCCL.*(remote error|unhandled (cuda|system) error)|"
    r"NoRoomError|\bXid\b"
)
_DEVICE_TAKEN = re.compile(r"but only \d+ of \d+ devices can be had|is in use by pid|free, rollout.gpu_memory_utiliz")
_SETTLED = ("Traceback (most recent call last)", "  File ", "    ", "\x1b")


@dataclass(frozen=True)
class Diagnosis:
    """cause: of the end. lines: what the run said of it, the most telling first."""

    cause: Cause
    lines: tuple[str, ...] = ()

    @property
    def error(self) -> str:
        """In one line."""
        return f"{self.cause}: {self.lines[0]}" if self.lines else str(self.cause)


def diagnose(status: int, output: str) -> Diagnosis:
    """status: exit status, negative for a signal. output: the end of what the run printed."""
    lines = [line.rstrip()[:_LINE_LENGTH] for line in output.splitlines() if line.strip()]
    if status == 0:
        return Diagnosis(Cause.DONE)
    if status == WRONG_INPUT:
        cause = Cause.DEVICE_TAKEN if _DEVICE_TAKEN.search(output) else Cause.WRONG_INPUT
        return Diagnosis(cause, _message(lines))
    for cause, pattern in ((Cause.OUT_OF_MEMORY, _OUT_OF_MEMORY), (Cause.LOST_DEVICE, _LOST_DEVICE)):
        telling = next((line.strip() for line in reversed(lines) if pattern.search(line)), None)
        if telling is not None:
            return Diagnosis(cause, (telling, *_last(lines, telling)))
    if status in (-2, -15, -1, 130, 143, 129):
        return Diagnosis(Cause.STOPPED, _last(lines))
    if status == -9:
        return Diagnosis(Cause.OUT_OF_MEMORY, ("killed (SIGKILL): most likely the kernel, for want of memory",))
    return Diagnosis(Cause.UNKNOWN, _last(lines) or (f"exit status {status}, without a word",))


def _message(lines: Sequence[str]) -> tuple[str, ...]:
    """The first lines of a user's error, which is one message at the end."""
    begins = [number for number, line in enumerate(lines) if re.match(r"\w*Error: ", line)]
    return tuple(line.strip() for line in lines[begins[-1] if begins else -1 :][:_SHOWN_LINES])


def _last(lines: Sequence[str], besides: str = "") -> tuple[str, ...]:
    """The last telling lines, the very last first."""
    telling = [line.strip() for line in lines if not line.startswith(_SETTLED) and line.strip() != besides]
    return tuple(reversed(telling[-_SHOWN_LINES:]))


def is_retried(cause: Cause, before: Sequence[str], most: int) -> bool:
    """Whether a run that ended so starts again. before: causes of its earlier ends. most: `--retries`."""
    if cause == Cause.DEVICE_TAKEN:
        return before.count(cause) < _MOST_TAKEN
    if cause in (Cause.DONE, Cause.WRONG_INPUT, Cause.STOPPED):
        return False
    failures = [earlier for earlier in before if earlier not in (Cause.DEVICE_TAKEN, Cause.SWEEP_DIED)]
    limit = min(most, 1) if cause == Cause.UNKNOWN else most
    return failures.count(cause) < limit and len(failures) < most


def smaller(config: Mapping[str, Any]) -> list[str]:
    """Settings with which the run takes less memory and computes the same: all micro-batches halved; where that is not
    possible, activations computed again. Empty if nothing is left.

    config: of the run, flat: dotted keys and values, as `trainer.resume.flat_config` gives them.
    """
    prompt_and_response = [int(config.get(f"data.max_{part}_length") or 0) for part in ("prompt", "response")]
    longest = config.get("data.max_length") or sum(prompt_and_response)
    words = []
    for key, value in config.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if key.endswith("max_token_len_per_gpu") and _is_dynamic(key, config):
            fits = max(longest, value // 2)
        elif key.endswith("micro_batch_size_per_gpu") and not _is_dynamic(key, config):
            fits = max(1, value // 2)
        else:
            continue
        if fits < value:
            words.append(f"{key}={fits}")
    if not words:
        keys = [
            key for key, value in config.items() if key.endswith("enable_gradient_checkpointing") and value is False
        ]
        words = [f"{key}=true" for key in keys]
    return words


def _is_dynamic(key: str, config: Mapping[str, Any]) -> bool:
    """Whether micro-batches are cut by tokens where this key counts; without a switch they are."""
    section = key.rpartition(".")[0]
    names = [name for name in ("use_dynamic_bsz", "log_prob_use_dynamic_bsz") if f"{section}.{name}" in config]
    for name in names:
        if config[f"{section}.{name}"] is not None:
            return bool(config[f"{section}.{name}"])
    return bool(config.get("actor.use_dynamic_bsz", True))
