"""The events and actions of the gateway's calls.

A *call* is one waiting HTTP request for text. It has one or more *choices*, each of them one sample
of its prompt. Every CallAsked is answered by ChoiceGrew until each choice has finished, or by one
CallRefused, which ends it. After CallGone nothing more is answered. Nothing of a call is durable. Not
here: HTTP, and which call gets a slot (`call_work`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NewType

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import Note, Send
from echo2d.core.protocol.control_messages import Finish, VersionSpan
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.seeds import SEED_BITS

# The number of a call; it is never reused within a process.
CallId = NewType("CallId", int)

RefusedCode = Literal["busy", "version", "late", "failed", "revoked", "stopping"]


# --- events


@dataclass(frozen=True, slots=True)
class CallAsked:
    """A caller wants `choices` samples of this prompt (int32)."""

    call: CallId
    caller: str  # slots are shared fairly between callers
    prompt: bytes
    choices: int
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    rng_seed: int | None
    min_version: Version  # the oldest version that may write a token
    # Calls of one session go to the same worker while it has a free slot, because of its cache.
    session: str
    max_version: Version | None = None  # the newest version that may write a token; None: any
    # Whether its tokens are trained on: then they are audited, and each choice ends by a finish, which comes only when
    # its verdict is known. If the audit does not believe a choice, the call is refused.
    trained: bool = False

    def seeds(self, choices: Iterable[int]) -> tuple[int, ...]:
        """By which the tokens of these choices are drawn; none: the worker chooses."""
        if self.rng_seed is None:
            return ()
        return tuple((self.rng_seed + each) % (1 << SEED_BITS) for each in choices)


@dataclass(frozen=True, slots=True)
class ChoiceStopped:
    """The caller needs no more of this choice: a stop text has come."""

    call: CallId
    choice: int


@dataclass(frozen=True, slots=True)
class CallGone:
    """The caller hung up, or does not read what it is sent: send it no more answers."""

    call: CallId
    how: Literal["gone", "slow"] = "gone"


CallEvent = CallAsked | ChoiceStopped | CallGone


# --- actions


@dataclass(frozen=True, slots=True)
class ChoiceGrew:
    """New tokens (int32) of a choice with their logprobs (float32)."""

    call: CallId
    choice: int
    tokens: bytes
    logprobs: bytes
    spans: tuple[VersionSpan, ...]  # of all its tokens so far
    # Why the choice ended; with "stop" its last token is the end token. None: it continues.
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class CallRefused:
    """The call ends for this reason, whatever tokens were sent before."""

    call: CallId
    code: RefusedCode
    detail: str
    # The newest version that a worker serves now; None: there is none.
    version: Version | None


CallAction = ChoiceGrew | CallRefused
GatewayAction = CallAction | Send | Note
