"""The base class of environments on a grid: the grid as text, moves by name, metrics.

Cells are letters, as in ROLL: P player, _ floor, O hole (lake) or target (Sokoban), G goal, X fell in (lake) or box
(Sokoban), √ arrived, # wall, S player on a target.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar

from verl_lite.envs.actions import ANSWER_PATTERN, SPECIAL_TOKENS, ActionParser, Lookup
from verl_lite.envs.base import Info, StepResult
from verl_lite.errors import UserError

AGG_MODES = {"action_is_valid": "mean", "action_is_effective": "mean", "success": "last"}
SPLITS = ("all", "train", "test")
TEST_SHARE = 5  # one world in five


@dataclass(eq=False, kw_only=True)
class GridEnv(ABC):
    """An environment whose observation is a grid and whose actions are moves.

    A text without a valid move changes nothing and has the reward `_idle`.

    Args:
        split: "train" and "test" use disjoint worlds; one world in five, selected by its content, is "test".
        env_instruction: replaces the default instruction; "" = no instruction.
        action_lookup: other names of the moves.
        action_pattern, special_token_list: see `ActionParser`.
        feedback: True to begin each observation with a sentence about the effect of the action.
        max_steps: number of actions after which the episode is truncated; None = the template's number.
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
        lookup: Lookup = self.moves
        if self.action_lookup is not None:
            lookup = self.action_lookup
        self.parser = ActionParser(self.action_pattern, lookup, self.special_token_list)
        names = self.parser.names or {}
        if set(names) != set(self.moves):
            raise UserError(
                f"action_lookup={lookup!r}: expected names for the actions {min(self.moves)} to {max(self.moves)}, "
                f"as in {self.moves}"
            )
        # no name is left out: the keys are those of `moves`, which a type checker does not know
        self.names = {number: name for number, name in names.items() if not isinstance(number, str)}
        self.instruction = self.env_instruction
        if self.instruction is None:
            names_of_moves = ", ".join(self.names.values())
            example = self.names[self.example]
            answer = f"Answer with one move a turn: {names_of_moves}, for example <answer>{example}</answer>.\n"
            self.instruction = f"{self._task()} {answer}"
        self.steps = 0

    @abstractmethod
    def rows(self) -> list[str]:
        """Returns the grid, with one letter per cell."""

    @abstractmethod
    def _task(self) -> str:
        """Returns the description of the task, without the actions."""

    @abstractmethod
    def _begin(self, seed: int) -> None:
        """Creates the world of the seed."""

    @abstractmethod
    def _move(self, action: int) -> tuple[float, bool, bool]:
        """Makes a move and returns (reward, True if the episode has ended, True if anything has changed)."""

    @abstractmethod
    def _succeeded(self) -> bool: ...

    def _idle(self) -> float:
        """Returns the reward of a step without a valid move."""
        return 0.0

    def reset(self, seed: int) -> tuple[str, Info]:
        self.steps = 0
        self._begin(seed)
        return self.text(), {"env_instruction": self.instruction, "metrics": {}, "metrics_agg_mode": AGG_MODES}

    def step(self, action: str) -> StepResult:
        parsed = self.parser(action)
        move = parsed.action
        is_valid = False
        is_effective = False
        terminated = False
        reward = self._idle()
        effect = f"This is not an action. Actions are {', '.join(self.names.values())}."
        # a text is never a move: the keys of the lookup are the numbers of the moves
        if move is not None and not isinstance(move, str):
            is_valid = True
            reward, terminated, is_effective = self._move(move)
            name = self.names[move]
            effect = f"Moving {name} changed nothing."
            if is_effective:
                effect = f"You moved {name}."

        # counted also without a valid move, so that `max_steps` ends every episode
        self.steps += 1
        has_no_step_left = self.max_steps is not None and self.steps >= self.max_steps
        truncated = has_no_step_left and not terminated
        observation = self.text()
        if self.feedback:
            observation = f"{effect}\n{observation}"
        info: Info = {
            "metrics": {
                "action_is_valid": is_valid,
                "action_is_effective": is_effective,
                "success": self._succeeded(),
            },
            "metrics_agg_mode": AGG_MODES,
            "action_content": parsed.action_content,
        }
        return observation, float(reward), terminated, truncated, info

    def text(self) -> str:
        return "\n".join(self.rows())

    def sample_random_action(self) -> str:
        """Returns the first move, in the format of the default pattern."""
        first_name = next(iter(self.names.values()))
        return f"<answer>{first_name}</answer>"

    def _is_in_split(self, rows: Sequence[str]) -> bool:
        """Returns True if `split` contains a world. The content of the world decides, so no world is in both splits."""
        if self.split == "all":
            return True
        # not Python's own hash, which differs between processes
        content = "\n".join(rows).encode()
        digest = sha256(content).digest()
        number = int.from_bytes(digest[:8], "big")
        is_test = number % TEST_SHARE == 0
        return is_test == (self.split == "test")
