"""The environment "calculator": questions of arithmetic, and a tool that computes.

    question --> <tool_call> 12*34 --> 408 --> ... --> answer; its last number counts

The tool sees texts that a model wrote. It evaluates a few kinds of nodes of Python's syntax tree,
itself, and refuses what grows.
"""

import ast
import json
import math
import operator
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Reward, Split
from echo2d.tasks.environment import End, Environment, EnvironmentAnswer, Turn
from echo2d.tasks.rows.split import GeneratedSide, row_key

EXPRESSION_CHARS_MAX = 200
DEPTH_MAX = 50  # of brackets and operators in each other
BITS_MAX = 256  # of a whole number on the way
CALLS_MAX = 4  # answered of one turn
DEMONSTRATIONS_MAX = 8
LEVELS = (1, 2, 3)

NAME = "calculator"
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 12*(3+4)"}},
            "required": ["expression"],
        },
    },
}

Real = int | float

OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Real]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class Calculator(Environment):
    """Questions of arithmetic, answered with a tool that computes.

    level: 1 for sums of two numbers, 2 with a product, 3 with brackets and larger numbers.
    demonstrations: worked examples before the question. call_reward: what a well-formed call adds to
    the reward of 1 for the right number, which the last answer ends with. turns: answers at most.

    held_out, split: as of the task "rows".
    """

    name = NAME

    def __init__(
        self,
        level: int = 1,
        demonstrations: int = 0,
        call_reward: float = 0.1,
        turns: int = 4,
        held_out: float = 0.1,
        split: Split = "train",
        rng_seed: int = 0,
    ) -> None:
        if level not in LEVELS:
            raise OperatorFault(f"calculator: level: expected 1, 2 or 3; found {level}")
        if not 0 <= demonstrations <= DEMONSTRATIONS_MAX:
            raise OperatorFault(
                f"calculator: demonstrations: expected 0 to {DEMONSTRATIONS_MAX}; "
                f"found {demonstrations}"
            )
        if turns < 1:
            raise OperatorFault(f"calculator: turns: expected 1 or more; found {turns}")
        self._side = GeneratedSide(NAME, split, held_out)
        self._level, self._demonstrations, self._rng_seed = level, demonstrations, rng_seed
        self._call_reward, self._turns_max = call_reward, turns
        self._expected, self._turns, self._called = 0, 0, False

    def reset(self, row: int, seed: int) -> Turn:  # noqa: ARG002 - nothing is left to chance
        key, expression = self._side.row(row, self._question)
        self._expected, self._turns, self._called = int(evaluate(expression)), 0, False
        # Demonstrations are always of the side that is trained on.
        shown = range(self._demonstrations)
        messages = [each for number in shown for each in self._demonstration(number)]
        messages.append({"role": "user", "content": _asked(expression)})
        return Turn(messages, tools=[TOOL], tags={"level": str(self._level)}, row=key)

    def step(self, answer: EnvironmentAnswer) -> Turn | End:
        self._turns += 1
        calls = answer.tool_calls[:CALLS_MAX]
        if not calls or self._turns == self._turns_max:
            return self._end(answer.text)
        results = [(call.id, self._result(call.name, call.arguments)) for call in calls]
        return Turn(
            [
                {"role": "tool", "name": NAME, "tool_call_id": call_id, "content": result}
                for call_id, result in results
            ]
        )

    def save(self) -> bytes:
        return json.dumps([self._expected, self._turns, self._called]).encode()

    def restore(self, state: bytes) -> None:
        self._expected, self._turns, self._called = json.loads(state)

    # --- inside

    def _end(self, text: str) -> End:
        found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
        right = bool(found) and float(found[-1]) == self._expected
        parts = {"right": float(right), "call": self._call_reward * self._called}
        said = "right" if right else f"wrong: it is {self._expected}"
        return End(Reward(sum(parts.values()), parts), [{"role": "user", "content": said}])

    def _result(self, name: str, arguments: Mapping[str, Any]) -> str:
        expression = arguments.get("expression")
        if name != NAME or not isinstance(expression, str):
            return f'error: expected a call of "{NAME}" with an "expression"'
        try:
            value = evaluate(expression)
        except ValueError as error:
            return f"error: {error}"
        self._called = True
        return _written(value)

    def _question(self, number: int) -> tuple[str, str]:
        rng = random.Random(f"{NAME} {self._level} {self._rng_seed} {number}")
        expression = _expression(rng, self._level)
        return row_key(expression), expression

    def _demonstration(self, number: int) -> list[dict[str, Any]]:
        side = GeneratedSide(NAME, "train", self._side.held_out)
        # Far behind the rows that are asked.
        _, expression = side.row((1 << 40) + number, self._question)
        result = _written(evaluate(expression))
        called = {"name": NAME, "arguments": {"expression": expression}}
        calls = [{"id": f"shown-{number}", "type": "function", "function": called}]
        return [
            {"role": "user", "content": _asked(expression)},
            # The chat template writes the call in the model's own form.
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "name": NAME, "tool_call_id": f"shown-{number}", "content": result},
            {"role": "assistant", "content": f"The answer is {result}."},
        ]


def _asked(expression: str) -> str:
    return f"What is {expression}? Use the calculator, then end with the number."


def _expression(rng: random.Random, level: int) -> str:
    """A question whose result is a whole number."""
    if level == 1:
        return f"{rng.randrange(100)} {rng.choice('+-')} {rng.randrange(100)}"
    a, b, c, d = (rng.randrange(2, 10**level) for _ in range(4))
    if level == 2:
        return f"{a} * {b} {rng.choice('+-')} {c}"
    return f"({a} {rng.choice('+-')} {b}) * {c} {rng.choice('+-')} {d}"


def _written(value: Real) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def evaluate(expression: str) -> Real:
    """What an expression of numbers and + - * / // % ** comes to.

    ValueError: it is none, or too long, too deep or too large.
    """
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise ValueError(
            f"the expression has {len(expression)} characters; at most {EXPRESSION_CHARS_MAX} are "
            "allowed"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError("this is no expression") from error
    try:
        return _value(tree.body, DEPTH_MAX)
    except ZeroDivisionError as error:
        raise ValueError("a division by zero") from error
    except OverflowError as error:
        raise ValueError("the result is too large") from error


def _value(node: ast.expr, depth: int) -> Real:
    if depth == 0:
        raise ValueError(f"the expression is nested more than {DEPTH_MAX} deep")
    match node:
        # Not `int() | float()`: True is an int.
        case ast.Constant(value) if type(value) in (int, float):
            return _small(value)
        case ast.UnaryOp(ast.UAdd() | ast.USub() as sign, operand):
            value = _value(operand, depth - 1)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
            a, b = _value(left, depth - 1), _value(right, depth - 1)
            if isinstance(kind, ast.Pow):
                _require_small_power(a, b)
            return _small(OPERATORS[type(kind)](a, b))
    raise ValueError("only numbers, brackets and + - * / // % ** are allowed")


def _small(value: Any) -> Real:
    """Refuse what is too large, and what is no real number, such as a root of -1."""
    if isinstance(value, int):
        if value.bit_length() > BITS_MAX:
            raise ValueError(f"a number has more than {BITS_MAX} bits")
        return value
    if not isinstance(value, float) or not abs(value) < float("inf"):
        raise ValueError("the result is no real number")
    return value


def _require_small_power(base: Real, exponent: Real) -> None:
    """Before it is computed, which may take for ever."""
    if abs(base) > 1 and math.log2(abs(base)) * abs(exponent) > BITS_MAX:
        raise ValueError(f"a power has more than {BITS_MAX} bits")
