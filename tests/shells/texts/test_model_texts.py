"""Text to tokens and back, and chat templates."""

import json
from typing import Any

import pytest

from echo2d.errors import OperatorFault
from echo2d.net.gateway.requests import read_messages
from echo2d.texts.model_texts import ModelTexts, UnusableText
from tests.support.texts import bytes_tokenizer, texts


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
    assert texts(plain).render(messages, {"think": True}) == "<s>[user]hi?"
    assert texts(plain).render(messages, {"bos_token": "x"}) == "x[user]hi"
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
        with pytest.raises(UnusableText) as refused:
            texts(template).render(messages, {})
        assert "\n" not in refused.value.detail
    assert texts(max_position_embeddings=128).context_max == 128
    assert texts(text_config={"max_position_embeddings": 64}).context_max == 64
    assert texts().context_max is None
    with pytest.raises(OperatorFault, match="tokenizer cannot be read"):
        ModelTexts({"tokenizer.json": b"{}"})


def test_a_template_that_is_no_text_fails_only_chat() -> None:
    files = {
        "tokenizer.json": bytes_tokenizer().to_str().encode(),
        "chat_template.jinja": b"\xff{{ messages }}",
    }
    made = ModelTexts(files)
    assert made.encode("a", special=False)
    with pytest.raises(UnusableText, match="chat template"):
        made.render(read_messages([{"role": "user", "content": "x"}]), {})


class Untouched:
    """A tokenizer that must not be asked."""

    def encode_batch(self, texts: list[str], **options: Any) -> list[Any]:
        raise AssertionError((texts, options))


def with_words(**changes: Any) -> ModelTexts:
    """Tokens of up to four bytes, and a context of eight."""
    document = json.loads(bytes_tokenizer().to_str())
    document["model"]["vocab"] |= {"ab": 256, "abab": 257}
    document["model"]["merges"] = [["a", "b"], ["ab", "ab"]]
    files = {
        "tokenizer.json": json.dumps({**document, **changes}).encode(),
        "config.json": b'{"max_position_embeddings": 8}',
    }
    return ModelTexts(files)


def test_a_text_that_cannot_fit_is_refused_by_its_bytes() -> None:
    made = with_words()
    assert len(made.encode("abab" * 8, special=False, tokens_max=99)) == 8
    made.tokenizer = Untouched()  # type: ignore[assignment]
    for text, tokens_max in (("abab" * 8 + "a", 99), ("é" * 17, 99), ("abab" * 2 + "a", 2)):
        with pytest.raises(UnusableText, match="maximum context length") as refused:
            made.encode(text, special=False, tokens_max=tokens_max)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "added_tokens": [
                {"id": 258, "content": "<m>", "single_word": False, "lstrip": True,
                 "rstrip": False, "normalized": False, "special": True}
            ]
        },
    ],
    ids=["changed", "dropped", "swallowed"],
)  # fmt: skip
def test_all_text_is_tokenized_if_a_token_may_cover_more_bytes(
    changes: dict[str, Any],
) -> None:
    with_words(**changes).encode(" " * 1000, special=False, tokens_max=8)
