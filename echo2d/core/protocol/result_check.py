"""Checks the output that a worker sends, before it is used (I2, I7).

    tokens    at least 1 and at most the limit, each with 0 <= id < vocab_size
    logprobs  one per token, between LOGPROB_MIN and LOGPROB_MAX
    end       as an engine ends an answer (`answer_end`), and as the message says
    spans     cover [0, len) without gaps; their versions never decrease, and each is published, not
              revoked, and acknowledged by this worker
    columns   within their limits, with the numbers of each token (`columns`); experts that a router can choose

A result that continues a partial is checked together with the partial, because both are one
trajectory. Of a progress message only positions and versions are checked at once. The rest of it is
checked when another worker should continue from its tokens. Not here: whose lease it is, repeats,
and staleness.
"""

from collections.abc import Callable, Collection

import numpy as np

from echo2d.core.base.ids import Version
from echo2d.core.base.model_config import ExpertNumbers
from echo2d.core.protocol.answer_end import OutputLimit, end_fault
from echo2d.core.protocol.columns import columns_fault
from echo2d.core.protocol.control_messages import (
    SampleDelta,
    SampleFinished,
    VersionKey,
    VersionSpan,
)
from echo2d.core.protocol.experts import expert_fault
from echo2d.core.protocol.trajectory import NOTHING, Partial, unpack_logprobs, unpack_tokens
from echo2d.errors import PeerFault

LOGPROB_MAX = 1e-4  # a logprob of 0 may be rounded up
# exp(-50) is 2e-22: no engine ever draws a token as unlikely as that. Without this limit an invented
# logprob could give a token any weight in training.
LOGPROB_MIN = -50.0

# Whether a version is published, not revoked, and acknowledged by this worker.
Believed = Callable[[VersionKey], bool]


def result_fault(
    result: SampleFinished,
    *,
    vocab_size: int,
    limit: OutputLimit,
    stop_token_ids: Collection[int],
    believed: Believed,
    base: Partial = NOTHING,
    stop_strings: bool = False,
    experts: ExpertNumbers | None = None,
) -> str:
    """Return what is wrong with a result, or "" if nothing is.

    limit: the limit of the whole answer. base: the partial that the result continues. experts: of a run that keeps
    them.
    """
    fault = content_fault(result.tokens, result.logprobs, vocab_size, limit.tokens - base.length)
    if fault:
        return fault
    tokens = unpack_tokens(result.tokens).tolist()
    fault = end_fault(
        tokens,
        result.finish,
        before=base.length,
        limit=limit,
        stop_token_ids=stop_token_ids,
        stop_strings=stop_strings,
    ) or span_fault(result.spans, 0, len(tokens), base.version_last, believed)
    if fault or not result.columns:
        return fault
    return columns_fault(result.columns, len(tokens)) or expert_fault(result.columns, experts)


def delta_fault(
    delta: SampleDelta, before: Partial, *, room: int, oldest: Version, believed: Believed
) -> str:
    """Return what is wrong with the positions and versions of output that follows `before`, or ""
    if nothing is.

    room: the most tokens that `before` and the new output may have together.
    """
    start, count = len(before.tokens) // 4, len(delta.tokens) // 4
    if len(delta.tokens) != len(delta.logprobs) or len(delta.tokens) % 4:
        return "tokens and logprobs that do not fit together"
    if start + count > room:
        return f"{start + count} tokens; at most {room} are allowed"
    oldest = max(oldest, before.version_last)
    fault = span_fault(delta.spans, start, start + count, oldest, believed)
    return columns_fault(delta.columns, count) if delta.columns and not fault else fault


def partial_fault(
    partial: Partial,
    *,
    vocab_size: int,
    stop_token_ids: Collection[int],
    experts: ExpertNumbers | None = None,
) -> str:
    """Return what is wrong with the tokens of a partial that another worker should continue, or ""
    if nothing is.

    Their positions and versions were checked before. A partial cannot be continued after a stop
    token.
    """
    fault = content_fault(partial.tokens, partial.logprobs, vocab_size, partial.length)
    ended = not fault and not set(stop_token_ids).isdisjoint(unpack_tokens(partial.tokens).tolist())
    fault = fault or expert_fault(partial.columns, experts)
    return "a stop token in the middle" if ended else fault


def content_fault(packed_tokens: bytes, packed_logprobs: bytes, vocab_size: int, room: int) -> str:
    """Return what is wrong with tokens (at most `room`) and their logprobs, or "" if nothing is."""
    try:
        tokens, logprobs = unpack_tokens(packed_tokens), unpack_logprobs(packed_logprobs)
    except PeerFault as fault:
        return str(fault)
    if not 0 < len(tokens) <= room:
        return f"{len(tokens)} tokens; 1 to {room} are allowed"
    # As unsigned numbers, negative ids are the largest.
    if int(tokens.view(np.uint32).max()) >= vocab_size:
        return f"token ids beyond the vocabulary of {vocab_size}"
    if len(logprobs) != len(tokens):
        return f"{len(logprobs)} logprobs for {len(tokens)} tokens"
    # NaN fails this comparison too.
    if not LOGPROB_MIN <= float(logprobs.min()) <= float(logprobs.max()) <= LOGPROB_MAX:
        return f"a logprob that is not between {LOGPROB_MIN:.0f} and 0"
    return ""


def span_fault(
    spans: tuple[VersionSpan, ...], start: int, end: int, oldest: Version, believed: Believed
) -> str:
    """Return what is wrong with the spans of tokens [start, end), or "" if nothing is.

    oldest: no version may be older than this one.
    """
    at, version = start, oldest
    for span in spans:
        if span.start != at or span.end <= span.start:
            return "spans are not contiguous"
        if span.version < version:
            return "span versions decrease"
        if not believed(span.key):
            return (
                f"version {span.version} is not published, revoked, "
                "or not acknowledged by this worker"
            )
        at, version = span.end, span.version
    return "" if at == end else f"spans cover {at - start} of {end - start} tokens"
