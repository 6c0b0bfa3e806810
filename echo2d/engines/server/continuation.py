"""Follows the output of one request as it streams in: which tokens are new, and which version wrote
each. Pure.

A sample's output is made by one request, or by several when refits cut it; each is one
`Continuation`. Only the last chunk of a request says for certain which version wrote which token
(`StreamChunk.spans`). A token is given out earlier only while it is *certain*: the request began under the
version being served, and no update was asked for since, so no other version can have written it. All other
tokens are held until the last chunk, whose spans must also confirm what was given out before (I2).

A stream may be cumulative or incremental: `StreamChunk.end` is the position at which a chunk ends.
An aborted request may repeat tokens inconsistently; these are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo2d.core.protocol.columns import Columns, cut_columns
from echo2d.core.worker.events import LabelSpan
from echo2d.engines.base import FinishReason
from echo2d.errors import EngineFault


class Foreign(EngineFault):
    """A version that this engine did not load wrote tokens."""


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """One chunk of a request's stream, in the same form for every server."""

    # Ids and logprobs (natural log) of the output tokens before `end`; None: they are not consistent.
    tokens: Sequence[tuple[int, float]] | None
    end: int  # output tokens of the request so far
    finish: FinishReason | None = None  # only in the last chunk
    label: str | None = None  # label of the version that the chunk names; None: it names none
    # Only the last chunk has spans; positions count from the request's first output token. None: the server
    # does not say which version wrote the tokens.
    spans: Sequence[LabelSpan] | None = None
    cached_tokens: int = 0  # tokens of the prompt that were not computed again
    columns: Columns = ()  # only in the last chunk, of all output tokens of the request


@dataclass(frozen=True, slots=True)
class ReportedToken:
    token: int
    logprob: float
    label: str
    columns: Columns = ()


class Continuation:
    """The output of one request.

    whole: give out nothing before the last chunk, which has the tokens' columns. again: if that chunk lacks them, as
    that of a request that was cut while it waited, its tokens count as lost and are written again.
    """

    def __init__(self, label: str, *, whole: bool = False, again: bool = False) -> None:
        self.label = label  # label of the version served when the request was sent
        self.whole = whole
        self._again = again
        self.rewritten = False  # whether its tokens are to be written again
        self.finish: FinishReason | None = None  # None until the last chunk
        self.certain = True  # once a token was uncertain, all after it are too
        self.cached_tokens = 0
        self._given = 0
        self._held: list[tuple[int, float]] = []

    def take(self, chunk: StreamChunk, *, certain: bool) -> list[ReportedToken]:
        """Return the tokens that can be given out after this chunk.

        EngineFault: the chunk contradicts those before it, or (Foreign) another version wrote
        tokens.
        """
        self.finish = chunk.finish
        self.cached_tokens = chunk.cached_tokens or self.cached_tokens
        self._held += self._fresh(chunk)
        if self.finish is not None:
            return self._settle(chunk.spans, chunk.columns)
        self.certain &= certain and chunk.label in (None, self.label)
        if self.holds or not self._held:
            return []
        return self._give([(len(self._held), self.label)])

    @property
    def holds(self) -> bool:
        """Whether tokens are held until the last chunk."""
        return self.whole or not self.certain

    @property
    def begun(self) -> bool:
        """Whether the server has written a token."""
        return bool(self._given or self._held)

    def _fresh(self, chunk: StreamChunk) -> Sequence[tuple[int, float]]:
        """The tokens of a chunk that no earlier chunk had."""
        known = self._given + len(self._held)
        begin = chunk.end - len(chunk.tokens or ())
        if chunk.tokens is None or not 0 <= begin <= known:
            if self.finish == "abort":
                return []
            found = "inconsistent" if chunk.tokens is None else len(chunk.tokens)
            raise EngineFault(f"the server's {found} tokens end at {chunk.end}; {known} were known")
        fresh = chunk.tokens[known - begin :]
        if not all(math.isfinite(logprob) for _, logprob in fresh):
            raise EngineFault("the server reported a logprob that is not finite")
        return fresh

    def _settle(self, spans: Sequence[LabelSpan] | None, columns: Columns) -> list[ReportedToken]:
        """Take the last chunk's spans and columns. An aborted request without spans loses its held tokens."""
        cut = self.finish == "abort"
        if spans is None or (cut and self._again and not columns):
            if not cut:
                raise EngineFault("the server did not say which version wrote a request's tokens")
            self.rewritten = spans is not None
            self._held = []
            return []
        end, runs = 0, []
        for span in spans:
            if span.start != end or span.end < end:
                raise EngineFault(
                    f"the server reported versions that do not follow each other: {spans}"[:200]
                )
            end = span.end
            if span.start < self._given and span.end > 0 and span.label != self.label:
                raise Foreign(
                    f"version {span.label!r} wrote tokens of {self.label}: another program updates the server"
                )
            runs.append((end - self._given, span.label))
        if end < self._given:
            raise EngineFault(f"the server named versions for {end} of {self._given} tokens")
        self._held = self._held[: end - self._given]
        return self._give(runs, columns)

    def _give(self, runs: Sequence[tuple[int, str]], columns: Columns = ()) -> list[ReportedToken]:
        """Give out held tokens. runs: (end, label): held tokens up to `end` have this label."""
        given: list[ReportedToken] = []
        for end, label in runs:
            for token, logprob in self._held[len(given) : max(0, end)]:
                place = self._given + len(given)
                own = cut_columns(columns, place, place + 1) if columns else ()
                given.append(ReportedToken(token, logprob, label, own))
        self._given += len(given)
        self._held = self._held[len(given) :]
        return given

    def check(self) -> None:
        assert self._given >= 0
        assert self.finish is None or not self._held
