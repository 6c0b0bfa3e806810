"""Turns the growing output of one choice into text: no half characters, no part of a stop text.

The work for each token does not depend on how many came before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from echo2d.texts.model_texts import ModelTexts

UNREADABLE_TOKENS_MAX = (
    8  # held back at most: a character has four bytes, so what is no text by then never will be
)


class TextStream:
    """Tokens to text.

    A token may read differently after others, so the last ones before it are decoded again.
    """

    def __init__(self, texts: ModelTexts, *, special: bool) -> None:
        self._texts = texts
        self._silent = frozenset() if special else texts.special
        self._ids: list[int] = []  # those told last, and those not told yet
        self._told = 0  # how many of these were,
        self._before = ""  # and how they read

    def put(self, token: int) -> str:
        """The text that has become readable."""
        if token in self._silent:
            return ""
        self._ids.append(token)
        text = self._texts.decode(self._ids)
        unreadable = len(text) <= len(self._before) or text.endswith("\ufffd")
        if unreadable and len(self._ids) - self._told < UNREADABLE_TOKENS_MAX:
            return ""
        piece = text[len(self._before) :]
        self._ids = self._ids[self._told :]
        self._told, self._before = len(self._ids), self._texts.decode(self._ids)
        return piece

    def end(self) -> str:
        """The rest, which is half a character."""
        return self._texts.decode(self._ids)[len(self._before) :]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that has become readable.

    tokens: how many of the tokens put in belong to the choice. stopped: a stop text has come.
    """

    text: str
    tokens: int
    stopped: bool


class Detokenizer:
    """See the module docstring. stops: texts that end the output, and do not belong to it."""

    def __init__(self, texts: ModelTexts, stops: Sequence[str], *, special: bool) -> None:
        self._stream = TextStream(texts, special=special)
        self._stops = stops
        self._hold = (
            max(map(len, stops), default=1) - 1
        )  # characters that may be the beginning of a stop
        self._held = ""  # not handed out yet

    def put(self, tokens: Sequence[int]) -> TextPiece:
        told: list[str] = []
        for count, token in enumerate(tokens, 1):
            self._held += self._stream.put(token)
            if (at := self._stop_at()) is not None:
                return TextPiece("".join([*told, self._held[:at]]), count, stopped=True)
            told.append(self._take(len(self._held) - self._hold))
        told.append(self._take(len(self._held) - self._held_back()))
        return TextPiece("".join(told), len(tokens), stopped=False)

    def end(self) -> str:
        """The rest, which looked like the beginning of a stop, or is half a character."""
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
