"""Tokenizes a rendered conversation so that no message can forge a control token.

    messages --template--> whole text --> the template's own pieces | texts of messages
                                              with control tokens   |  as plain text

A message is a stranger's text: a tool's output may contain "<|im_end|>". The template's own "<|im_end|>"
becomes a control token; an "<|im_end|>" in a message becomes ordinary tokens. If no message holds the text of a
control token, the whole is tokenized in one piece, as in every other program. In a tool's output, words of the
template's frame such as "</tool_response>" are plain text too.
Not here: rendering, and the order of messages.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from echo2d.texts.model_texts import ModelTexts, UnusableText

# Most cuts in a piece. A tool's output with more texts of control tokens would take seconds.
CUTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class RenderedPiece:
    """A piece of a rendered text."""

    text: str
    # Texts of tokens; in this piece they must not become these tokens.
    words: frozenset[str] = frozenset()


def rendered_pieces(
    texts: ModelTexts, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[RenderedPiece]:
    """The rendered text, in pieces of the template and pieces of messages.

    messages: from `for_template`. UnusableText: the template fails, or it changes a text that must
    stay plain.
    """
    whole = texts.render(messages, options)
    try:
        kept = _Marks(texts, whole)
        marked, marked_options = [kept.of_message(each) for each in messages], kept.of(options)
    except RecursionError as error:
        raise UnusableText("messages", "arguments or tools are nested too deeply") from error
    if not kept.plain:
        return [RenderedPiece(whole)]
    found = list(kept.split(texts.render(marked, marked_options)))
    if "".join(piece.text for piece in found) != whole:
        raise UnusableText(
            "messages",
            "a message holds the text of a control token, and the chat template changes that "
            "message, so it cannot be distinguished from the template's own tokens",
            "control_token",
        )
    return found


def encode_pieces(
    texts: ModelTexts, pieces: Iterable[RenderedPiece], *, tokens_max: int | None = None
) -> list[int]:
    """The token ids of the pieces. UnusableText: too long, or a control token cannot be kept out of a message."""
    parts = [(part, piece.words) for piece in pieces for part in _apart(piece)]
    encoded = texts.encode_each([part for part, _ in parts], special=False, tokens_max=tokens_max)
    for (_, words), ids in zip(parts, encoded, strict=True):
        if words and any(texts.added.get(token) in words for token in ids):
            raise UnusableText(
                "messages",
                "a message holds the text of a control token, and this tokenizer has no other "
                "tokens for it",
                "control_token",
            )
    return list(chain.from_iterable(encoded))


def encode_prompt(
    texts: ModelTexts,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    tokens_max: int | None = None,
) -> list[int]:
    """The prompt of a conversation, up to the beginning of the answer. UnusableText: see the functions above."""
    pieces = rendered_pieces(texts, for_template(messages), options)
    return encode_pieces(texts, pieces, tokens_max=tokens_max)


def for_template(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form that templates read: the arguments of tool calls are objects, not JSON."""
    return [
        {**message, "tool_calls": [_with_arguments(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _apart(piece: RenderedPiece) -> list[str]:
    """The piece's text, cut inside each text of a control token, so that none becomes that token."""
    if not piece.words:
        return [piece.text]
    anywhere, cuts = re.compile(_any_of(piece.words)), [0]
    while found := anywhere.search(piece.text, cuts[-1]):
        cuts.append(found.start() + 1)
        if len(cuts) > CUTS_MAX:
            detail = f"a message holds more than {CUTS_MAX} texts of control tokens"
            raise UnusableText("messages", detail, "control_token")
    cuts.append(len(piece.text))
    return [piece.text[start:end] for start, end in pairwise(cuts) if start < end]


def _any_of(words: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


class _Marks:
    """Replaces the texts of messages that must stay plain by marks.

    whole: the rendered text, in which no mark occurs. UnusableText: it contains all characters that a
    mark may begin with.
    """

    def __init__(self, texts: ModelTexts, whole: str) -> None:
        self._control = frozenset(texts.added[token] for token in texts.special)
        # Tokens for runs of spaces, which some tokenizers have, control nothing.
        self._all = frozenset(word for word in texts.added.values() if word.strip())
        self._whole = whole
        self.plain: dict[str, RenderedPiece] = {}

    @cached_property
    def _opening(self) -> str:
        # Private characters of Unicode have no meaning for a template.
        private = set(map(chr, range(0xE000, 0xF8FF))).difference(self._whole)
        if not private:
            raise UnusableText("messages", "all private characters of Unicode occur")
        return min(private)

    def of_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        words = self._all if message.get("role") == "tool" else self._control
        return {key: self._marked(value, words) for key, value in message.items()}

    def of(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The template's further variables, because strangers also write the descriptions of tools."""
        return {key: self._marked(value, self._control) for key, value in options.items()}

    def _marked(self, value: Any, words: frozenset[str]) -> Any:
        match value:
            case str():
                # Templates strip contents, so the spaces around them must stay outside the mark.
                inner = value.strip()
                if not any(word in inner for word in words):
                    return value
                mark = f"{self._opening}{len(self.plain)}{self._opening}"
                self.plain[mark] = RenderedPiece(inner, words)
                before, _, after = value.partition(inner)
                return before + mark + after
            case Mapping():
                return {
                    self._marked(key, words): self._marked(each, words)
                    for key, each in value.items()
                }
            case list() | tuple():
                return [self._marked(each, words) for each in value]
            case _:
                return value

    def split(self, marked: str) -> Iterator[RenderedPiece]:
        """The pieces of the whole text, by the marks in the text that was rendered with them."""
        place = 0
        for text in re.split(f"({self._opening}[0-9]+{self._opening})", marked):
            piece = self.plain.get(text, RenderedPiece(text))
            if not self._whole.startswith(piece.text, place):
                # Within JSON, quotation marks and ends of lines are escaped.
                escaped = json.dumps(piece.text, ensure_ascii=False)[1:-1]
                piece = RenderedPiece(escaped, piece.words)
            place += len(piece.text)
            yield piece
