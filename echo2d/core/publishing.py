"""Which version spreads: one does, the newest other one waits; the talk with the seed and with those who receive.

    accepted --> waits (an older waiting one is dropped) --> spreads --> stays for newcomers until the next one is whole
                                                               +--(its forms fail)--> given up, older ones are served

The spreading one ends when all alive workers that are not quarantined have verified it or could not apply it; or, if
another one waits and at least one worker has verified, after twice the predicted time and FIXED_S. Who is left over
goes straight to the next.
Not here: what makes a publish acceptable (`versions`), forms and plans (`spread`).
"""

import math
from collections.abc import Collection, Iterable, Mapping

from echo2d.core.broadcasts import Broadcasts
from echo2d.core.coordinator_io import (
    Action,
    CoordinatorRules,
    Persist,
    RatesMeasured,
    Send,
    SendRoot,
    StopRun,
    VersionPublished,
)
from echo2d.core.figures import Figures
from echo2d.core.ids import TAG_SHIFT, FormId, PeerId, PlanId
from echo2d.core.membership import Membership, Peer
from echo2d.core.messages import (
    ApplyFailed,
    EdgeBroken,
    EncodeFailed,
    ForgetForm,
    FormEncoded,
    FrameAccused,
    PlanEdges,
    SegmentEncoded,
    SegmentsWanted,
    TransferReport,
    VersionKey,
    VersionVerified,
)
from echo2d.core.plan_edges import edge_secret
from echo2d.core.rates import PeerRate, Rates
from echo2d.core.roots import Root
from echo2d.core.spread import TELL_S, Spread
from echo2d.core.topology import Plan
from echo2d.core.versions import Versions, key_of
from echo2d.errors import PeerFault

ENCODE_FAILURES_MAX = 3  # of one form, encoding it or keeping its frames; workers would wait for ever
MEASURED_BYTES_MIN = 16 << 20  # a smaller version fits into the kernel's buffers, and measures those
ENCODE_RETRY_S = 5.0  # a full disk may be emptied meanwhile
APPLY_RETRY_S = 10.0  # a worker that could not apply tries again after this long, its disk may have been full; ...
APPLY_RETRY_S_MAX = 160.0  # ... doubling up to this: without a next version nobody else would tell it to
PATIENCE = 2.0  # times the predicted time that slow workers get while another version waits ...
FIXED_S = 1.0  # ... besides this for encoding and applying, which the prediction leaves out


