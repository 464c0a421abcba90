"""Arithmetic with a tool: the agent may call a calculator any number of times, and answers once.

user       What is (37 + 5) * 18?
assistant  <tool_call>{"name": "calculator", "arguments": {"expression": "(37+5)*18"}}</tool_call>
tool       756
assistant  <answer>756</answer>            reward 1
"""

import ast
import json
import operator
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

from verl_lite.envs.actions import ANSWER_PATTERN, ActionParser
from verl_lite.envs.base import Info, StepResult, register_env
from verl_lite.envs.tool_calls import ToolCall, parse_tool_calls
from verl_lite.errors import UserError

TOOL = {
    "name": "calculator",
    "description": "The value of an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example (37+5)*18"}},
        "required": ["expression"],
    },
}
INSTRUCTION = (
    "Answer the question. You may call this tool: "
    + json.dumps(TOOL)
    + '\nA call: <tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>'
    "\nWhen you know the answer, write it as <answer>3</answer>.\n"
)
AGG_MODES = {"action_is_valid": "mean", "tool_calls": "sum", "tool_errors": "sum", "success": "last"}


@register_env("calculator")
class Calculator:
    """Questions with `terms` numbers up to `max_number`, joined by `operators` (from + - * /; quotients are integers).

    Args:
        terms, max_number, operators: the questions.
        reward_right, reward_wrong: rewards of the answer.
        penalty_for_call: added to the reward for each call of the tool.
        answer_pattern: see `ActionParser`.
        env_instruction: replaces the default instruction.
    """

    def __init__(
        self,
        terms: int = 3,
        max_number: int = 99,
        operators: str = "+-*",
        reward_right: float = 1.0,
        reward_wrong: float = 0.0,
        penalty_for_call: float = 0.0,
        answer_pattern: str = ANSWER_PATTERN,
        env_instruction: str | None = None,
    ) -> None:
        if terms < 2 or max_number < 1:
            raise UserError(f"terms={terms!r}, max_number={max_number!r}: expected terms >= 2 and max_number >= 1")
        if not operators or set(operators) - set("+-*/"):
            raise UserError(f"operators={operators!r}: expected some of + - * /")
        # each operator has a space on both sides, and one of two operators at most follows a bracket
        longest_question = terms * len(str(max_number)) + 3 * (terms - 1) + 2 * (terms // 2)
        if longest_question > MAX_CHARACTERS:
            raise UserError(
                f"terms={terms!r}, max_number={max_number!r}: a question can have {longest_question} characters, "
                f"and the calculator takes {MAX_CHARACTERS}; choose fewer or smaller numbers"
            )
        self.terms = terms
        self.max_number = max_number
        self.operators = operators
        self.reward_right = reward_right
        self.reward_wrong = reward_wrong
        self.penalty_for_call = penalty_for_call
        self.parser = ActionParser(answer_pattern)
        self.instruction = INSTRUCTION
        if env_instruction is not None:
            self.instruction = env_instruction
        self.expression = ""

    def reset(self, seed: int) -> tuple[str, Info]:
        # from the seed alone, because all episodes of a group must get the same question
        rng = random.Random(seed)
        self.expression = self._question(rng)
        observation = f"What is {self.expression}?"
        return observation, {"env_instruction": self.instruction, "metrics_agg_mode": AGG_MODES}

    def step(self, action: str) -> StepResult:
        # a turn with a call is no answer, even if it contains one
        calls = parse_tool_calls(action)
        if calls:
            return self._respond_to_calls(calls)
        answer = self.parser(action)
        if answer.action is None:
            return "There is neither a call of a tool nor an answer.", 0.0, False, False, _info(valid=False)
        value = evaluate(self.expression)
        answered_value = number_in(str(answer.action))
        if answered_value == value:
            return "Right.", self.reward_right, True, False, _info(success=True)
        return f"Wrong: it is {written(value)}.", self.reward_wrong, True, False, _info(success=False)

    def sample_random_action(self) -> str:
        return '<tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>'

    def _respond_to_calls(self, calls: Sequence[ToolCall]) -> StepResult:
        """Returns the results of all calls of a turn, one per line."""
        results = []
        errors = 0
        for call in calls:
            result, has_worked = self._call(call)
            results.append(result)
            errors += not has_worked
        info = _info(valid=errors == 0, calls=len(calls), errors=errors)
        info["use_tool"] = True
        penalty = self.penalty_for_call * len(calls)
        return "\n".join(results), penalty, False, False, info

    def _call(self, call: ToolCall) -> tuple[str, bool]:
        """Returns the tool's result, and True if the call succeeded."""
        if call.problem:
            return f"Error: {call.problem}", False
        if call.name != TOOL["name"]:
            return f"Error: there is no tool {call.name!r}; there is calculator", False
        expression = call.arguments.get("expression")
        if not isinstance(expression, str):
            return 'Error: calculator takes "expression", a text', False
        try:
            value = evaluate(expression)
            return written(value), True
        except (ValueError, ArithmeticError) as error:
            return f"Error: {error}", False

    def _question(self, rng: random.Random) -> str:
        """Returns an expression to be evaluated from left to right, with brackets where * or / follows + or -."""
        numbers = [rng.randint(1, self.max_number) for _ in range(self.terms)]
        text = str(numbers[0])
        # True while the text has a + or - outside of brackets
        has_open_sum = False
        for number in numbers[1:]:
            operator = rng.choice(self.operators)
            if operator in "*/" and has_open_sum:
                text = f"({text})"
                has_open_sum = False
            if operator == "/":
                # the next number is one of the divisors of the value so far, so the quotient is an integer
                value = evaluate(text)
                divisors = [divisor for divisor in range(1, self.max_number + 1) if value % divisor == 0]
                number = rng.choice(divisors)
            if operator in "+-":
                has_open_sum = True
            text = f"{text} {operator} {number}"
        return text


def _info(*, valid: bool = True, calls: int = 0, errors: int = 0, success: bool = False) -> Info:
    metrics = {
        "action_is_valid": valid,
        "tool_calls": calls,
        "tool_errors": errors,
        "success": success,
    }
    return {"metrics": metrics, "metrics_agg_mode": AGG_MODES}


MAX_CHARACTERS = 400
"""Maximum length of an expression. It also bounds time and result, because powers are not allowed."""

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(expression: str) -> Fraction:
    """Returns the exact value of an untrusted expression of numbers, + - * / // %, brackets and signs.

    Does not run the expression as code. Raises ValueError if it contains anything else, ZeroDivisionError if it divides
    by zero.
    """
    cleaned = expression.strip().replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        if len(expression) > MAX_CHARACTERS:
            raise ValueError(f"longer than {MAX_CHARACTERS} characters")
        parsed = ast.parse(cleaned, mode="eval")
        return _value(parsed.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression[:80]!r} is no arithmetic expression ({error})") from error


def _value(node: ast.expr) -> Fraction:
    """Returns the value of a parsed expression. Raises ValueError for a node that is not allowed."""
    # by its text: 0.1 is then a tenth, and not the nearest float; True is no number here
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        sign = _SIGNS[type(node.op)]
        return sign(_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        operation = _BINARY[type(node.op)]
        left = _value(node.left)
        right = _value(node.right)
        # // returns an int
        return Fraction(operation(left, right))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed: numbers, + - * / // %, brackets")


def written(value: Fraction) -> str:
    """Formats a value: integers exactly, other values with at most 10 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10g}"


def number_in(text: str) -> Fraction | None:
    """Parses a text such as "1,234.50" or "2/3" as a number; returns None if it is not a number."""
    cleaned = text.strip().rstrip(".").replace(",", "").replace(" ", "").replace("−", "-").lstrip("$")
    # 1e999999999 would be a number with as many digits
    if len(cleaned) > MAX_CHARACTERS or "e" in cleaned.lower():
        return None
    try:
        return Fraction(cleaned)
    except (ValueError, ZeroDivisionError):
        return None
