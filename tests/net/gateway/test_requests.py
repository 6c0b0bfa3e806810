"""The gateway's requests, answers and records, without a socket."""

import json
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.base.ids import (
    Digest,
    Version,
)
from echo2d.core.gateway.events import CallId, ChoiceGrew
from echo2d.core.protocol.control_messages import VersionSpan
from echo2d.core.protocol.trajectory import (
    pack_logprobs,
    pack_tokens,
)
from echo2d.net.gateway.errors import CallRefusal
from echo2d.net.gateway.requests import read_ask, read_messages
from echo2d.net.gateway.responses import ChoiceOutput
from echo2d.store.json_log import FILES, JsonLog
from tests.support.texts import texts

NONE = frozenset[str]()


def test_output_that_is_cut_names_its_own_tokens_only() -> None:
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
        {"seed": -1},
        {"stop": 3}, {"stop": ["a"] * 5}, {"stop": "\ud800"}, {"stop_token_ids": ["a"]}, {"stream": 1}, {"tools": [{}]},
        {"response_format": {"type": "json_object"}}, {"presence_penalty": 0.5}, {"frequency_penalty": False},
        {"stream_options": {"other": 1}}, {"max_tokens": 0}, {"what": 1}, {"logit_bias": {"1": 5}},
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(CallRefusal) as refused:
        read_ask(body, NONE, logprobs=False)
    assert refused.value.status == 400
    assert refused.value.param == next(iter(body))


def test_neutral_values_and_nulls_are_fine() -> None:
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
     [{"role": "user", "content": "\ud800"}], [{"role": "assistant", "content": "", "tool_calls": [{}]}]],
)  # fmt: skip
def test_messages_are_text(messages: Any) -> None:
    with pytest.raises(CallRefusal):
        read_messages(messages)


def test_records_are_bounded(tmp_path: Path) -> None:
    log = JsonLog(tmp_path, "gateway", 400)
    for number in range(100):
        log.append([{"number": number}, {"long": "x" * 200}])
    files = sorted(tmp_path.iterdir())
    assert len(files) == FILES
    assert sum(path.stat().st_size for path in files) <= 400
    lines = [json.loads(line)["number"] for path in files for line in path.read_text().splitlines()]
    assert sorted(lines) == list(range(100 - len(lines), 100))
