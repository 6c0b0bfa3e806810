"""Decides which version spreads, and answers what the seed and the receiving peers report about it.

    accepted --> waits (replaces an older waiting one) --> spreads --> stays for newcomers until
                                                              |        the next one is whole
                                                              +--(its forms fail)--> given up

One version spreads at a time, and the newest other one waits until the spreading one has spread
(`spread_end`). Workers that are not done by then skip it and receive the next version. A peer that
cannot use the spreading delta takes another form (`catch_up`). When a version is given up, workers
serve older ones.
Not here: which publish is accepted (`versions`), one version's form and plan (`transmission`), when
plans change (`plan_updates`), which peer is at fault (`blame`).
"""

import math
from collections.abc import Collection, Iterable

from echo2d.core.base.ids import FormId
from echo2d.core.broadcast.announcer import Announcer
from echo2d.core.broadcast.blame import Blame
from echo2d.core.broadcast.catch_up import CatchUps
from echo2d.core.broadcast.catch_up_policy import choose_base
from echo2d.core.broadcast.events import BroadcastAction, FormChosen
from echo2d.core.broadcast.plan_updates import PlanUpdates
from echo2d.core.broadcast.spread_end import SpreadEnd
from echo2d.core.broadcast.timing import BroadcastTimings
from echo2d.core.broadcast.transmission import TELL_S, Transmission
from echo2d.core.cluster.events import Note, Persist, Send, StopRun, VersionPublished
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.run_capacity import publish_every
from echo2d.core.cluster.versions import BASES_MAX, key_of
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    DeltasKept,
    EdgeBroken,
    EncodeFailed,
    ForgetForm,
    FormEncoded,
    FrameAccused,
    SegmentEncoded,
    SegmentsWanted,
    TransferReport,
    VersionKey,
    VersionVerified,
)
from echo2d.core.topology.uplink_rates import PeerRate
from echo2d.core.weights.signed_index import Root
from echo2d.errors import PeerFault

# A full form is given up after this many failures to encode it or to keep its frames; otherwise
# workers would wait for it for ever.
ENCODE_FAILURES_MAX = 3
# The seed tries again after this time, in which a person may have freed space on a full disk.
ENCODE_RETRY_S = 5.0
# A worker that failed to apply a version, perhaps because its disk is full, tries again after
# APPLY_RETRY_S. The delay doubles up to APPLY_RETRY_S_MAX. Nothing else makes it retry before the
# next version.
APPLY_RETRY_S = 10.0
APPLY_RETRY_S_MAX = 160.0


