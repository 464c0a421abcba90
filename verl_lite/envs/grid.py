"""What worlds on a grid have in common: the grid as text, moves by name, metrics.

Cells are letters, as in ROLL: P player, _ floor, O hole (lake) or target (Sokoban), G goal, X fell in (lake) or box
(Sokoban), √ arrived, # wall, S player on a target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from verl_lite.envs.actions import ActionParser, Lookup
from verl_lite.envs.base import Info
from verl_lite.errors import UserError

AGG_MODES = {"action_is_valid": "mean", "action_is_effective": "mean", "success": "last"}
SPLITS = ("all", "train", "test")
TEST_SHARE = 5  # one in five


class GridEnv(ABC):
    """An environment whose observation is a grid and whose actions are moves.

    moves: names of the world's actions. instruction: the task in words, with {actions}, and {example}, the name of the
    move `example`; env_instruction: other words, "" = none. action_lookup: other names. feedback: whether an
    observation begins with a sentence on what the action did. max_steps: actions after which the episode is truncated;
    None = the template's. Other arguments are those of `ActionParser`. A move that is not understood changes nothing
    and costs what `_idle` says.
    """

    def __init__(
        self,
        *,
        moves: Mapping[int, str],
        instruction: str,
        example: int,
        env_instruction: str | None,
        action_lookup: Lookup,
        action_pattern: str,
        special_token_list: Sequence[str],
        feedback: bool,
        max_steps: int | None,
    ) -> None:
        self.parser = ActionParser(action_pattern, action_lookup, special_token_list)
        names = self.parser.names or {}
        if set(names) != set(moves):
            first, last = min(moves), max(moves)
            raise UserError(
                f"action_lookup={action_lookup!r}: expected names for the actions {first} to {last}, as in {moves}"
            )
        own = instruction.format(actions=", ".join(names.values()), example=names[example])
        self.instruction, self.feedback = own if env_instruction is None else env_instruction, feedback
        self.max_steps, self.steps = max_steps, 0

    @abstractmethod
    def rows(self) -> list[str]:
        """The grid, a letter a cell."""

    @abstractmethod
    def _begin(self, seed: int) -> None:
        """Sets the world up."""

    @abstractmethod
    def _move(self, action: Any) -> tuple[float, bool, bool]:
        """Acts: (reward, whether the episode ended, whether anything changed)."""

    @abstractmethod
    def _succeeded(self) -> bool: ...

    def _idle(self) -> float:
        """The reward of a step in which nothing was understood."""
        return 0.0

    def reset(self, seed: int) -> tuple[str, Info]:
        self.steps = 0
        self._begin(seed)
        return self.text(), {"env_instruction": self.instruction, "metrics": {}, "metrics_agg_mode": AGG_MODES}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        parsed = self.parser(action)
        valid = parsed.action is not None
        reward, terminated, effective = self._move(parsed.action) if valid else (self._idle(), False, False)
        self.steps += 1
        truncated = not terminated and self.max_steps is not None and self.steps >= self.max_steps
        metrics = {"action_is_valid": valid, "action_is_effective": effective, "success": self._succeeded()}
        said = self._said(parsed.action, effective) if self.feedback else ""
        info = {"metrics": metrics, "metrics_agg_mode": AGG_MODES, "action_content": parsed.action_content}
        return said + self.text(), float(reward), terminated, truncated, info

    def text(self) -> str:
        return "\n".join(self.rows())

    def sample_random_action(self) -> str:
        """The first move, in the notation of the default pattern."""
        return f"<answer>{next(iter((self.parser.names or {}).values()), '')}</answer>"

    def _said(self, action: Any, effective: bool) -> str:
        names = self.parser.names or {}
        if action is None:
            return f"This is not an action. Actions are {', '.join(names.values())}.\n"
        return f"You moved {names[action]}.\n" if effective else f"Moving {names[action]} changed nothing.\n"


def in_split(rows: Sequence[str], split: str) -> bool:
    """Whether a world belongs to this part: one in five, chosen by its content, is "test", the others are "train"."""
    if split == "all":
        return True
    is_test = int.from_bytes(sha256("\n".join(rows).encode()).digest()[:8], "big") % TEST_SHARE == 0
    return is_test == (split == "test")


def check_split(split: str) -> str:
    """The split. Raises UserError if there is none of that name."""
    if split not in SPLITS:
        raise UserError(f"split={split!r}: expected one of {', '.join(SPLITS)}")
    return split
