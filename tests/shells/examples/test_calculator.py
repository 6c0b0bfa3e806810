"""The calculator: hostile expressions are refused at once, and a whole episode gives its reward."""

import asyncio
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.errors import OperatorFault
from echo2d.tasks.base import Reward
from echo2d.tasks.environment import End, EnvironmentAnswer, ToolCall, Turn
from echo2d.tasks.episodes import EpisodeEnd, Episodes, EpisodeTurn, StepCall
from echo2d.tasks.pool import Score, TaskPool, TextSettings
from examples.environments.calculator import BITS_MAX, TOOL, Calculator, evaluate
from tests.support.texts import CHATML, chat_texts, chat_tokenizer, write_text_model
from tests.support.turn_texts import END, MAKE, read, write_turn_model, written


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2*3", 7),
        ("(1 + 2) * -3", -9),
        ("7 // 2 + 7 % 4", 6),
        ("1 / 4", 0.25),
        ("2 ** 200", 2**200),
        ("2 ** -2", 0.25),
        ("+1_000", 1000),
        ("1 ** 100000000000", 1),
    ],
)
def test_an_expression_has_its_value(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9", "a power has more than 256 bits"),
        ("(2**200)*(2**200)", "a number has more than 256 bits"),
        ("10**10**10**10", "a power has more than"),
        ("2.0**1e9", "a power has more than"),
        ("(-8)**0.5", "no real number"),
        ("1e308*10", "no real number"),
        ("0.1**-400", "too large"),
        ("1/0", "a division by zero"),
        ("0**-1", "a division by zero"),
        ("1e999", "no real number"),
        ("(1).__class__", "only numbers"),
        ("().__class__.__bases__[0].__subclasses__()", "only numbers"),
        ("__import__('os').system('id')", "only numbers"),
        ("[1 for _ in range(9)]", "only numbers"),
        ("(lambda: 1)()", "only numbers"),
        ("'a' * 100", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1 << 100", "only numbers"),
        ("a", "only numbers"),
        ("1; 2", "this is no expression"),
        ("", "this is no expression"),
        ("1\0", "this is no expression"),
        ("(" * 150 + "1" + ")" * 40, "this is no expression"),
        ("-" * 150 + "1", "nested more than 50 deep"),
        ("+".join("1" * 60), "nested more than 50 deep"),
        ("9" * 201, "at most 200 are allowed"),
        ("9" * 200, f"more than {BITS_MAX} bits"),
    ],
)
def test_a_hostile_expression_is_refused_at_once(expression: str, reason: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        evaluate(expression)
    assert time.process_time() - began < 0.5


def answered(text: str = "", **calls: Any) -> EnvironmentAnswer:
    """calls: the expressions of calls, by their ids."""
    made = [ToolCall("calculator", {"expression": each}, at) for at, each in calls.items()]
    return EnvironmentAnswer(text, made, "stop", [1, 2])


def asked(turn: Turn) -> str:
    """The expression of the question."""
    return str(turn.messages[-1]["content"]).removeprefix("What is ").partition("?")[0]


def content(turn: Turn | End) -> list[Mapping[str, Any]]:
    assert isinstance(turn, Turn)
    return list(turn.messages)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_an_episode_with_a_call_and_the_right_number_is_rewarded(level: int) -> None:
    environment = Calculator(level)
    for row in range(20):
        first = environment.reset(row, 0)
        assert first == Calculator(level).reset(row, 1)
        assert first.tools == [TOOL]
        expression = asked(first)
        (result,) = content(environment.step(answered(a=expression)))
        assert (result["role"], result["tool_call_id"]) == ("tool", "a")
        # The same as Python's own arithmetic.
        assert int(result["content"]) == eval(expression)
        end = environment.step(answered(f"It is {result['content']}."))
        assert isinstance(end, End)
        assert end.reward == Reward(1.1, {"right": 1.0, "call": 0.1})


def test_an_answer_gets_its_reward() -> None:
    environment = Calculator(call_reward=0.25)

    def worth(*answers: EnvironmentAnswer) -> Reward:
        environment.reset(0, 0)
        found = [environment.step(answer) for answer in answers][-1]
        assert isinstance(found, End)
        assert isinstance(found.reward, Reward)
        return found.reward

    right = str(evaluate(asked(environment.reset(0, 0))))
    assert worth(answered(right)) == Reward(1.0, {"right": 1.0, "call": 0.0})
    assert worth(answered("no idea")).value == 0.0
    assert worth(answered(f"{right} or 7777")).value == 0.0
    assert worth(answered(a="1"), answered("no idea")).value == 0.25
    assert worth(answered(a="oops"), answered(right)).value == 1.0
    # The last turn is an answer, whatever it calls.
    assert worth(*[answered(a="1")] * 4).value == 0.25


def test_a_wrong_call_gets_an_error_message() -> None:
    environment = Calculator()
    environment.reset(0, 0)
    calls = [
        ToolCall("shell", {"expression": "1"}),
        ToolCall("calculator", {"expression": 1}),
        ToolCall("calculator", {"expression": "9**9**9"}),
    ]
    told = content(environment.step(EnvironmentAnswer("", calls, "stop", [1])))
    wrong = 'error: expected a call of "calculator" with an "expression"'
    assert [each["content"] for each in told] == [
        wrong,
        wrong,
        "error: a power has more than 256 bits",
    ]


def test_demonstrations_are_right_and_come_before_the_question() -> None:
    turn = Calculator(level=2, demonstrations=2).reset(0, 0)
    assert [each["role"] for each in turn.messages] == [
        *["user", "assistant", "tool", "assistant"] * 2,
        "user",
    ]
    assert len({each["content"] for each in turn.messages if each["role"] == "user"}) == 3
    for at in (0, 4):
        _, call, result, answer = turn.messages[at : at + 4]
        expression = call["tool_calls"][0]["function"]["arguments"]["expression"]
        assert result["content"] == str(eval(expression))
        assert answer["content"] == f"The answer is {result['content']}."


def test_another_instance_continues_an_episode_from_its_state() -> None:
    one, other = Calculator(), Calculator()
    expression = asked(one.reset(5, 0))
    one.step(answered(a=expression))
    other.restore(one.save())
    right = answered(str(evaluate(expression)))
    assert other.step(right) == one.step(right)


def test_held_out_questions_are_never_trained_on() -> None:
    train, held_out = Calculator(level=2), Calculator(level=2, split="heldout")
    sides = [{each.reset(row, 0).row for row in range(300)} for each in (train, held_out)]
    assert not sides[0] & sides[1]
    assert min(map(len, sides)) > 250


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"level": 4}, "level: expected 1, 2 or 3; found 4"),
        ({"demonstrations": 9}, "demonstrations: expected 0 to 8; found 9"),
        ({"turns": 0}, "turns: expected 1 or more"),
        ({"split": "test"}, 'split: expected "train" or "heldout"'),
        ({"held_out": math.nan}, "held_out: expected 0 to less than 1"),
    ],
)
def test_wrong_options_are_the_operators_fault(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(OperatorFault, match=reason):
        Calculator(**options)


@pytest.fixture
def texts() -> Iterator[TextSettings]:
    """Where a task process of another user may read, which `tmp_path` is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        model = write_turn_model(Path(name) / "model")
        model.chmod(0o755)
        yield TextSettings(str(model), turns=MAKE)


async def test_an_episode_is_played_in_a_process(texts: TextSettings) -> None:
    async with TaskPool(
        "examples.environments.calculator:Calculator", {"demonstrations": 1}, texts=texts
    ) as pool:
        episodes = Episodes(pool)
        first = await episodes.reset(1, 0, 0)
        assert isinstance(first, EpisodeTurn)
        prompt = unpack_tokens(first.given).tolist()
        expression = read(prompt).rpartition("What is ")[2].partition("?")[0]
        call = {"name": "calculator", "arguments": {"expression": expression}}
        wrote = written(f"<tool_call>{json.dumps(call)}</tool_call>")
        second = await episodes.step(StepCall(1, 0, first.state, first.given, pack_tokens(wrote)))
        assert isinstance(second, EpisodeTurn)
        result = read(unpack_tokens(second.given).tolist())
        assert result == f"<tool>{eval(expression)}{END}<answer>"
        so_far = first.given + pack_tokens(wrote) + second.given
        last = pack_tokens(written(f"It is {eval(expression)}"))
        end = await episodes.step(StepCall(1, 1, second.state, so_far, last))
    assert end == EpisodeEnd(Score(1.1, {"right": 1.0, "call": 0.1}), "right")


@pytest.fixture
def chat_model() -> Iterator[TextSettings]:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        model = write_text_model(Path(name) / "model", CHATML)
        (model / "tokenizer.json").write_text(chat_tokenizer().to_str())
        yield TextSettings(str(model))


async def test_an_episode_is_played_with_a_models_own_chat_template(
    chat_model: TextSettings,
) -> None:
    made = await asyncio.to_thread(chat_texts)
    async with TaskPool(
        "examples.environments.calculator:Calculator", {"demonstrations": 1}, texts=chat_model
    ) as pool:
        episodes = Episodes(pool)
        first = await episodes.reset(1, 0, 0)
        assert isinstance(first, EpisodeTurn)
        asked = made.decode(unpack_tokens(first.given).tolist())
        assert asked.count("<tool_call>\n") == 1
        expression = asked.rpartition("What is ")[2].partition("?")[0]
        call = {"name": "calculator", "arguments": {"expression": expression}}
        wrote = pack_tokens(
            made.encode(f"<tool_call>{json.dumps(call)}</tool_call><|im_end|>", special=False)
        )
        second = await episodes.step(StepCall(1, 0, first.state, first.given, wrote))
        assert isinstance(second, EpisodeTurn)
        result = made.decode(unpack_tokens(second.given).tolist())
        assert f"<tool_response>\n{eval(expression)}\n</tool_response>" in result
        so_far = first.given + wrote + second.given
        last = pack_tokens(made.encode(f"{eval(expression)}<|im_end|>", special=False))
        end = await episodes.step(StepCall(1, 1, second.state, so_far, last))
    assert end == EpisodeEnd(Score(1.1, {"right": 1.0, "call": 0.1}), "right")
