"""Reads the tool calls and the reasoning that a model wrote into its answer.

The form that a model was taught is found in its chat template: `<tool_call>{"name", "arguments"}
</tool_call>` (Hermes, Qwen), or one JSON object {"name", "parameters"} as the whole answer (Llama 3).
A malformed call stays in the text, with a reason that can be counted.
Not here: the calls' execution, and their results.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

CallForm = Literal["tagged", "bare", ""]
UnparsedReason = Literal["json", "shape", "unclosed"]

THINK, END_THINK = "<think>", "</think>"
_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call that a model asks for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerTurn:
    """The parts of an answer."""

    text: str  # without calls and reasoning
    tool_calls: tuple[WrittenCall, ...] = ()
    reasoning: str = ""
    # A reason for each malformed call, which stays in the text: "json": it is not JSON; "shape": it
    # lacks a name or arguments; "unclosed": it does not end.
    unparsed: tuple[UnparsedReason, ...] = ()


def call_form(template: str | None) -> CallForm:
    """The form of tool calls that a chat template teaches; "" if it teaches no form known here."""
    if template is None:
        return ""
    if "<tool_call>" in template:
        return "tagged"
    return "bare" if "parameters" in template and "ipython" in template else ""


def read_answer(text: str, form: CallForm, *, thinking: bool = False) -> AnswerTurn:
    """Read the text of an answer. thinking: the prompt has already opened the reasoning."""
    reasoning, rest = _split_reasoning(text, thinking=thinking)
    if form == "":
        return AnswerTurn(rest, (), reasoning)
    return _tagged(rest, reasoning) if form == "tagged" else _bare(rest, reasoning)


def _split_reasoning(text: str, *, thinking: bool) -> tuple[str, str]:
    """The reasoning, and the rest, which is empty if the reasoning does not end."""
    begun = text.lstrip()
    if not thinking and not begun.startswith(THINK):
        return "", text
    reasoning, _, rest = begun.removeprefix(THINK).partition(END_THINK)
    return reasoning.strip(), rest.lstrip()


def _tagged(text: str, reasoning: str) -> AnswerTurn:
    calls: list[WrittenCall] = []
    unparsed: list[UnparsedReason] = []

    def read(found: re.Match[str]) -> str:
        call = _call(found[1], "arguments") if found[2] else "unclosed"
        if isinstance(call, WrittenCall):
            calls.append(call)
            return ""
        unparsed.append(call)
        return found[0]

    rest = _TAGGED.sub(read, text)
    return AnswerTurn(rest.strip() if calls else rest, tuple(calls), reasoning, tuple(unparsed))


def _bare(text: str, reasoning: str) -> AnswerTurn:
    body = text.strip().removeprefix("<|python_tag|>")
    call = _call(body, "parameters")
    if isinstance(call, WrittenCall):
        return AnswerTurn("", (call,), reasoning)
    # A text with another beginning is no attempt at a call.
    return AnswerTurn(text, (), reasoning, (call,) if body.startswith('{"name"') else ())


def _call(text: str, arguments: str) -> WrittenCall | UnparsedReason:
    try:
        found = json.loads(text)
    # Deeply nested brackets exhaust the parser's stack.
    except (ValueError, RecursionError):
        return "json"
    if not isinstance(found, dict):
        return "shape"
    name, given = found.get("name"), found.get(arguments)
    if not isinstance(name, str) or not name or not isinstance(given, dict):
        return "shape"
    return WrittenCall(name, given)
