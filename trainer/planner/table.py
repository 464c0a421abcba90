"""What the plans of memory have in common: phases of a step, their parts in bytes, and both as text in GiB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

GIB = 1 << 30
CONTEXT_GIB = 1.0  # CUDA context and libraries; assumed
FRAGMENTATION = 0.06  # of what is allocated; assumed
_SHOWN = 0.005  # GiB from which on a part is named
_WIDTH = 42


@dataclass
class Phase:
    """A part of a step: what is on the device then beside what always is, in bytes by name."""

    name: str
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


def with_context(tensors: float) -> float:
    """Bytes that a GPU has to have for so many bytes of tensors."""
    return tensors * (1 + FRAGMENTATION) + CONTEXT_GIB * GIB


def part_lines(parts: Mapping[str, float]) -> Iterator[str]:
    """A line for each part."""
    for name, value in parts.items():
        yield f"  {name:<{_WIDTH}}{value / GIB:8.2f}"


def phase_lines(phases: Sequence[Phase], worst: Phase) -> Iterator[str]:
    """A line for each phase with its parts; the worst is marked."""
    for phase in phases:
        mark = "*" if phase is worst else " "
        yield f"{mark} {phase.name:<{_WIDTH}}{phase.total / GIB:8.2f}   {listed(phase.parts)}"


def listed(parts: Mapping[str, float]) -> str:
    """Parts in one line, without the tiny ones."""
    return ", ".join(f"{name} {value / GIB:.2f}" for name, value in parts.items() if value >= _SHOWN * GIB)
