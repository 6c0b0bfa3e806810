"""Requests, text, stops and templates of the gateway, without a socket."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

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
from echo2d.errors import OperatorFault
from echo2d.net.gateway.detokenizer import UNREADABLE_TOKENS_MAX, Detokenizer, TextStream
from echo2d.net.gateway.errors import CallRefusal
from echo2d.net.gateway.requests import read_ask, read_messages
from echo2d.net.gateway.responses import ChoiceOutput
from echo2d.net.gateway.tokenizer import GatewayTokenizer
from echo2d.store.json_log import FILES, JsonLog

NONE = frozenset[str]()


def bytes_tokenizer() -> Tokenizer:
    """A token per byte: characters come in halves."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def texts(template: str | None = None, **config: Any) -> GatewayTokenizer:
    files = {
        "tokenizer.json": bytes_tokenizer().to_str().encode(),
        "config.json": json.dumps(config).encode(),
    }
    settings = {"chat_template": template, "bos_token": {"content": "<s>"}}
    return GatewayTokenizer({**files, "tokenizer_config.json": json.dumps(settings).encode()})


def read(
    made: GatewayTokenizer, text: str, *stops: str, bundle: int = 1
) -> tuple[list[str], bool, int]:
    """What was handed out as the tokens of this text came, whether a stop ended it, and how many tokens it took."""
    reader, ids = Detokenizer(made, stops, special=False), made.encode(text, special=False)
    out, taken = [], 0
    for start in range(0, len(ids), bundle):
        piece = reader.put(ids[start : start + bundle])
        out.append(piece.text)
        taken += piece.tokens
        if piece.stopped:
            return out, True, taken
    return [*out, reader.end()], False, taken


@pytest.mark.parametrize("bundle", [1, 2, 5, 100])
def test_text_comes_whole_and_never_as_half_a_character(bundle: int) -> None:
    told, stopped, taken = read(texts(), "aé漢🙂z", bundle=bundle)
    assert ("".join(told), stopped, taken) == ("aé漢🙂z", False, 11)
    assert not any("\ufffd" in part for part in told)


@pytest.mark.parametrize("bundle", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "stops", "told", "taken"),
    [
        ("one END two", ("END",), "one ", 7),
        ("one EN", ("END",), "one EN", 6),
        ("aab", ("ab",), "a", 3),
        ("x漢y", ("漢",), "x", 4),
        ("a bc", ("c", "bc"), "a ", 4),
        ("none", ("zzz", "q"), "none", 4),
    ],
)
def test_a_stop_ends_it_and_is_not_part_of_it(
    text: str, stops: tuple[str, ...], told: str, taken: int, bundle: int
) -> None:
    out, stopped, count = read(texts(), text, *stops, bundle=bundle)
    assert ("".join(out), count) == (told, taken)
    assert stopped == (told != text)


class Counted(GatewayTokenizer):
    """It counts the tokens that it reads."""

    read = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.read += len(tokens)
        return super().decode(tokens)


def counted() -> Counted:
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens(["<pad>"])
    return Counted({"tokenizer.json": tokenizer.to_str().encode()})


BYTE_80, PAD = 222, 256  # of bytes_tokenizer's alphabet: never a character alone; of `counted`


@pytest.mark.parametrize("token", [PAD, BYTE_80, 9999, 65])
@pytest.mark.parametrize("special", [False, True])
def test_a_token_costs_the_same_however_many_came_before_it(token: int, special: bool) -> None:
    """Special ones, halves of characters, ids that no tokenizer knows, and letters."""
    costs = []
    for count in (100, 1000):
        made = counted()
        reader = Detokenizer(made, ("never",), special=special)
        for _ in range(count):
            reader.put([token])
        reader.end()
        costs.append(made.read)
    assert costs[1] <= 10.5 * costs[0] + 10