class Publishing:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(
        self,
        rules: CoordinatorRules,
        *,
        members: Membership,
        versions: Versions,
        figures: Figures,
        plan_secret: bytes,
        tag: int,
        rates: Iterable[PeerRate],
        now: float,
    ) -> None:
        self._rules = rules
        self._members = members
        self._versions = versions
        self._figures = figures
        self._plan_secret = plan_secret
        self._next_plan = tag << TAG_SHIFT
        self._broadcasts = Broadcasts(figures)
        self._rates = Rates(rates)
        self._last_plan: Plan | None = None  # of the version before
        self._tell_at = now
        self._waiting: VersionPublished | None = None
        self._awaited: Peer | None = None  # one of those for whom a waiting version waited last
        self._old_forms: dict[FormId, None] = {}  # at the seed, to be forgotten when the new one is whole
        self._encode_at: float | None = None
        self._apply_at: float | None = None
        self.spreading = None if versions.current is None else self._start(versions.current, now)

    @property
    def waiting(self) -> VersionPublished | None:
        return self._waiting

    # --- versions

    def published(self, record: VersionPublished, *, now: float) -> None:
        """A publish was accepted."""
        workers = {peer.peer for peer in self._members.workers() if not peer.quarantined}
        self._broadcasts.started(record.publish_seq, workers, now=now)
        self._waiting = record

    def revoked(self, keys: Collection[VersionKey]) -> None:
        """Stop spreading these; the seed forgets the form when the next one is whole."""
        if self._waiting is not None and key_of(self._waiting) in keys:
            self._waiting = None
        if self.spreading is not None and key_of(self.spreading.record) in keys:
            self._supersede()

    def served(self, peer: Peer, *, now: float) -> None:
        """The peer's engines serve `peer.serving`."""
        record = self._versions.live(peer.serving)
        if record is not None:
            self._broadcasts.served(peer.peer, record.publish_seq, now=now)

    def advance(self, *, now: float) -> list[Action]:
        """Let the waiting version spread once the present one has ended; encode again what failed."""
        actions: list[Action] = []
        if self._waiting is not None and self._ended(now):
            self._supersede()
            self.spreading = self._start(self._waiting, now)
            self._waiting = None
            actions += self._order()
        elif self._encode_at is not None and now >= self._encode_at:
            actions += self._order()
        if self._apply_at is not None and now >= self._apply_at:
            actions += self._apply_again()
        if now >= self._learn_at():
            actions += self._learn()
        needed = [each.path for each in (self._waiting, self._record()) if each is not None]
        return [*actions, *self._versions.surplus(needed)]

    def tell_on(self, *, now: float) -> list[Action]:
        """Tell more peers the new plan."""
        if self.spreading is None or now < self._tell_at:
            return []
        self._tell_at = now + TELL_S
        return self._send(self.spreading.tell())

    def wake_at(self) -> float | None:
        times = [at for at in (self._encode_at, self._apply_at) if at is not None]
        if self._waiting is not None and self.spreading is not None and self.spreading.verified:
            times.append(self._impatient_at(self.spreading))
        if self.spreading is not None and self.spreading.untold:
            times.append(self._tell_at)
        if self._learn_at() < math.inf:
            times.append(self._learn_at())
        return min(times, default=None)

    def _learn_at(self) -> float:
        spread = self.spreading
        return math.inf if spread is None or spread.learn_at is None else spread.learn_at

    # --- peers that come and go

    def joined(self, peer: Peer, *, renewed: bool, now: float) -> list[Action]:
        """A peer said hello: the seed gets its orders, the others the newest root and a place in the plan."""
        self.served(peer, now=now)
        peer.uplink, peer.pace = self._rates.uplink(peer.peer), self._rates.pace(peer.peer)
        if peer.kind == "seed":
            return self._seed_joined(peer, renewed=renewed)
        spread = self.spreading
        if spread is None or spread.newest_root is None:
            return []
        if renewed:
            spread.verified.pop(peer.peer, None)
            spread.failed.pop(peer.peer, None)
        return self._place(spread, peer, renewed=renewed)

    def lost(self, peer: Peer) -> list[Action]:
        """A peer is suspected or has left."""
        self._broadcasts.lost(peer.peer)
        return [] if self.spreading is None else self._send(self.spreading.remove(peer.peer))

    # --- the seed

    def segment_encoded(self, peer: Peer, message: SegmentEncoded, *, now: float) -> list[Action]:
        spread = self._from_seed(peer, message.form)
        if spread is None:
            return []
        if spread.has_changed(message):
            return self._failed(spread, f"segment {message.segment} is not the one that was signed", now)
        return self._announce(spread, peer, spread.segment_encoded(message))

    def form_encoded(self, peer: Peer, message: FormEncoded) -> list[Action]:
        spread = self._from_seed(peer, message.form)
        if spread is None or spread.totals is not None:
            return []
        actions = self._announce(spread, peer, spread.form_encoded(message))
        self._figures.wire_bytes += message.wire_bytes
        self._figures.full_bytes += message.full_bytes
        return [*actions, *self._forget_old(peer)]

    def encode_failed(self, peer: Peer, message: EncodeFailed, *, now: float) -> list[Action]:
        spread = self._from_seed(peer, message.form)
        return [] if spread is None else self._failed(spread, message.reason, now)

    # --- those who receive

    def segments_wanted(self, peer: Peer, message: SegmentsWanted) -> list[Action]:
        spread = self._current(message.form)
        if spread is None or peer.session is None:
            return []
        return [Send(peer.session, spread.page(message.start))]

    def verified(self, peer: Peer, message: VersionVerified, *, now: float) -> list[Action]:
        key = VersionKey(message.version, message.digest)
        record = self._versions.live(key)
        if record is None:
            return [self._figures.fault("verify", f"{peer.name}: version {message.version} is not published")]
        self._broadcasts.verified(peer.peer, record.publish_seq, now=now)
        if self.spreading is not None and key_of(self.spreading.record) == key:
            self.spreading.has_verified(peer.peer)
        return []

    def apply_failed(self, peer: Peer, message: ApplyFailed, *, now: float) -> list[Action]:
        """Nobody waits for this worker: it becomes a leaf, for it may not pass on either, and tries again later."""
        note = self._figures.fault("apply", f"{peer.name}: {message.reason}")
        spread = self._current(message.form)
        if spread is None:
            return [note]
        before = spread.failed.get(peer.peer, 0)
        spread.failed[peer.peer] = before + 1
        again_at = now + min(APPLY_RETRY_S_MAX, APPLY_RETRY_S * 2.0 ** min(before, 10))
        self._apply_at = again_at if self._apply_at is None else min(self._apply_at, again_at)
        return [note, *([] if before else self._send(spread.make_leaf(peer.peer)))]

    def transferred(self, peer: Peer, message: TransferReport, *, now: float) -> list[Action]:
        spread = self._current(message.form)
        if spread is None:
            return []
        spread.moved(now)
        self._measure(spread, peer.peer, message, now)
        if peer.kind != "seed":
            spread.received[peer.peer] = message.payload_bytes, message.duplicates
            return []
        spread.seed_sent_bytes = max(spread.seed_sent_bytes, message.sent_bytes)
        if spread.totals is not None and spread.totals.wire_bytes:
            copies = spread.seed_sent_bytes / spread.totals.wire_bytes
            self._figures.seed_sent(spread.record.version, copies)
        return []

    def edge_broken(self, peer: Peer, message: EdgeBroken) -> list[Action]:
        """Whoever is at the other end becomes a leaf; if that is the seed, the reporter does."""
        spread = self.spreading
        if spread is None or spread.plan is None or spread.plan.plan_id != message.plan:
            return []
        note = self._figures.fault("edge", f"{peer.name} and {self._name(message.peer)}: {message.reason}")
        if spread.plan.generation != message.generation or message.peer not in spread.neighbours(peer.peer):
            return [note]  # the plan has been mended since, or it is not this peer's edge
        at_fault = peer.peer if message.peer == spread.plan.root else message.peer
        return [note, *self._send(spread.make_leaf(at_fault))]

    def frame_accused(self, peer: Peer, message: FrameAccused, *, now: float) -> list[Action]:
        """One of the two is at fault, and becomes a leaf; never the seed."""
        note = self._figures.fault("frame", f"{peer.name} accuses {self._name(message.accused)}: {message.frame}")
        spread, accused = self._current(message.form), self._members.get(message.accused)
        if spread is None or accused is None or not spread.may_accuse(peer.peer, accused.peer):
            return [note]
        at_fault = peer.peer if accused.kind == "seed" else self._members.accuse(peer, accused, now=now)
        if accused.quarantined:
            self._broadcasts.lost(accused.peer)
        return [note, *self._send(spread.make_leaf(at_fault, for_good=True))]

    # --- inside

    def _start(self, record: VersionPublished, now: float) -> Spread:
        def secret(one: PeerId, other: PeerId) -> bytes:
            return edge_secret(self._plan_secret, one, other)

        return Spread.start(record, self._rules, secret, now=now)

    def _failed(self, spread: Spread, reason: str, now: float) -> list[Action]:
        """The seed cannot make this form, or lost what it had made of it: it tries again, in full instead of a delta.

        In the end the version is given up; without it, nobody may be able to go on.
        """
        spread.encode_failures += 1
        version = spread.record.version
        if spread.facts.kind == "delta":
            note = self._figures.fault("encode", f"version {version}, to be sent in full: {reason}")
            ended = self._end_form(spread)
            self.spreading = self._start(spread.record, now)
            return [note, *ended, *self._order()]
        if spread.encode_failures < ENCODE_FAILURES_MAX:
            self._encode_at = now + ENCODE_RETRY_S
            return [self._figures.fault("encode", f"version {version}: {reason}")]
        if not self._goes_on_without(spread.record):
            return [StopRun(f"version {version} cannot be encoded: {reason}")]
        text = f"version {version} is given up, older ones are served until the next is published: {reason}"
        return [self._figures.fault("encode", text), *self._end_form(spread)]

    def _goes_on_without(self, record: VersionPublished) -> bool:
        """Whether another publish comes: one waits, or what is served is fresh enough for the steps up to the next."""
        bound = self._rules.staleness_max
        every = self._rules.publish_every or self._figures.publish_every(bound)
        served = [self._versions.live(peer.serving) for peer in self._members]
        newest = max((each.version for each in served if each is not None), default=-math.inf)
        return self._waiting is not None or record.version + every <= newest + bound + 1

    def _end_form(self, spread: Spread) -> list[Action]:
        """Nobody has use for it any more."""
        self._supersede()
        sessions = [peer.session for peer in self._members if peer.session is not None]
        return [Send(session, ForgetForm(spread.form)) for session in sessions]

    def _record(self) -> VersionPublished | None:
        return None if self.spreading is None else self.spreading.record

    def _current(self, form: FormId) -> Spread | None:
        """The spreading version if this is its form; messages about others are late."""
        return self.spreading if self.spreading is not None and self.spreading.form == form else None

    def _name(self, peer: PeerId) -> str:
        known = self._members.get(peer)
        return str(peer) if known is None else known.name

    def _ended(self, now: float) -> bool:
        spread = self.spreading
        if spread is None:
            return True
        if spread.totals is not None and not self._awaits_anyone(spread):
            return True
        return bool(spread.verified) and now >= self._impatient_at(spread)

    def _awaits_anyone(self, spread: Spread) -> bool:
        """Whether an alive worker has neither verified it nor failed to; whoever it was last is looked at first."""
        if self._awaited is None or not _awaits(spread, self._awaited):
            self._awaited = next((peer for peer in self._members if _awaits(spread, peer)), None)
        return self._awaited is not None

    def _impatient_at(self, spread: Spread) -> float:
        predicted_s = 0.0 if spread.plan is None else spread.plan.predicted_s
        return spread.started_at + FIXED_S + PATIENCE * predicted_s

    def _supersede(self) -> None:
        if self.spreading is not None:
            self._old_forms[self.spreading.form] = None
            self._last_plan = self.spreading.plan or self._last_plan
            self.spreading, self._encode_at, self._apply_at = None, None, None

    def _apply_again(self) -> list[Action]:
        """The root and the place in the plan, told once more, are another chance."""
        self._apply_at = None
        spread = self.spreading
        if spread is None:
            return []
        again = [peer for peer in self._members.receivers() if peer.peer in spread.failed.keys() - spread.verified]
        told = [self._place(spread, peer, renewed=False) for peer in again]
        return [action for actions in told for action in actions]

    def _place(self, spread: Spread, peer: Peer, *, renewed: bool) -> list[Action]:
        """What the form is, and whom to take it from and pass it to."""
        root = [] if spread.newest_root is None else self._send_root([peer], spread.newest_root)
        return [*root, *self._send(spread.admit(peer, renewed=renewed))]

    def _order(self) -> list[Action]:
        """Tell the seed to encode; without a seed, its hello does it."""
        self._encode_at = None
        seed = self._members.seed
        if seed is None or seed.session is None or self.spreading is None:
            return []
        return [Send(seed.session, self.spreading.order())]

    def _seed_joined(self, seed: Peer, *, renewed: bool) -> list[Action]:
        spread = self.spreading
        forms = [form for form in seed.forms if spread is None or form != spread.form]
        self._old_forms.update(dict.fromkeys(forms))
        if spread is None:
            return []
        whole = spread.totals is not None and spread.form in seed.forms  # an earlier order may never have reached it
        actions = [] if whole else self._order()
        if whole:
            actions += self._forget_old(seed)
        if spread.plan is None:
            return actions
        return [*actions, *(self._plan(spread, seed) if renewed else self._send(spread.admit(seed, renewed=False)))]

    def _from_seed(self, peer: Peer, form: FormId) -> Spread | None:
        if peer.kind != "seed":
            raise PeerFault("only the seed encodes")
        return self._current(form)

    def _announce(self, spread: Spread, seed: Peer, roots: list[Root]) -> list[Action]:
        """Roots to every peer; with the first one, the plan."""
        actions: list[Action] = []
        for root in roots:
            actions += self._send_root(self._members.receivers(), root)
        return [*actions, *(self._plan(spread, seed) if roots and spread.plan is None else [])]

    def _measure(self, spread: Spread, peer: PeerId, message: TransferReport, now: float) -> None:
        """What it got from others, and for how long they took less of it than there was."""
        if spread.record.full_bytes < MEASURED_BYTES_MIN:
            return
        for sample in message.links:
            if 0 <= sample.seconds < math.inf:
                self._rates.received(sample.peer, peer, sample.payload_bytes, sample.seconds, now=now)
        for backlog in message.backlogs:
            if 0 <= backlog.seconds < math.inf:
                self._rates.backlogged(peer, backlog.peer, backlog.seconds)

    def _plan(self, spread: Spread, seed: Peer) -> list[Action]:
        """Everybody gets a plan by the rates that the last one has shown."""
        receivers, actions = self._members.receivers(), self._judge(seed)
        last = spread.plan or self._last_plan
        edges = spread.make_plan(self._new_plan_id(), self._rules, seed, receivers, last)
        self._rates.begin({} if spread.plan is None else spread.plan.shares)
        return [*actions, *self._send(edges)]

    def _learn(self) -> list[Action]:
        """The first bytes have shown what was guessed. After another plan only gaps are filled, which shows nothing."""
        spread, seed = self.spreading, self._members.seed
        assert spread is not None
        if seed is None:
            spread.learn_at = math.inf
            return []
        actions = self._judge(seed)
        edges = spread.learn(self._new_plan_id(), self._rules, seed, self._members.receivers())
        if not edges and spread.plan is not None:
            self._rates.begin(spread.plan.shares)
        return [*actions, *self._send(edges)]

    def _judge(self, seed: Peer) -> list[Action]:
        """The rates by all that was reported so far."""
        changed = self._rates.judge()
        receivers = self._members.receivers()
        rates = self._rates.to_plan_with(seed.peer, [peer.peer for peer in receivers])
        for peer in (seed, *receivers):
            peer.uplink, peer.pace = rates.get(peer.peer), self._rates.pace(peer.peer)
        return [Persist(RatesMeasured(changed))] if changed else []

    def _new_plan_id(self) -> PlanId:
        self._next_plan += 1
        return PlanId(self._next_plan - 1)

    def _forget_old(self, seed: Peer) -> list[Action]:
        forms, self._old_forms = list(self._old_forms), {}
        return [] if seed.session is None else [Send(seed.session, ForgetForm(form)) for form in forms]

    def _send_root(self, peers: Collection[Peer], root: Root) -> list[Action]:
        sessions = tuple(peer.session for peer in peers if peer.session is not None)
        return [SendRoot(sessions, root.signing_bytes())] if sessions else []

    def _send(self, edges: Mapping[PeerId, PlanEdges]) -> list[Action]:
        known = [(self._members.get(peer), part) for peer, part in edges.items()]
        return [Send(peer.session, part) for peer, part in known if peer is not None and peer.session is not None]

    def check(self) -> None:
        self._broadcasts.check()
        self._rates.check()
        if self.spreading is not None:
            self.spreading.check()
            assert self._versions.live(key_of(self.spreading.record)) is not None
        if self._waiting is not None:
            assert self._versions.live(key_of(self._waiting)) == self._waiting


def _awaits(spread: Spread, peer: Peer) -> bool:
    counts = peer.kind == "worker" and peer.alive and not peer.quarantined
    return counts and not (peer.peer in spread.verified or peer.peer in spread.failed)