class Publishing:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self,
        parts: RunParts,
        *,
        plan_secret: bytes,
        tag: int,
        rates: Iterable[PeerRate],
        form: FormChosen | None,
        now: float,
    ) -> None:
        rules, members, versions, statistics = (
            parts.rules,
            parts.members,
            parts.versions,
            parts.statistics,
        )
        self._rules = rules
        self._members = members
        self._versions = versions
        self._statistics = statistics
        self._announcer = Announcer(members, plan_secret)
        self._plan_updates = PlanUpdates(
            rules,
            members=members,
            announcer=self._announcer,
            statistics=statistics,
            rates=rates,
            tag=tag,
        )
        self._timings = BroadcastTimings(statistics)
        self._tell_at = now
        self._waiting: VersionPublished | None = None
        # The seed keeps these older forms until the new form is whole.
        self._old_forms: dict[FormId, None] = {}
        self._apply_at: float | None = None
        # The size of the last delta: the next one is expected to be as large.
        self._delta_bytes: int | None = None
        self._catch_ups = CatchUps(
            rules,
            members=members,
            versions=versions,
            statistics=statistics,
            announcer=self._announcer,
        )
        self._spread_end = SpreadEnd(members, self._catch_ups)
        self._blame = Blame(
            members=members,
            statistics=statistics,
            announcer=self._announcer,
            timings=self._timings,
        )
        self.spreading: Transmission | None = None
        if (
            versions.current is not None
            and form is not None
            and form.publish_seq == versions.publish_seq
        ):
            self.spreading = self._start_again(versions.current, form, now)
        else:
            self._waiting = versions.current

    @property
    def waiting(self) -> VersionPublished | None:
        """The version that spreads next."""
        return self._waiting

    @property
    def catch_ups(self) -> list[Transmission]:
        return list(self._catch_ups)

    # --- versions

    def published(self, record: VersionPublished, *, now: float) -> None:
        """A publish was accepted: it replaces the version that was waiting."""
        workers = [
            peer
            for peer in self._members.workers()
            if peer.service.active and not peer.reach.quarantined
        ]
        warm = [peer for peer in workers if peer.engine.serving is not None]
        self._timings.started(
            record.publish_seq, {peer.peer for peer in warm or workers}, cold=not warm, now=now
        )
        self._waiting = record

    def revoked(self, keys: Collection[VersionKey]) -> None:
        """Stop spreading these versions. The seed forgets their forms when the next form is whole."""
        if self._waiting is not None and key_of(self._waiting) in keys:
            self._waiting = None
        if self.spreading is not None and key_of(self.spreading.record) in keys:
            self._supersede()
        self._catch_ups.revoked(keys)

    def never_right(self, form: FormId) -> VersionPublished | None:
        """The version that is sent in this form, if no peer can ever have held the published bytes.

        None: the seed has read it correctly before (so its copy has been damaged since), a worker
        holds it, or this is the first attempt (the disk may have made one reading error).
        """
        transmission = self._current(form)
        if transmission is None or transmission is not self.spreading:
            return None
        key = key_of(transmission.record)
        held = transmission.verified or any(
            key in (peer.engine.stands, peer.engine.serving) for peer in self._members
        )
        first = transmission.encode_failures == 0
        return None if first or held or transmission.totals else transmission.record

    def goes_on_without(self, record: VersionPublished) -> bool:
        """Whether the run can reach another publish without this version.

        It can if another version waits already, or if the versions that workers serve are fresh enough
        for all steps up to the next publish.
        """
        bound, every = self._rules.staleness_max, publish_every(self._rules, self._statistics)
        served = [self._versions.live(peer.engine.serving) for peer in self._members]
        newest = max((each.version for each in served if each is not None), default=-math.inf)
        return self._waiting is not None or record.version + every <= newest + bound + 1

    def spreads(self, key: VersionKey) -> bool:
        """Whether this version is on its way to workers, or will be."""
        spreading = None if self.spreading is None else self.spreading.record
        records = (spreading, self._waiting)
        return any(record is not None and key_of(record) == key for record in records)

    def served(self, peer: Peer, *, now: float) -> None:
        """The peer's engines have begun to serve `peer.engine.serving`."""
        record = self._versions.live(peer.engine.serving)
        if record is not None:
            self._timings.served(peer.peer, record.publish_seq, now=now)

    def came_s(self, peer: Peer, *, now: float) -> float | None:
        """Seconds since the version that the peer serves began to spread; None: it no longer spreads."""
        for transmission in (self.spreading, self._catch_ups.takes(peer.peer)):
            if transmission is not None and key_of(transmission.record) == peer.engine.serving:
                return now - transmission.began_at
        return None

    def advance(self, *, now: float) -> list[BroadcastAction]:
        """Start the waiting version once the spreading one has ended, and make all due retries."""
        actions: list[BroadcastAction] = []
        if self._waiting is not None and self._may_start(now):
            self._supersede()
            record, self._waiting = self._waiting, None
            actions += self._start(record, now)
        for transmission in self._transmissions():
            if transmission.encode_at is not None and now >= transmission.encode_at:
                actions += self._order(transmission)
        if self._apply_at is not None and now >= self._apply_at:
            actions += self._apply_again()
        if now >= self._learn_at():
            assert self.spreading is not None
            actions += self._learn(self.spreading)
        actions += self._free_disk()
        if self._catch_ups:
            actions += self._catch_ups.end_idle(self.spreading)
        return actions

    def tell_on(self, *, now: float) -> list[BroadcastAction]:
        """Send the new plan to the next few peers."""
        if self.spreading is None or now < self._tell_at:
            return []
        self._tell_at = now + TELL_S
        return self._announcer.edges(self.spreading.tell())

    def wake_at(self) -> float | None:
        """When `advance` or `tell_on` has something to do next."""
        encode = (transmission.encode_at for transmission in self._transmissions())
        times = [at for at in (*encode, self._apply_at) if at is not None]
        if self._waiting is not None and self.spreading is not None and self.spreading.verified:
            times.append(self._spread_end.latest(self.spreading))
        if self.spreading is not None and self.spreading.untold:
            times.append(self._tell_at)
        if self._learn_at() < math.inf:
            times.append(self._learn_at())
        return min(times, default=None)

    def _may_start(self, now: float) -> bool:
        """Whether the waiting version may start."""
        return self.spreading is None or self._spread_end.reached(self.spreading, now=now)

    def _learn_at(self) -> float:
        transmission = self.spreading
        return (
            math.inf
            if transmission is None or transmission.learn_at is None
            else transmission.learn_at
        )

    # --- peers that come and go

    def joined(self, peer: Peer, *, renewed: bool, now: float) -> list[BroadcastAction]:
        """A peer said hello: the seed gets its orders, other peers the newest root and their edges.

        renewed: its daemon was restarted, or its address has changed.
        """
        if peer.kind == "auditor":
            return []
        self.served(peer, now=now)
        self._plan_updates.joined(peer)
        if peer.kind == "seed":
            return self._seed_joined(peer, renewed=renewed)
        if renewed:
            for transmission in self._transmissions():
                transmission.verified.pop(peer.peer, None)
                transmission.failed.pop(peer.peer, None)
        return self._catch_ups.settle(peer, self.spreading, renewed=renewed)

    def lost(self, peer: Peer) -> list[BroadcastAction]:
        """A peer is suspected or has left: other peers take over its children."""
        self._timings.lost(peer.peer)
        self._catch_ups.lost(peer.peer)
        return [
            action
            for transmission in self._transmissions()
            for action in self._announcer.edges(transmission.remove(peer.peer))
        ]

    # --- the seed

    def segment_encoded(
        self, peer: Peer, message: SegmentEncoded, *, now: float
    ) -> list[BroadcastAction]:
        transmission = self._from_seed(peer, message.form)
        if transmission is None:
            return []
        if transmission.has_changed(message):
            return self._failed(
                transmission, f"segment {message.segment} is not the one that was signed", now
            )
        return self._announce(transmission, peer, transmission.segment_encoded(message))

    def form_encoded(
        self, peer: Peer, message: FormEncoded, *, now: float
    ) -> list[BroadcastAction]:
        transmission = self._from_seed(peer, message.form)
        if transmission is None or transmission.totals is not None:
            return []
        actions = self._announce(transmission, peer, transmission.form_encoded(message))
        transmission.whole_at = now
        self._catch_ups.form_encoded(transmission)
        if transmission is not self.spreading:
            return actions
        if transmission.base is not None:
            self._delta_bytes = message.wire_bytes
        self._statistics.encoded(
            transmission.record.version, message.wire_bytes, message.full_bytes
        )
        return [*actions, *self._forget_old(peer)]

    def deltas_kept(self, peer: Peer, message: DeltasKept) -> list[BroadcastAction]:
        if peer.kind != "seed":
            raise PeerFault("only the seed encodes")
        self._catch_ups.deltas_kept(message.deltas)
        return []

    def encode_failed(
        self, peer: Peer, message: EncodeFailed, *, now: float
    ) -> list[BroadcastAction]:
        transmission = self._from_seed(peer, message.form)
        if transmission is None:
            return []
        if message.lacks_base and transmission.base is not None:
            return [
                *self._versions.lose(transmission.base.path),
                *self._to_full(transmission, message.reason, now),
            ]
        return self._failed(transmission, message.reason, now)

    # --- peers that receive

    def segments_wanted(self, peer: Peer, message: SegmentsWanted) -> list[BroadcastAction]:
        transmission = self._current(message.form)
        if transmission is None or peer.session is None:
            return []
        return [Send(peer.session, transmission.page(message.start))]

    def verified(
        self, peer: Peer, message: VersionVerified, *, now: float
    ) -> list[BroadcastAction]:
        key = VersionKey(message.version, message.digest)
        record = self._versions.live(key)
        if record is None:
            return [
                self._statistics.fault(
                    "verify", f"{peer.name}: version {message.version} is not published"
                )
            ]
        self._timings.verified(peer.peer, record.publish_seq, now=now)
        peer.engine.stands = key
        for transmission in (self.spreading, self._catch_ups.takes(peer.peer)):
            if transmission is not None and key_of(transmission.record) == key:
                transmission.has_verified(peer.peer)
        return self._catch_ups.verified(peer, self.spreading)

    def apply_failed(
        self, peer: Peer, message: ApplyFailed, *, now: float
    ) -> list[BroadcastAction]:
        """The worker becomes a leaf and tries again later; no version waits for it.

        A worker that cannot apply a version may also be unable to pass it on.
        """
        note = self._statistics.fault("apply", f"{peer.name}: {message.reason}")
        transmission = self._current(message.form)
        if transmission is None:
            return [note]
        if message.lacks_base and transmission.base is not None:
            peer.engine.stands = None
            return [note, *self._catch_ups.settle(peer, self.spreading)]
        before = transmission.failed.get(peer.peer, 0)
        transmission.failed[peer.peer] = before + 1
        again_at = now + min(APPLY_RETRY_S_MAX, APPLY_RETRY_S * 2.0 ** min(before, 10))
        self._apply_at = again_at if self._apply_at is None else min(self._apply_at, again_at)
        return [note, *([] if before else self._announcer.edges(transmission.make_leaf(peer.peer)))]

    def transferred(
        self, peer: Peer, message: TransferReport, *, now: float
    ) -> list[BroadcastAction]:
        transmission = self._current(message.form)
        if transmission is None:
            return []
        if transmission is self.spreading:
            self._plan_updates.measured(transmission, peer.peer, message, now)
        if peer.kind != "seed":
            transmission.received[peer.peer] = message.payload_bytes, message.duplicates
            return []
        more = max(0, message.sent_bytes - transmission.seed_sent_bytes)
        transmission.seed_sent_bytes += more
        self._statistics.sent.seed_bytes += more
        if (
            transmission is self.spreading
            and transmission.totals is not None
            and transmission.totals.wire_bytes
        ):
            copies = transmission.seed_sent_bytes / transmission.totals.wire_bytes
            self._statistics.sent.seed_sent(transmission.record.version, copies)
        return []

    def edge_broken(self, peer: Peer, message: EdgeBroken) -> list[BroadcastAction]:
        return self._blame.edge_broken(self._transmissions(), peer, message)

    def frame_accused(
        self, peer: Peer, message: FrameAccused, *, now: float
    ) -> list[BroadcastAction]:
        return self._blame.frame_accused(self._current(message.form), peer, message, now=now)

    # --- inside

    def _transmissions(self) -> list[Transmission]:
        """Everything that is being sent: the spreading version and the catch-ups."""
        return [*self._catch_ups] if self.spreading is None else [self.spreading, *self._catch_ups]

    def _start(self, record: VersionPublished, now: float) -> list[BroadcastAction]:
        """Begin to spread a version, as a delta if there is a base that enough workers have.

        Peers that cannot use the delta get a catch-up.
        """
        workers = [peer for peer in self._members.workers() if not peer.reach.quarantined]
        older = [each for each in self._versions.copies() if each.version != record.version]
        base = choose_base(older, workers) if self._rules.dissemination.delta else None
        self.spreading = Transmission.start(
            record,
            self._rules,
            self._announcer.secret,
            now=now,
            base=base,
            delta_bytes=self._delta_bytes,
        )
        text = "in full" if base is None else f"as a delta from version {base.version}"
        chosen: list[BroadcastAction] = [
            Note("spreading", f"version {record.version} goes out {text}")
        ]
        chosen += [self._chosen(self.spreading)] if self._rules.dissemination.delta else []
        return [*chosen, *self._catch_ups.settle_all(self.spreading), *self._order(self.spreading)]

    def _start_again(self, record: VersionPublished, form: FormChosen, now: float) -> Transmission:
        """Spread a version in the form that an earlier process chose.

        That process may have signed segments of the form, and the content of a form must never change.
        """
        older = self._versions.copies() if self._rules.dissemination.delta else []
        base = next((each for each in older if each.digest == form.base), None)
        size = form.frame_bytes if (form.base is None) == (base is None) else None
        return Transmission.start(
            record, self._rules, self._announcer.secret, now=now, base=base, frame_bytes=size
        )

    def _chosen(self, transmission: Transmission) -> BroadcastAction:
        facts = transmission.facts
        return Persist(FormChosen(facts.publish_seq, facts.base_digest, facts.frame_bytes))

    def _failed(self, transmission: Transmission, reason: str, now: float) -> list[BroadcastAction]:
        """The seed could not encode this form, or lost its frames.

        First the seed tries again, then the full form replaces a delta, then the version is given up.
        If the run cannot go on without the version, the run stops.
        """
        transmission.encode_failures += 1
        version = transmission.record.version
        # A delta is given up after two failures: the full form arrives sooner than a third attempt.
        if transmission.encode_failures < (ENCODE_FAILURES_MAX if transmission.base is None else 2):
            transmission.encode_at = now + ENCODE_RETRY_S
            return [self._statistics.fault("encode", f"version {version}: {reason}")]
        if transmission.base is not None:
            return self._to_full(transmission, reason, now)
        if transmission is not self.spreading:
            self._catch_ups.cannot_be_made(transmission)
            return [
                self._statistics.fault(
                    "encode", f"the catch-up to version {version} cannot be encoded: {reason}"
                )
            ]
        if not self.goes_on_without(transmission.record):
            return [StopRun(f"version {version} cannot be encoded: {reason}")]
        text = (
            f"version {version} is given up, older ones are served until the next is published: "
            f"{reason}"
        )
        return [self._statistics.fault("encode", text), *self._end_form(transmission)]

    def _to_full(
        self, transmission: Transmission, reason: str, now: float
    ) -> list[BroadcastAction]:
        """Replace this delta, which cannot be encoded, by the version's full form."""
        note = self._statistics.fault(
            "encode", f"version {transmission.record.version} is now sent in full: {reason}"
        )
        self._catch_ups.cannot_be_delta(transmission.record)
        if transmission is not self.spreading:
            self._catch_ups.cannot_be_made(transmission)
            return [note]
        ended = self._end_form(transmission)
        full = self._catch_ups.promote(transmission.record)
        self.spreading = full or Transmission.start(
            transmission.record, self._rules, self._announcer.secret, now=now
        )
        self.spreading.whole_at = now
        order = [] if full is not None else self._order(self.spreading)
        return [
            note,
            *ended,
            self._chosen(self.spreading),
            *order,
            *self._catch_ups.settle_all(self.spreading),
        ]

    def _end_form(self, transmission: Transmission) -> list[BroadcastAction]:
        """Stop spreading this form, and tell all peers to forget it."""
        self._supersede()
        return self._announcer.forget(transmission, self._members)

    def _current(self, form: FormId) -> Transmission | None:
        """The transmission with this form; None: it has ended, so the message is late."""
        return next(
            (transmission for transmission in self._transmissions() if transmission.form == form),
            None,
        )

    def _takers(self, transmission: Transmission) -> list[Peer]:
        """The alive peers that receive this transmission."""
        if transmission is not self.spreading:
            return self._catch_ups.takers(transmission)
        return [peer for peer in self._members.receivers() if not self._catch_ups.apart(peer.peer)]

    def _free_disk(self) -> list[BroadcastAction]:
        """Delete the snapshot copies that are no longer needed."""
        main = self.spreading
        records = (self._waiting, *(() if main is None else (main.record, main.base)))
        needed = [each.path for each in records if each is not None]
        freed: list[BroadcastAction] = []
        if self._catch_ups:
            freed = self._catch_ups.free(main, needed)
            needed += self._catch_ups.paths()
        bases = BASES_MAX if self._rules.dissemination.delta else 0
        return [
            *freed,
            *self._versions.surplus(needed, bases=bases, bytes_max=self._rules.disk_bytes_max),
        ]

    def _supersede(self) -> None:
        if self.spreading is not None:
            self._old_forms[self.spreading.form] = None
            self._plan_updates.ended(self.spreading)
            self.spreading, self._apply_at = None, None

    def _apply_again(self) -> list[BroadcastAction]:
        """Send the root and the edges again to the workers that failed to apply: they try again."""
        self._apply_at = None
        actions: list[BroadcastAction] = []
        for transmission in self._transmissions():
            for peer in [
                peer
                for peer in self._takers(transmission)
                if peer.peer in transmission.failed.keys() - transmission.verified
            ]:
                actions += self._announcer.place(transmission, peer, renewed=False)
        return actions

    def _order(self, transmission: Transmission) -> list[BroadcastAction]:
        return self._announcer.order(transmission, aside=transmission is not self.spreading)

    def _seed_joined(self, seed: Peer, *, renewed: bool) -> list[BroadcastAction]:
        transmissions = self._transmissions()
        current = {transmission.form for transmission in transmissions}
        self._old_forms.update(
            dict.fromkeys(form for form in seed.engine.forms if form not in current)
        )
        actions: list[BroadcastAction] = []
        # The order for the spreading version is sent last: the seed works first on its latest order.
        for transmission in reversed(transmissions):
            # An order may not have reached the seed: repeat it unless the form is whole there.
            whole = transmission.totals is not None and transmission.form in seed.engine.forms
            actions += [] if whole else self._order(transmission)
            if whole and transmission is self.spreading:
                actions += self._forget_old(seed)
            if transmission.plan is not None:
                actions += (
                    self._plan(transmission, seed)
                    if renewed
                    else self._announcer.edges(transmission.admit(seed, renewed=False))
                )
        return actions

    def _from_seed(self, peer: Peer, form: FormId) -> Transmission | None:
        if peer.kind != "seed":
            raise PeerFault("only the seed encodes")
        return self._current(form)

    def _announce(
        self, transmission: Transmission, seed: Peer, roots: list[Root]
    ) -> list[BroadcastAction]:
        """Send new roots to every peer that takes this form; with the first one, a plan is made."""
        actions: list[BroadcastAction] = []
        if roots and transmission.plan is None and transmission is not self.spreading:
            self._catch_ups.has_first_root(transmission)
        for root in roots:
            actions += self._announcer.root(self._takers(transmission), root)
        return [
            *actions,
            *(self._plan(transmission, seed) if roots and transmission.plan is None else []),
        ]

    def _plan(self, transmission: Transmission, seed: Peer) -> list[BroadcastAction]:
        takers = self._takers(transmission)
        if transmission is not self.spreading:
            return self._plan_updates.plan_aside(transmission, seed, takers)
        seq, now = transmission.record.publish_seq, self._statistics.now
        waited_s = self._timings.age_s(seq, now=now)
        actions = self._plan_updates.plan(transmission, seed, takers, waited_s=waited_s)
        self._expect(transmission)
        return actions

    def _learn(self, transmission: Transmission) -> list[BroadcastAction]:
        """Reconsider the plan, which was a guess."""
        seq = transmission.record.publish_seq
        waited_s = self._timings.age_s(seq, now=transmission.began_at)
        before = transmission.plan
        actions = self._plan_updates.learn(
            transmission, self._takers(transmission), waited_s=waited_s
        )
        if transmission.plan is not before:
            self._expect(transmission)
        return actions

    def _expect(self, transmission: Transmission) -> None:
        """Expect the version to arrive as its new plan predicts, unless the plan is a guess."""
        plan = transmission.plan
        if plan is not None and not plan.is_guess:
            seq, now = transmission.record.publish_seq, self._statistics.now
            self._timings.planned(seq, plan.predicted_s, now=now)

    def _forget_old(self, seed: Peer) -> list[BroadcastAction]:
        forms, self._old_forms = list(self._old_forms), {}
        return (
            [] if seed.session is None else [Send(seed.session, ForgetForm(form)) for form in forms]
        )

    def check(self) -> None:
        self._timings.check()
        self._plan_updates.check()
        self._catch_ups.check()
        if self.spreading is not None:
            self.spreading.check()
            assert self._versions.live(key_of(self.spreading.record)) is not None
        if self._waiting is not None:
            assert self._versions.live(key_of(self._waiting)) == self._waiting
