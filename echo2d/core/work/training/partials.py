"""Partials: the tokens of samples that one worker did not finish, and from which another worker continues.

    LeaseProgress --checked--> gathered with the running lease --lease ended--> waiting
                                                                                  |
        the sample starts over <-- revoked, too old, fruitless, or no worker -----+
        for long enough                                                           |
                                                  base of the next attempt <------+

A partial must be as good as a result: every token is within the vocabulary, every version is
published, not revoked, and acknowledged by the worker that wrote it. A partial continues at a
worker that serves the version of its last span or a newer version, so that versions never decrease along
a trajectory. A partial becomes durable with the lease that continues it.
Not here: where samples wait (`group_table`), and which worker gets them (`scheduler`).
"""

import math
from collections.abc import Iterable, Sequence

from echo2d.core.audit.audits import Audits
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import Note
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.columns import wanted_columns
from echo2d.core.protocol.control_messages import SampleDelta, VersionKey
from echo2d.core.protocol.result_check import Believed, delta_fault, partial_fault
from echo2d.core.protocol.trajectory import NOTHING, Partial, authored
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.leases import Lease, LeaseTable
from echo2d.core.work.training.group_table import OpenGroup, Waiting
from echo2d.core.work.training.staleness import Staleness

# A partial waits this long, which is longer than a refit. After that any free worker starts the sample over,
# because its group waits.
PARTIAL_WAIT_S = 30.0
# If more than this many leases in a row continued a partial and added nothing, the partial is dropped: it may itself be
# at fault.
FRUITLESS_MAX = 2


class Partials:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self,
        parts: RunParts,
        *,
        leases: LeaseTable,
        staleness: Staleness,
        audits: Audits | None = None,
    ) -> None:
        self._rules, self._versions = parts.rules, parts.versions
        self._statistics = parts.statistics
        self._leases = leases
        self._staleness = staleness
        self._audits = audits

    def believed(self, peer: Peer) -> Believed:
        """A test for a version: whether it may have written what this peer reports."""
        return lambda version: version in peer.engine.acknowledged and self._live(version)

    def gather(self, peer: Peer, lease: Lease, deltas: Sequence[SampleDelta]) -> list[str]:
        """Take in new output that a lease's worker reports: at most `lease.room` tokens beyond its base.

        Output that begins at the first token replaces what was reported before. Returns what is wrong with the output.
        """
        faults: list[str] = []
        for delta in deltas:
            before = _before(lease, delta)
            if before is None or not delta.tokens or delta.sample not in lease.samples:
                continue
            oldest = lease.given.base.version_last
            fault = delta_fault(
                delta, before, room=lease.room, oldest=oldest, believed=self.believed(peer)
            )
            spans = authored(delta.spans, peer.peer)
            more = delta.columns and wanted_columns(delta.columns, self._rules.columns)
            grown = (
                None if fault else before.plus(delta.tokens, delta.logprobs, spans, columns=more)
            )
            self._leases.gather(lease, delta.sample, grown)
            if fault:
                faults.append(fault)
        return faults

    def left(
        self, group: OpenGroup, lease: Lease, *, goes_to: PeerId | None = None, now: float
    ) -> list[Note]:
        """The lease ended: each of its open samples waits with the tokens that it has so far.

        goes_to: the worker that should continue them.
        """
        notes: list[Note] = []
        base = lease.given.base
        limit = self._rules.limit(
            group.task, group.prompt.tokens, base.turn_start, base.branch_start
        )
        for sample in sorted(lease.samples):
            output = lease.outputs.get(sample) or NOTHING
            fault = self._fault(output, group.task)
            if fault:
                notes.append(self._statistics.fault("progress", f"from {lease.worker}: {fault}"))
                output = NOTHING
            partial = self._usable(
                base.plus(
                    output.tokens,
                    output.logprobs,
                    output.spans,
                    shift=base.length,
                    columns=output.columns,
                ),
                limit.tokens - 1,
            )
            grew = partial.length > base.length
            group.fruitless[sample] = 0 if grew else group.fruitless[sample] + 1
            group.judged_at = None
            if partial.length and group.fruitless[sample] <= FRUITLESS_MAX:
                group.partials[sample] = Waiting(
                    partial, now + PARTIAL_WAIT_S, lease.since, goes_to
                )
            else:
                group.lose_partial(sample)
        return notes

    def forget(self, groups: Iterable[OpenGroup], *, now: float) -> float | None:
        """Forget the partials that have become useless.

        Returns when the next one of the others will have waited long enough.
        """
        first = math.inf
        # Whether tokens are good depends only on this. Many samples may wait, and this runs at every event.
        basis = self._versions.ended, self._staleness.oldest
        for group in groups:
            if group.judged_at != basis:
                group.judged_at = basis
                for sample in [
                    at for at, each in group.partials.items() if not self.good(each.partial)
                ]:
                    group.lose_partial(sample)
            for each in group.partials.values():
                if now < each.there_until < first:
                    first = each.there_until
                if now < each.until < first:
                    first = each.until
        return None if first == math.inf else first

    def good(self, partial: Partial) -> bool:
        """Whether the partial's tokens may still become part of a batch."""
        oldest = partial.version_min
        stale = oldest is not None and self._staleness.outdated(oldest, None)
        if stale:
            return False
        # This runs at every report, and a generator would cost as much again.
        for span in partial.spans:
            if self._versions.live(span.key) is None:
                return False
        audits = self._audits
        return audits is None or not audits.any_convicted([span.author for span in partial.spans])

    # --- inside

    def _live(self, version: VersionKey) -> bool:
        return self._versions.live(version) is not None

    def _fault(self, output: Partial, task: TaskRules) -> str:
        rules, stops = self._rules, task.stop_token_ids
        return (
            partial_fault(
                output, vocab_size=rules.vocab_size, stop_token_ids=stops, experts=rules.experts
            )
            if output.length
            else ""
        )

    def _usable(self, partial: Partial, most: int) -> Partial:
        """The part before the first revoked version, at most `most` tokens."""
        revoked = (span.start for span in partial.spans if not self._live(span.key))
        return partial.first(min(most, next(revoked, partial.length)))


def _before(lease: Lease, delta: SampleDelta) -> Partial | None:
    """The output to which new output is appended; None: something in between is not known."""
    begins = bool(delta.spans) and delta.spans[0].start == 0
    return NOTHING if begins else lease.outputs.get(delta.sample, NOTHING)
