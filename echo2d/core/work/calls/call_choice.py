"""One sample of a call: the tokens that its caller has, and the check of what workers report.

Tokens that were sent to a caller are never taken back: the next worker serves the version of the last
token or a newer one, and a worker that reports other tokens than before is not believed.
"""

from dataclasses import dataclass

from echo2d.core.base.ids import PeerId, Version
from echo2d.core.protocol.answer_end import OutputLimit, end_fault
from echo2d.core.protocol.control_messages import Finish, SampleDelta, SampleFinished, VersionKey
from echo2d.core.protocol.result_check import Believed, content_fault, span_fault
from echo2d.core.protocol.trajectory import NOTHING, Partial, authored, unpack_tokens
from echo2d.core.work.calls.events import CallAsked, CallId
from echo2d.core.work.leases import Lease

# A choice avoids the worker that failed it for this long, because a leaving worker gives its leases back
# a moment before it says goodbye.
CALL_AVOID_S = 1.0

ChoiceKey = tuple[CallId, int]


@dataclass(slots=True)
class CallChoice:
    """A choice of a call."""

    call: CallAsked
    index: int
    told: Partial = NOTHING  # the tokens that its caller has
    since: float = 0.0  # when it began to wait
    lease: Lease | None = None  # None while it waits
    failures: int = 0
    # Why it has ended, while it waits for the verdict of the audit.
    finish: Finish | None = None
    # The version that alone writes it, which its leases name; None: they name none.
    named: VersionKey | None = None
    # The worker that failed it last, or that the audit did not believe in its session; it does not get the choice for
    # CALL_AVOID_S.
    avoid: PeerId | None = None

    @property
    def key(self) -> ChoiceKey:
        return self.call.call, self.index

    @property
    def oldest(self) -> Version:
        """The worker that writes the choice's next token must serve this version or a newer one."""
        return max(self.call.min_version, self.told.version_last)

    def may_be_written_by(self, version: Version) -> bool:
        """Whether a worker that serves this version may write the choice's next token."""
        newest = self.call.max_version
        return self.oldest <= version and (newest is None or version <= newest)

    def too_new(self, partial: Partial) -> bool:
        """Whether a version newer than the caller allows wrote part of this output."""
        newest = self.call.max_version
        return newest is not None and partial.version_last > newest

    @property
    def room(self) -> int:
        """The number of tokens that the choice may still get."""
        return self.call.max_new_tokens - self.told.length

    def before_stop(self, partial: Partial) -> Partial:
        """The part before the first stop token. The stop token itself comes only with a result: if the
        worker fails before, another one can continue.
        """
        tokens = unpack_tokens(partial.tokens).tolist()
        ends = (at for at, token in enumerate(tokens) if token in self.call.stop_token_ids)
        return partial.first(next(ends, partial.length))

    def end_fault(self, whole: Partial, finish: Finish) -> str:
        """Return what is wrong with the end of the choice's whole output, or "" if nothing is."""
        if finish == "context":
            return ""  # an output may end a little before the model's own context does
        return end_fault(
            unpack_tokens(whole.tokens).tolist(),
            finish,
            before=0,
            # The call was checked against the model's context.
            limit=OutputLimit(self.call.max_new_tokens, "length"),
            stop_token_ids=self.call.stop_token_ids,
        )

    def avoids(self, worker: PeerId, now: float) -> bool:
        return worker == self.avoid and now < self.since + CALL_AVOID_S

    def grown(
        self,
        said: SampleDelta | SampleFinished,
        author: PeerId,
        *,
        vocab_size: int,
        believed: Believed,
    ) -> Partial | str:
        """The whole output with these new tokens, or a text that says what is wrong with them."""
        assert self.lease is not None
        base = self.lease.given.base
        # After a new connection a worker reports the sample from its first token again.
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
        spans = authored(said.spans, author)
        grown = before.plus(said.tokens, said.logprobs, spans, shift=base.length)
        known = min(grown.length, self.told.length)
        same = grown.first(known) == self.told.first(known)
        return grown if same else "it reports other tokens than before"
