"""The events and actions of the gateway's calls.

A *call* is one waiting HTTP request for text; it has one or more *choices*, each of them one sample
of its prompt. Every CallAsked is answered by ChoiceGrew until each choice has finished, or by one
CallRefused that ends it; after CallGone by nothing. Nothing of it is durable. Not here: HTTP, and
which call gets a slot (`call_work`).
"""

from dataclasses import dataclass
from typing import Literal, NewType

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import Note, Send
from echo2d.core.protocol.control_messages import Finish, VersionSpan
from echo2d.core.protocol.sampling import Sampling

# One for each call, never reused within a process.
CallId = NewType("CallId", int)

RefusedCode = Literal["busy", "version", "late", "failed", "revoked", "stopping"]


# --- events


@dataclass(frozen=True, slots=True)
class CallAsked:
    """A caller wants `choices` samples of this prompt (int32).

    min_version: the oldest version that may write a token; max_version: the newest one that may,
    if the caller cares. caller: slots are shared fairly between callers.
    session: calls of one session go to the same worker while it has a free slot, because of its
    cache.
    """

    call: CallId
    caller: str
    prompt: bytes
    choices: int
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    rng_seed: int | None
    min_version: Version
    session: str
    max_version: Version | None = None


@dataclass(frozen=True, slots=True)
class ChoiceStopped:
    """The caller has all that it wants of this choice: a stop text has come."""

    call: CallId
    choice: int


@dataclass(frozen=True, slots=True)
class CallGone:
    """The caller hung up, or does not read what it is sent; it must not be answered any more."""

    call: CallId
    how: Literal["gone", "slow"] = "gone"


CallEvent = CallAsked | ChoiceStopped | CallGone


# --- actions


@dataclass(frozen=True, slots=True)
class ChoiceGrew:
    """New tokens (int32) of a choice with their logprobs (float32).

    spans: of all its tokens so far. finish: why the choice is whole; with "stop" its last token is
    the end token.
    """

    call: CallId
    choice: int
    tokens: bytes
    logprobs: bytes
    spans: tuple[VersionSpan, ...]
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class CallRefused:
    """The call ends for this reason, whatever it was told before.

    version: the newest one that a worker serves now; None: none.
    """

    call: CallId
    code: RefusedCode
    detail: str
    version: Version | None


CallAction = ChoiceGrew | CallRefused
GatewayAction = CallAction | Send | Note
