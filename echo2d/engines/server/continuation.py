"""One request to the server while its output streams in: which tokens, and which version wrote each. Pure.

A sample's output is made by one request, or by several when refits cut it: a *piece* each. A server names versions
only in the last chunk of a request (`weight_versions`); chunks before it carry a label that the HTTP process made up
when it passed them on. So a token is given out at once only while it is *certain*: the piece began under the version
served, and no update was asked for since, so no other version can have written it. All others are held until the last
chunk, whose spans also must bear out what was given out before (I2).

Streams are cumulative or incremental, by the server's flags; `completion_tokens` says where a chunk ends. A request
that ends in the queue repeats its last token, alone or behind others: what does not add up in an aborted one is left
out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo2d.engines.base import FinishReason
from echo2d.errors import EngineFault

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Foreign(EngineFault):
    """Another version than this engine loaded wrote tokens."""


@dataclass(frozen=True, slots=True)
class ReportedToken:
    token: int
    logprob: float
    label: str


class Continuation:
    """`label`: the version served when the request was sent. `finish`: None until the last chunk."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.finish: FinishReason | None = None
        self.certain = True  # so far; what comes after something uncertain is uncertain too
        self.cached_tokens = 0  # of the prompt, not computed again
        self._given = 0
        self._held: list[tuple[int, float]] = []

    def take(self, chunk: Mapping[str, Any], *, certain: bool) -> list[ReportedToken]:
        """What can be given out after this chunk. EngineFault: it makes no sense, or another version wrote tokens."""
        try:
            return self._take(chunk, certain=certain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineFault(
                f"SGLang streamed what is no output: {type(error).__name__} {error}"
            ) from error

    def _take(self, chunk: Mapping[str, Any], *, certain: bool) -> list[ReportedToken]:
        if "error" in chunk:
            raise EngineFault(f"SGLang ended a request: {error_text(chunk)}")
        meta = chunk["meta_info"]
        self.finish = _finish(meta.get("finish_reason"))
        self.cached_tokens = meta.get("cached_tokens") or self.cached_tokens
        self._held += self._fresh(chunk["output_ids"], meta)
        if self.finish is not None:
            return self._settle(meta.get("weight_versions"))
        self.certain &= certain and meta.get("weight_version", self.label) == self.label
        if not self.certain or not self._held:
            return []
        return self._give([(len(self._held), self.label)])

    def _fresh(self, ids: Sequence[int], meta: Mapping[str, Any]) -> list[tuple[int, float]]:
        """The tokens of a chunk that were not there before."""
        entries = meta.get("output_token_logprobs") or []
        known, end = self._given + len(self._held), meta.get("completion_tokens", len(ids))
        begin = end - len(ids)
        whole = len(entries) == len(ids) and all(
            entry[1] == each for entry, each in zip(entries, ids, strict=True)
        )
        if not (whole and 0 <= begin <= known):
            if self.finish == "abort":
                return []
            raise EngineFault(
                f"SGLang streamed {len(ids)} tokens up to {end} after {known}, {len(entries)} logprobs"
            )
        fresh = [(int(entry[1]), float(entry[0])) for entry in entries[known - begin :]]
        if not all(math.isfinite(logprob) for _, logprob in fresh):
            raise EngineFault("SGLang reported a logprob that is not finite")
        return fresh

    def _settle(self, spans: Sequence[Mapping[str, Any]] | None) -> list[ReportedToken]:
        """The last chunk: the server's own word on who wrote what. Without it, what is held is nobody's."""
        if spans is None:
            if self.finish != "abort":
                raise EngineFault("SGLang did not say which version wrote a request's tokens")
            self._held = []
            return []
        end, runs = 0, []
        for span in spans:
            if span["start"] != end or span["end"] < end:
                raise EngineFault(
                    f"SGLang reported versions that do not follow each other: {spans}"[:200]
                )
            end = span["end"]
            if span["start"] < self._given and span["end"] > 0 and span["version"] != self.label:
                raise Foreign(
                    f"version {span['version']!r} wrote tokens of {self.label}: somebody else updates it"
                )
            runs.append((end - self._given, str(span["version"])))
        if end < self._given:
            raise EngineFault(f"SGLang says who wrote {end} tokens of {self._given}")
        self._held = self._held[: end - self._given]
        return self._give(runs)

    def _give(self, runs: Sequence[tuple[int, str]]) -> list[ReportedToken]:
        """Everything held; runs: up to which of them, and under which label."""
        given: list[ReportedToken] = []
        for end, label in runs:
            given += [
                ReportedToken(token, logprob, label)
                for token, logprob in self._held[len(given) : max(0, end)]
            ]
        self._given += len(given)
        self._held = self._held[len(given) :]
        return given

    def check(self) -> None:
        assert self._given >= 0
        assert self.finish is None or not self._held


def error_text(body: object) -> str:
    """Of either shape in which SGLang says what is wrong."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]


def _finish(reason: Mapping[str, Any] | None) -> FinishReason | None:
    if reason is None:
        return None
    if reason["type"] == "abort" and (reason.get("status_code") or 0) >= 400:
        raise EngineFault(f"SGLang gave a request up: {error_text(reason.get('message'))}")
    return _FINISHES[reason["type"]]
