"""The gateway's requests, answers and records, without a socket."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.base.ids import (
    Digest,
    Version,
)
from echo2d.core.protocol.control_messages import Finish, VersionSpan
from echo2d.core.protocol.trajectory import (
    pack_logprobs,
    pack_tokens,
)
from echo2d.core.work.calls.events import CallId, ChoiceGrew
from echo2d.net.gateway.errors import CallRefusal
from echo2d.net.gateway.requests import SEED_MAX, read_ask, read_messages, read_tools
from echo2d.net.gateway.responses import ChoiceOutput
from echo2d.store.json_log import FILES, JsonLog
from echo2d.texts.tool_calls import read_answer
from tests.support.texts import texts

NONE = frozenset[str]()
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_truncated_output_lists_only_its_own_tokens() -> None:
    made = texts()
    ids = made.encode("one END two", special=False)
    spans = (
        VersionSpan(0, 3, Version(4), Digest(bytes(32))),
        VersionSpan(3, 11, Version(5), Digest(bytes(32))),
    )
    output = ChoiceOutput(0, made, ("END",), special=False)
    step = output.take(
        ChoiceGrew(CallId(0), 0, pack_tokens(ids), pack_logprobs([-0.5] * 11), spans, "length")
    )
    assert (step.finish, step.cut, output.text, len(output.tokens)) == ("stop", False, "one ", 7)
    assert [(span["start"], span["end"], span["version"]) for span in output.spans] == [
        (0, 3, 4),
        (3, 7, 5),
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 10**400},
        {"n": 0}, {"n": True}, {"n": 1.0}, {"temperature": float("nan")}, {"temperature": "hot"}, {"top_p": 0},
        {"seed": 1 << 63}, {"seed": 0.5},
        {"stop": 3}, {"stop": ["a"] * 5}, {"stop": "\ud800"}, {"stop_token_ids": ["a"]}, {"stream": 1}, {"tools": [{}]},
        {"response_format": {"type": "json_object"}}, {"presence_penalty": 0.5}, {"frequency_penalty": False},
        {"stream_options": {"other": 1}}, {"max_tokens": 0}, {"what": 1}, {"logit_bias": {"1": 5}},
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_with_its_name(body: dict[str, Any]) -> None:
    with pytest.raises(CallRefusal) as refused:
        read_ask(body, NONE, logprobs=False)
    assert refused.value.status == 400
    assert refused.value.param == next(iter(body))


def test_neutral_values_and_nulls_are_accepted() -> None:
    ask = read_ask(
        {"temperature": 0, "presence_penalty": 0.0, "tools": None, "user": "x", "top_k": -1},
        NONE,
        logprobs=True,
    )
    assert (ask.sampling.temperature, ask.choices, ask.max_new_tokens, ask.logprobs) == (
        0.0,
        1,
        None,
        True,
    )


@pytest.mark.parametrize(
    "messages",
    [None, [], ["x"], [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}],
     [{"role": "user", "content": "\ud800"}], [{"role": "assistant", "content": "", "tool_calls": [{}]}],
     [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "look", "arguments": {}}}]}],
     [{"role": "assistant", "tool_calls": [{**CALL, "id": "\ud800"}]}],
     [{"role": "tool", "tool_call_id": "\ud800", "content": ""}],
     [{"role": "user", "content": "", "audio": {"id": "x"}}]],
)  # fmt: skip
def test_the_content_of_a_message_must_be_text(messages: Any) -> None:
    with pytest.raises(CallRefusal):
        read_messages(messages)


def test_tool_calls_and_their_results_are_accepted_as_messages() -> None:
    """As OpenAI's client sends back what it got."""
    echoed = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "tool_calls": [CALL],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "x"}]}
    thought = {"role": "assistant", "content": "y", "reasoning_content": "so"}
    assert read_messages([echoed, result, thought]) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "assistant", "reasoning_content": "so", "content": "y"},
    ]


def test_requests_of_todays_official_clients_are_accepted() -> None:
    """Seeds with a sign, a tool without output, an assistant that said nothing."""
    seeds = [
        read_ask({"seed": seed}, NONE, logprobs=False).rng_seed for seed in (-1, -(1 << 63), 7)
    ]
    assert seeds == [SEED_MAX, 0, 7]
    result = {"role": "tool", "tool_call_id": "c1", "content": None}
    said = {"role": "assistant", "content": None, "refusal": "no", "tool_calls": None}
    assert read_messages([said, result]) == [
        {"role": "assistant", "content": ""},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ]


def test_a_model_may_call_tools_or_not() -> None:
    assert (
        read_tools({"tools": [TOOL]})
        == read_tools({"tools": [TOOL], "tool_choice": "auto"})
        == [TOOL]
    )
    assert read_tools({"tools": [TOOL], "tool_choice": "none"}) == read_tools({}) == []
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL] * 257}, "tools"),
        ({"tools": [{**TOOL, "x": "\ud800"}]}, "tools"),
        ({"tools": [{**TOOL, "x": nested}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": TOOL}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ]
    for body, param in bodies:
        with pytest.raises(CallRefusal) as refused:
            read_tools(body)
        assert refused.value.param == param


CALLS = 'Look: <tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "finish"), [(CALLS, "stop"), (CALLS, "length"), (CALLS[:-3], "stop")]
)
def test_tool_calls_are_separated_from_the_text(text: str, finish: Finish) -> None:
    made = texts()
    ids = [*made.encode(text, special=False), *([0] if finish == "stop" else [])]
    spans = (VersionSpan(0, len(ids), Version(4), Digest(bytes(32))),)
    output = ChoiceOutput(0, made, (), special=False)
    grown = [
        output.take(
            ChoiceGrew(
                CallId(0), 0, pack_tokens(part), pack_logprobs([0.0] * len(part)), spans, how
            )
        )
        for part, how in ((ids[:9], None), (ids[9:], finish))
    ]
    read = partial(read_answer, form="tagged")
    deltas = [
        output.delta(step, first=place == 0, logprobs=False, read=read)
        for place, step in enumerate(grown)
    ]
    assert deltas[0]["delta"] == {"role": "assistant"}  # the text may yet be a call
    choice = output.message(logprobs=False, read=read)
    whole, streamed = choice["message"], deltas[1]["delta"]
    assert choice["finish_reason"] == deltas[1]["finish_reason"]
    assert whole["content"] == streamed["content"]
    if text is not CALLS:
        assert (whole["content"], choice["finish_reason"]) == (text, "stop")
        assert choice["unparsed_tool_calls"] == deltas[1]["unparsed_tool_calls"] == ["unclosed"]
        return
    assert whole["content"] == "Look:"
    assert choice["finish_reason"] == ("tool_calls" if finish == "stop" else "length")
    [call] = whole["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": "é"}'}
    assert streamed["tool_calls"][0] == {**call, "id": streamed["tool_calls"][0]["id"], "index": 0}


def test_records_are_bounded(tmp_path: Path) -> None:
    log = JsonLog(tmp_path, "gateway", 400)
    for number in range(100):
        log.append([{"number": number}, {"long": "x" * 200}])
    files = sorted(tmp_path.iterdir())
    assert len(files) == FILES
    assert sum(path.stat().st_size for path in files) <= 400
    lines = [json.loads(line)["number"] for path in files for line in path.read_text().splitlines()]
    assert sorted(lines) == list(range(100 - len(lines), 100))
