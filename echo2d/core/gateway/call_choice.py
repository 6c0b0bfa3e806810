"""One sample of a call: what its caller has of it, and which of its workers' words are believed. No decisions.

What was told to a caller is never taken back: whoever goes on serves the version of the last token or a newer one, and
a worker that tells its tokens differently is not believed.
"""

from dataclasses import dataclass

from echo2d.core.base.ids import PeerId, Version
from echo2d.core.gateway.events import CallAsked, CallId
from echo2d.core.protocol.control_messages import SampleDelta, SampleFinished
from echo2d.core.protocol.result_check import Believed, content_fault, span_fault
from echo2d.core.protocol.trajectory import NOTHING, Partial
from echo2d.core.rollouts.leases import Lease

AVOID_S = 1.0  # a worker that leaves gives leases back a moment before it says goodbye

ChoiceKey = tuple[CallId, int]


@dataclass(slots=True)
class CallChoice:
    """told: what its caller has; since: when it began to wait; lease: None while it does.

    avoid: who failed it last, and gets it no more for AVOID_S.
    """

    call: CallAsked
    index: int
    told: Partial = NOTHING
    since: float = 0.0
    lease: Lease | None = None
    failures: int = 0
    avoid: PeerId | None = None

    @property
    def key(self) -> ChoiceKey:
        return self.call.call, self.index

    @property
    def oldest(self) -> Version:
        """Whoever writes its next token serves this version or a newer one."""
        return max(self.call.min_version, self.told.version_last)

    @property
    def room(self) -> int:
        """Tokens that it may still get."""
        return self.call.max_new_tokens - self.told.length

    def avoids(self, worker: PeerId, now: float) -> bool:
        return worker == self.avoid and now < self.since + AVOID_S

    def grown(
        self, said: SampleDelta | SampleFinished, *, vocab_size: int, believed: Believed
    ) -> Partial | str:
        """What it is with these tokens behind what its lease went on from; or what is wrong with them.

        After a new connection a worker begins at its first token again.
        """
        assert self.lease is not None
        base = self.lease.given.base
        begins = bool(said.spans) and said.spans[0].start == 0
        before = base if begins else self.told
        start, room = before.length - base.length, self.call.max_new_tokens - before.length
        fault = content_fault(said.tokens, said.logprobs, vocab_size, room)
        oldest = max(self.call.min_version, before.version_last)
        fault = fault or span_fault(
            said.spans, start, start + len(said.tokens) // 4, oldest, believed
        )
        if fault:
            return fault
        grown = before.plus(said.tokens, said.logprobs, said.spans, shift=base.length)
        known = min(grown.length, self.told.length)
        same = grown.first(known) == self.told.first(known)
        return grown if same else "it tells its tokens differently than before"
