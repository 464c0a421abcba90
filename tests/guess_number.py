"""An environment for tests: after each guess it tells the agent whether the secret number is higher or lower."""

import random

from verl_lite.envs.actions import ANSWER_PATTERN, ActionParser
from verl_lite.envs.base import Info
from verl_lite.errors import UserError

INSTRUCTION = (
    "I think of a whole number from {low} to {high}. Guess it; after each guess I say whether it is higher or lower. "
    "Write a guess as <answer>{low}</answer>.\n"
)
GUESS_NUMBER = "tests.guess_number:GuessNumber"
AGG_MODES = {"action_is_valid": "mean", "action_is_effective": "mean", "guesses": "sum", "success": "last"}


class GuessNumber:
    """A secret number from `low` to `high`. The right guess has the reward `reward_right`, others `penalty_for_guess`.

    A guess is effective if the earlier hints do not exclude it.
    """

    def __init__(
        self,
        low: int = 1,
        high: int = 100,
        reward_right: float = 1.0,
        penalty_for_guess: float = 0.0,
        answer_pattern: str = ANSWER_PATTERN,
        env_instruction: str | None = None,
    ) -> None:
        if low >= high:
            raise UserError(f"low={low!r}, high={high!r}: expected low < high")
        self.low, self.high = low, high
        self.reward_right, self.penalty_for_guess = reward_right, penalty_for_guess
        self.parser = ActionParser(answer_pattern)
        self.instruction = INSTRUCTION.format(low=low, high=high) if env_instruction is None else env_instruction
        self.secret, self.possible = low, (low, high)

    def reset(self, seed: int) -> tuple[str, Info]:
        self.secret = random.Random(seed).randint(self.low, self.high)
        self.possible = (self.low, self.high)
        return "Your first guess?", {"env_instruction": self.instruction, "metrics_agg_mode": AGG_MODES}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        content = self.parser(action).action
        if content is None or not content.lstrip("-").isdecimal() or len(content) > 12:
            return "That is not a guess.", 0.0, False, False, self._info(valid=False)
        guess = int(content)
        effective = self.possible[0] <= guess <= self.possible[1]
        if guess == self.secret:
            return "Right!", self.reward_right, True, False, self._info(effective=True, success=True)
        low, high = self.possible
        if guess < self.secret:
            self.possible, word = (max(low, guess + 1), high), "higher"
        else:
            self.possible, word = (low, min(high, guess - 1)), "lower"
        hint = f"The number is {word} than {guess}."
        return hint, self.penalty_for_guess, False, False, self._info(effective=effective)

    def sample_random_action(self) -> str:
        return f"<answer>{self.low}</answer>"

    def _info(self, *, valid: bool = True, effective: bool = False, success: bool = False) -> Info:
        metrics = {"action_is_valid": valid, "action_is_effective": effective, "guesses": valid, "success": success}
        return {"metrics": metrics, "metrics_agg_mode": AGG_MODES}
