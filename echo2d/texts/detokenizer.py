"""Turns the growing output of one choice into text: no half characters, no part of a stop text.

The work for each token does not depend on how many came before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from echo2d.texts.model_texts import ModelTexts

# Most tokens held back. A character has at most four bytes, so tokens that are still not text will never be.
UNREADABLE_TOKENS_MAX = 8


class TextStream:
    """Tokens to text.

    The text of a token may depend on the tokens before it, so the last ones are decoded again with it.
    """

    def __init__(self, texts: ModelTexts, *, special: bool) -> None:
        self._texts = texts
        self._silent = frozenset() if special else texts.special
        self._ids: list[int] = []  # the tokens returned last, and those not returned yet
        self._returned = 0  # how many of these were returned
        self._before = ""  # the text of these

    def put(self, token: int) -> str:
        """Take a token. Returns the text that has become readable."""
        if token in self._silent:
            return ""
        self._ids.append(token)
        text = self._texts.decode(self._ids)
        unreadable = len(text) <= len(self._before) or text.endswith("\ufffd")
        if unreadable and len(self._ids) - self._returned < UNREADABLE_TOKENS_MAX:
            return ""
        piece = text[len(self._before) :]
        self._ids = self._ids[self._returned :]
        self._returned, self._before = len(self._ids), self._texts.decode(self._ids)
        return piece

    def end(self) -> str:
        """The remaining text, which is part of a character."""
        return self._texts.decode(self._ids)[len(self._before) :]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that has become readable."""

    text: str
    tokens: int  # how many of the tokens put in belong to the choice
    stopped: bool  # a stop text was found


class Detokenizer:
    """See the module docstring. stops: texts that end the output and are not part of it."""

    def __init__(self, texts: ModelTexts, stops: Sequence[str], *, special: bool) -> None:
        self._stream = TextStream(texts, special=special)
        self._stops = stops
        # Most characters that may be the beginning of a stop.
        self._hold = max(map(len, stops), default=1) - 1
        self._held = ""  # text that is not returned yet

    def put(self, tokens: Sequence[int]) -> TextPiece:
        readable: list[str] = []
        for count, token in enumerate(tokens, 1):
            self._held += self._stream.put(token)
            if (at := self._stop_at()) is not None:
                return TextPiece("".join([*readable, self._held[:at]]), count, stopped=True)
            readable.append(self._take(len(self._held) - self._hold))
        readable.append(self._take(len(self._held) - self._held_back()))
        return TextPiece("".join(readable), len(tokens), stopped=False)

    def end(self) -> str:
        """The remaining text, which looked like the beginning of a stop, or is part of a character."""
        self._held += self._stream.end()
        at = self._stop_at()
        return self._take(len(self._held) if at is None else at)

    def _stop_at(self) -> int | None:
        """Where the first stop begins."""
        places = (self._held.find(stop) for stop in self._stops)
        return min((place for place in places if place >= 0), default=None)

    def _held_back(self) -> int:
        """How many characters at the end may be the beginning of a stop."""
        ends = range(min(self._hold, len(self._held)), 0, -1)
        return next(
            (n for n in ends if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0
        )

    def _take(self, end: int) -> str:
        text, self._held = self._held[: max(0, end)], self._held[max(0, end) :]
        return text
