"""How an answer ends: engines follow these rules, and the coordinator checks that they did.

    stop         with its first stop token, which is its last token
    length       without a stop token, at the most tokens that its lease allows
    context      without a stop token, where prompt and answer fill the model's context. Leases allow
                 no more tokens than fit, so a worker calls this "length"
    stop_string  with the token that completes one of the lease's stop strings. The coordinator has no
                 text, so the task's process checks this before it scores the answer

The stop tokens are those of the lease alone. The coordinator puts the model's own end tokens into
each lease, and an engine adds none.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

from echo2d.core.protocol.control_messages import Finish

# An answer that ends like this is not cut off.
WHOLE_ENDS = ("stop", "stop_string")
# Leases leave this many tokens of the model's context free: SGLang cannot fill the last ones.
CONTEXT_SPARE = 8


class OutputLimit(NamedTuple):
    """The most tokens that an answer may have, and how an answer of this length ends."""

    tokens: int
    finish: Finish


# This is called for every lease and every result, mostly with the same few arguments.
@lru_cache(maxsize=4096)
def output_limit(
    max_new_tokens: int, *, prompt_tokens: int, context_max: int | None
) -> OutputLimit:
    """The limit of an answer to a prompt of this length.

    context_max: tokens of prompt and answer together that the model can read; None: not known.
    """
    if context_max is None or prompt_tokens + max_new_tokens <= context_max:
        return OutputLimit(max_new_tokens, "length")
    return OutputLimit(context_max - prompt_tokens, "context")


def end_fault(
    tokens: Sequence[int],
    finish: Finish,
    *,
    before: int,
    limit: OutputLimit,
    stop_token_ids: Collection[int],
    stop_strings: bool = False,
) -> str:
    """Return what is wrong with the end of an answer, or "" if an engine may have ended it.

    tokens: the answer's tokens after its first `before` ones, at least one. None of the first
    `before` tokens is a stop token. stop_strings: whether the lease has stop strings.
    """
    if not set(stop_token_ids).isdisjoint(tokens[:-1]):
        return "tokens after a stop token"
    stopped, length = tokens[-1] in stop_token_ids, before + len(tokens)
    if length > limit.tokens:
        return f"{length} tokens; at most {limit.tokens} are allowed"
    if stop_strings and finish == "stop_string" and not stopped:
        return ""
    if not stopped and length != limit.tokens:
        return f"it ends after {length} tokens, without a stop token and not at {limit.tokens}"
    ended = "stop" if stopped else limit.finish
    agrees = finish == ended or (finish == "length" and ended == "context")
    return "" if agrees else f"finish {finish!r}, but it ended with {ended!r}"
