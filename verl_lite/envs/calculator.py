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
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from verl_lite.envs.actions import ANSWER_PATTERN, ActionParser
from verl_lite.envs.base import Info, register_env
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

    reward_right, reward_wrong: rewards of the answer. penalty_for_call: added to the reward for each call of the tool.
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
        self.terms, self.max_number, self.operators = terms, max_number, operators
        self.reward_right, self.reward_wrong, self.penalty_for_call = reward_right, reward_wrong, penalty_for_call
        self.parser = ActionParser(answer_pattern)
        self.instruction = INSTRUCTION if env_instruction is None else env_instruction
        self.expression = ""

    def reset(self, seed: int) -> tuple[str, Info]:
        self.expression = self._question(random.Random(seed))
        return f"What is {self.expression}?", {"env_instruction": self.instruction, "metrics_agg_mode": AGG_MODES}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        calls = parse_tool_calls(action)
        if calls:
            answers = [self._call(call) for call in calls]
            errors = sum(not worked for _, worked in answers)
            info = _info(valid=errors == 0, calls=len(calls), errors=errors)
            observation = "\n".join(text for text, _ in answers)
            return observation, self.penalty_for_call * len(calls), False, False, info | {"use_tool": True}
        answer = self.parser(action)
        if answer.action is None:
            return "There is neither a call of a tool nor an answer.", 0.0, False, False, _info(valid=False)
        right = number_in(str(answer.action)) == evaluate(self.expression)
        observation = "Right." if right else f"Wrong: it is {written(evaluate(self.expression))}."
        return observation, self.reward_right if right else self.reward_wrong, True, False, _info(success=right)

    def sample_random_action(self) -> str:
        return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': '1+2'}})}</tool_call>"

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
            return written(evaluate(expression)), True
        except (ValueError, ArithmeticError) as error:
            return f"Error: {error}", False

    def _question(self, rng: random.Random) -> str:
        """Returns an expression to be evaluated from left to right, with brackets where * or / follows + or -."""
        numbers = [rng.randint(1, self.max_number) for _ in range(self.terms)]
        text, loose = str(numbers[0]), False
        for number in numbers[1:]:
            operator = rng.choice(self.operators)
            if operator in "*/" and loose:
                text, loose = f"({text})", False
            if operator == "/":
                value = evaluate(text)  # the next number is one of its divisors, so the quotient is an integer
                number = rng.choice([n for n in range(1, self.max_number + 1) if value % n == 0])
            loose = loose or operator in "+-"
            text = f"{text} {operator} {number}"
        return text


def _info(*, valid: bool = True, calls: int = 0, errors: int = 0, success: bool = False) -> Info:
    metrics = {"action_is_valid": valid, "tool_calls": calls, "tool_errors": errors, "success": success}
    return {"metrics": metrics, "metrics_agg_mode": AGG_MODES}


MAX_CHARACTERS = 400
"""Maximum length of an expression. It also bounds time and result, because powers are not allowed."""

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> Fraction:
    """Returns the exact value of an untrusted expression of numbers, + - * / // %, brackets and signs.

    Does not run the expression as code. Raises ValueError if it contains anything else, ZeroDivisionError if it divides
    by zero.
    """
    cleaned = expression.strip().replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        if len(expression) > MAX_CHARACTERS:
            raise ValueError(f"longer than {MAX_CHARACTERS} characters")
        return _value(ast.parse(cleaned, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression[:80]!r} is no arithmetic expression ({error})") from error


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return Fraction(_OPERATORS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return Fraction(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed: numbers, + - * / // %, brackets")


def written(value: Fraction) -> str:
    """Formats a value: integers exactly, other values with at most 10 significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def number_in(text: str) -> Fraction | None:
    """Parses a text such as "1,234.50" or "2/3" as a number; returns None if it is not a number."""
    cleaned = text.strip().rstrip(".").replace(",", "").replace(" ", "").replace("−", "-").lstrip("$")
    if len(cleaned) > MAX_CHARACTERS or "e" in cleaned.lower():
        return None
    try:
        return Fraction(cleaned)
    except (ValueError, ZeroDivisionError):
        return None