def test_text_goes_on_behind_what_is_none() -> None:
    made = counted()
    stream = TextStream(made, special=False)
    word = made.encode("a漢b", special=False)
    told = [stream.put(token) for token in (*[BYTE_80] * UNREADABLE_TOKENS_MAX, *word, PAD, *word)]
    assert "".join(told).endswith("a漢ba漢b")
    assert "<pad>" not in "".join(told)
    shown = TextStream(made, special=True)
    assert "".join(shown.put(token) for token in (*word, PAD, *word)) == "a漢b<pad>a漢b"


def test_half_a_character_at_the_end_is_told_as_such() -> None:
    made = texts()
    reader = Detokenizer(made, (), special=False)
    assert reader.put(made.encode("漢", special=False)[:2]).text == ""
    assert reader.end() == "\ufffd"


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


def test_a_template_is_rendered_in_a_sandbox() -> None:
    plain = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if think %}?{% endif %}"
    messages = read_messages(
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
            }
        ]
    )
    assert texts(plain).render(messages, {"think": True, "bos_token": "x"}) == "<s>[user]hi?"
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages | nonsense }}",
        "{% if %}",
        "{{ none.x.y }}",
        "{{ [1] | map('nonsense') | list }}",
        "{{ raise_exception('a\nb') }}",
        "{{ '\\ud800' }}",
        "{{ messages[0].content * 9999999 }}",
        None,
    ):
        with pytest.raises(CallRefusal) as refused:
            texts(template).render(messages, {})
        assert (refused.value.status, refused.value.detail.count("\n")) == (400, 0)
    assert texts(max_position_embeddings=128).context_max == 128
    assert texts(text_config={"max_position_embeddings": 64}).context_max == 64
    assert texts().context_max is None
    with pytest.raises(OperatorFault, match="tokenizer cannot be read"):
        GatewayTokenizer({"tokenizer.json": b"{}"})


def test_a_template_that_is_no_text_is_a_fault_of_chat_only() -> None:
    files = {
        "tokenizer.json": bytes_tokenizer().to_str().encode(),
        "chat_template.jinja": b"\xff{{ messages }}",
    }
    made = GatewayTokenizer(files)
    assert made.encode("a", special=False)
    with pytest.raises(CallRefusal, match="chat template"):
        made.render(read_messages([{"role": "user", "content": "x"}]), {})


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
    assert (ask.temperature, ask.choices, ask.max_new_tokens, ask.logprobs) == (0.0, 1, None, True)


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


class Untouched:
    """A tokenizer that must not be asked."""

    def encode_batch(self, texts: list[str], **options: Any) -> list[Any]:
        raise AssertionError((texts, options))


def with_words(**changes: Any) -> GatewayTokenizer:
    """Tokens of up to four bytes, and a context of eight."""
    document = json.loads(bytes_tokenizer().to_str())
    document["model"]["vocab"] |= {"ab": 256, "abab": 257}
    document["model"]["merges"] = [["a", "b"], ["ab", "ab"]]
    files = {
        "tokenizer.json": json.dumps({**document, **changes}).encode(),
        "config.json": b'{"max_position_embeddings": 8}',
    }
    return GatewayTokenizer(files)


def test_a_text_that_cannot_fit_is_refused_by_its_bytes() -> None:
    made = with_words()
    assert len(made.encode("abab" * 8, special=False, tokens_max=99)) == 8
    made.tokenizer = Untouched()  # type: ignore[assignment]
    for text, tokens_max in (("abab" * 8 + "a", 99), ("é" * 17, 99), ("abab" * 2 + "a", 2)):
        with pytest.raises(CallRefusal, match="maximum context length") as refused:
            made.encode(text, special=False, tokens_max=tokens_max)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFC"}},
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "added_tokens": [
                {"id": 258, "content": "<m>", "single_word": False, "lstrip": True,
                 "rstrip": False, "normalized": False, "special": True}
            ]
        },
    ],
    ids=["changed", "cut off", "dropped", "swallowed"],
)  # fmt: skip
def test_where_a_token_may_stand_for_more_bytes_all_text_is_tokenized(
    changes: dict[str, Any],
) -> None:
    with_words(**changes).encode(" " * 1000, special=False, tokens_max=8)
