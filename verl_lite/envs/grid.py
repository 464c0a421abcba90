"""What worlds on a grid have in common: the grid as text, moves by name, metrics.

Cells are letters, as in ROLL: P player, _ floor, O hole (lake) or target (Sokoban), G goal, X fell in (lake) or box
(Sokoban), √ arrived, # wall, S player on a target.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar

from verl_lite.envs.actions import ANSWER_PATTERN, SPECIAL_TOKENS, ActionParser, Lookup
from verl_lite.envs.base import Info
from verl_lite.errors import UserError

AGG_MODES = {"action_is_valid": "mean", "action_is_effective": "mean", "success": "last"}
SPLITS = ("all", "train", "test")
TEST_SHARE = 5  # one in five


@dataclass(eq=False, kw_only=True)
class GridEnv(ABC):
    """An environment whose observation is a grid and whose actions are moves.

    split: "train" or "test" use disjoint worlds; one in five, chosen by its content, is "test". env_instruction: words
    instead of the world's own, "" = none. action_lookup: other names of the moves. feedback: whether an observation
    begins with a sentence on what the action did. max_steps: actions after which the episode is truncated; None = the
    template's. action_pattern, special_token_list: see `ActionParser`. A move that is not understood changes nothing
    and costs what `_idle` says.
    """

    moves: ClassVar[Mapping[int, str]]
    example: ClassVar[int]

    split: str = "all"
    env_instruction: str | None = None
    action_lookup: Lookup | None = None
    action_pattern: str = ANSWER_PATTERN
    special_token_list: Sequence[str] = SPECIAL_TOKENS
    feedback: bool = True
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise UserError(f"split={self.split!r}: expected one of {', '.join(SPLITS)}")
        lookup = self.moves if self.action_lookup is None else self.action_lookup
        self.parser = ActionParser(self.action_pattern, lookup, self.special_token_list)
        self.names = self.parser.names or {}
        if set(self.names) != set(self.moves):
            first, last = min(self.moves), max(self.moves)
            raise UserError(
                f"action_lookup={lookup!r}: expected names for the actions {first} to {last}, as in {self.moves}"
            )
        self.instruction = self.env_instruction
        if self.instruction is None:
            names = ", ".join(self.names.values())
            answer = f"Answer with one move a turn: {names}, for example <answer>{self.names[self.example]}</answer>.\n"
            self.instruction = f"{self._task()} {answer}"
        self.steps = 0

    @abstractmethod
    def rows(self) -> list[str]:
        """The grid, a letter a cell."""

    @abstractmethod
    def _task(self) -> str:
        """The task in words, without its actions."""

    @abstractmethod
    def _begin(self, seed: int) -> None:
        """Sets the world up."""

    @abstractmethod
    def _move(self, action: int) -> tuple[float, bool, bool]:
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
        if not valid:
            said = f"This is not an action. Actions are {', '.join(self.names.values())}."
        elif effective:
            said = f"You moved {self.names[parsed.action]}."
        else:
            said = f"Moving {self.names[parsed.action]} changed nothing."
        observation = f"{said}\n{self.text()}" if self.feedback else self.text()
        info = {"metrics": metrics, "metrics_agg_mode": AGG_MODES, "action_content": parsed.action_content}
        return observation, float(reward), terminated, truncated, info

    def text(self) -> str:
        return "\n".join(self.rows())

    def sample_random_action(self) -> str:
        """The first move, in the notation of the default pattern."""
        return f"<answer>{next(iter(self.names.values()))}</answer>"

    def _is_in_split(self, rows: Sequence[str]) -> bool:
        is_test = int.from_bytes(sha256("\n".join(rows).encode()).digest()[:8], "big") % TEST_SHARE == 0
        return self.split == "all" or is_test == (self.split == "test")
