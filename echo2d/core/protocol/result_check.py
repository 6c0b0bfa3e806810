"""Whether a worker's output may be believed: the checks behind (I2) and (I7).

    0 <= token < vocab, at least one and at most max_new_tokens of them; one finite logprob <= LOGPROB_MAX per token;
    spans contiguous over exactly [0, len), versions non-decreasing, each published, unrevoked, and acknowledged by
    this worker

A result that goes on from a partial is judged with it: together they are a trajectory. Of progress only the places
and versions are judged at once, the rest when somebody else is to go on from it.
Not here: whose lease it is, repeats, and staleness.
"""

import math
from collections.abc import Callable, Collection

import numpy as np

from echo2d.core.base.ids import Version
from echo2d.core.protocol.control_messages import (
    SampleDelta,
    SampleFinished,
    VersionKey,
    VersionSpan,
)
from echo2d.core.protocol.trajectory import NOTHING, Partial, unpack_logprobs, unpack_tokens
from echo2d.errors import PeerFault

LOGPROB_MAX = 1e-4  # rounding above log 1

Believed = Callable[[VersionKey], bool]  # published, unrevoked, acknowledged by this worker


def result_fault(
    result: SampleFinished,
    *,
    vocab_size: int,
    max_new_tokens: int,
    believed: Believed,
    base: Partial = NOTHING,
) -> str:
    """What is wrong with the result; empty when nothing is. base: what it goes on from."""
    room = max_new_tokens - base.length
    fault = content_fault(result.tokens, result.logprobs, vocab_size, room)
    return fault or span_fault(
        result.spans, 0, len(result.tokens) // 4, base.version_last, believed
    )


def delta_fault(
    delta: SampleDelta, before: Partial, *, room: int, oldest: Version, believed: Believed
) -> str:
    """What is wrong with the place and the versions of new output behind `before`, for both of which there is room."""
    start, count = before.length, len(delta.tokens) // 4
    if len(delta.tokens) != len(delta.logprobs) or len(delta.tokens) % 4:
        return "tokens and logprobs that do not fit together"
    if start + count > room:
        return f"{start + count} tokens; at most {room} are allowed"
    return span_fault(delta.spans, start, start + count, max(oldest, before.version_last), believed)


def partial_fault(partial: Partial, *, vocab_size: int, stop_token_ids: Collection[int]) -> str:
    """What is wrong with tokens of which places and versions were judged before; nobody goes on after a stop token."""
    fault = content_fault(partial.tokens, partial.logprobs, vocab_size, partial.length)
    ended = not fault and not set(stop_token_ids).isdisjoint(unpack_tokens(partial.tokens).tolist())
    return "a stop token in the middle" if ended else fault


def content_fault(packed_tokens: bytes, packed_logprobs: bytes, vocab_size: int, room: int) -> str:
    """What is wrong with tokens, of which at most `room` are allowed, and their logprobs."""
    try:
        tokens, logprobs = unpack_tokens(packed_tokens), unpack_logprobs(packed_logprobs)
    except PeerFault as fault:
        return str(fault)
    if not 0 < len(tokens) <= room:
        return f"{len(tokens)} tokens; 1 to {room} are allowed"
    if int(tokens.view(np.uint32).max()) >= vocab_size:  # negative ones are the largest
        return f"token ids beyond the vocabulary of {vocab_size}"
    if len(logprobs) != len(tokens):
        return f"{len(logprobs)} logprobs for {len(tokens)} tokens"
    if not -math.inf < float(logprobs.min()) <= float(logprobs.max()) <= LOGPROB_MAX:  # NaN is not
        return "a logprob that is no logarithm of a probability"
    return ""


def span_fault(
    spans: tuple[VersionSpan, ...], start: int, end: int, oldest: Version, believed: Believed
) -> str:
    """What is wrong with the spans of tokens [start, end), none older than `oldest`; empty when nothing is."""
    at, version = start, oldest
    for span in spans:
        if span.start != at or span.end <= span.start:
            return "spans are not contiguous"
        if span.version < version:
            return "span versions decrease"
        if not believed(span.key):
            return f"version {span.version} is not published, revoked, or not acknowledged by this worker"
        at, version = span.end, span.version
    return "" if at == end else f"spans cover {at - start} of {end - start} tokens"
