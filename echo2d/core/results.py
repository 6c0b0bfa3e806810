"""Whether a worker's result may be believed: the rule of SYSTEM.md section 8, exactly.

    0 <= token < vocab, at least one and at most max_new_tokens of them; one finite logprob <= LOGPROB_MAX per token;
    spans contiguous over exactly [0, len), versions non-decreasing, each published, unrevoked, and acknowledged by
    this worker

Not here: whose lease it is, repeats, and staleness.
"""

from collections.abc import Callable

import numpy as np

from echo2d.core.messages import SampleFinished, Span, VersionKey
from echo2d.core.trajectory import unpack_logprobs, unpack_tokens
from echo2d.errors import PeerFault

LOGPROB_MAX = 1e-4  # rounding above log 1


def result_fault(
    result: SampleFinished, *, vocab_size: int, max_new_tokens: int, believed: Callable[[VersionKey], bool]
) -> str:
    """What is wrong with the result; empty when nothing is. believed: published, unrevoked, acknowledged."""
    try:
        tokens, logprobs = unpack_tokens(result.tokens), unpack_logprobs(result.logprobs)
    except PeerFault as fault:
        return str(fault)
    if not 0 < len(tokens) <= max_new_tokens:
        return f"{len(tokens)} tokens; 1 to {max_new_tokens} are allowed"
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        return f"token ids beyond the vocabulary of {vocab_size}"
    if len(logprobs) != len(tokens):
        return f"{len(logprobs)} logprobs for {len(tokens)} tokens"
    if not np.isfinite(logprobs).all() or float(logprobs.max()) > LOGPROB_MAX:
        return "a logprob that is no logarithm of a probability"
    return span_fault(result.spans, len(tokens), believed)


def span_fault(spans: tuple[Span, ...], length: int, believed: Callable[[VersionKey], bool]) -> str:
    """What is wrong with the spans of `length` > 0 tokens; empty when nothing is."""
    end, version = 0, 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            return "spans are not contiguous"
        if span.version < version:
            return "span versions decrease"
        if not believed(span.key):
            return f"version {span.version} is not published, revoked, or not acknowledged by this worker"
        end, version = span.end, span.version
    return "" if end == length else f"spans cover {end} of {length} tokens"
