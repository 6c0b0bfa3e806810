"""Tool calls and reasoning, read from an answer's text."""

import pytest

from echo2d.texts.tool_calls import CallForm, call_form, read_answer
from tests.support.texts import CHATML


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


GOOD = call('{"name": "look", "arguments": {"at": "x"}}')


def test_the_template_decides_the_form_of_tool_calls() -> None:
    llama = "{% if m.role == 'tool' %}ipython{% endif %}{'name': function, 'parameters': {}}"
    forms = [call_form(each) for each in (CHATML, llama, "{{ messages }}", None)]
    assert forms == ["tagged", "bare", "", ""]


@pytest.mark.parametrize(
    ("form", "text", "rest", "names", "unparsed"),
    [
        ("tagged", f"I look. {GOOD}\n{GOOD}", "I look.", ["look", "look"], ()),
        ("tagged", " nothing ", " nothing ", [], ()),
        ("tagged", f"{GOOD}{call('{')}", call("{"), ["look"], ("json",)),
        ("tagged", call('{"name": "look"}'), call('{"name": "look"}'), [], ("shape",)),
        ("tagged", call("[1]"), call("[1]"), [], ("shape",)),
        ("tagged", call("[" * 100_000), call("[" * 100_000), [], ("json",)),
        ("tagged", GOOD[:-3], GOOD[:-3], [], ("unclosed",)),
        ("bare", '<|python_tag|>{"name": "look", "parameters": {}}', "", ["look"], ()),
        ("bare", '{"name": "look", "parameters": 3}', '{"name": "look", "parameters": 3}', [], ("shape",)),
        ("bare", '{"name": "lo', '{"name": "lo', [], ("json",)),
        ("bare", "[3]", "[3]", [], ()),
        ("", GOOD, GOOD, [], ()),
    ],
)  # fmt: skip
def test_calls_are_read_and_malformed_ones_stay_text(
    form: CallForm, text: str, rest: str, names: list[str], unparsed: tuple[str, ...]
) -> None:
    answer = read_answer(text, form)
    assert (answer.text, [each.name for each in answer.tool_calls]) == (rest, names)
    assert answer.unparsed == unparsed


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "rest"),
    [
        ("<think>\nso\n</think>\n\nyes", False, "so", "yes"),
        ("so</think>yes", True, "so", "yes"),
        ("so</think>yes", False, "", "so</think>yes"),
        ("<think>so on", False, "so on", ""),
        ("yes, <think> is a word", False, "", "yes, <think> is a word"),
        (f"<think>{GOOD}", False, GOOD, ""),
    ],
)
def test_reasoning_is_separated_from_the_answer(
    text: str, thinking: bool, reasoning: str, rest: str
) -> None:
    answer = read_answer(text, "tagged", thinking=thinking)
    assert (answer.reasoning, answer.text, answer.tool_calls) == (reasoning, rest, ())
