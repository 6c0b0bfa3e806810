"""The scorers: which processes score answers, and the orders that each of them gets, one at a time.

    waits in the queue --order--> is being scored --AnswersScored--> back to the audit
        ^                                 |
        +--the scorer fails, is late or gone--+--tried too often, or the version has no copy--> lost

A scorer is the run's own auditor, which loads any version that has a copy on the learner host, or a
trusted worker whose engine can score what it holds. An order holds as many tokens as the scorer
scores in ORDER_S, by its measured speed.
Not here: which answers wait (`audits`) and their order (`scoring_queue`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from echo2d.core.audit.scoring_queue import AnswerPart, ScoringQueue
from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import Send
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import PublishedVersions, key_of
from echo2d.core.protocol.control_messages import AnswersScored, ScoreAnswers, VersionKey
from echo2d.core.rules.run import RunRules
from echo2d.errors import PeerFault

# An order that takes longer goes to another scorer.
ORDER_S_MAX = 120.0
# Seconds that an order should take, and seconds per token of a scorer that was never measured.
ORDER_S = 10.0
TOKEN_S = 0.01
SCORERS_MAX = 1024
# A scorer that failed gets no order for this long.
SCORER_REST_S = 5.0
# At most this many snapshot copies are kept because answers may name their versions.
COPIES_MAX = 6


@dataclass(frozen=True, slots=True)
class ScoringOrder:
    """What a scorer is scoring."""

    order: int
    parts: list[AnswerPart]
    # At this time the order goes to another scorer.
    until: float


class Scorers:
    """See the module docstring. `now` is monotonic seconds.

    lost: called with each part that no scorer will score.
    """

    def __init__(
        self,
        rules: RunRules,
        *,
        members: Membership,
        versions: PublishedVersions,
        lost: Callable[[AnswerPart], None],
    ) -> None:
        assert rules.audit is not None
        self._rules, self._replay = rules, rules.audit.seeds
        self._members, self._versions, self._lost = members, versions, lost
        self._queue = ScoringQueue()
        self._peers: set[PeerId] = set()
        self._orders: dict[PeerId, ScoringOrder] = {}
        self._loaded: dict[PeerId, VersionKey] = {}
        # By scorer, the order that was given up and that the scorer has not answered yet.
        self._overdue: dict[PeerId, int] = {}
        # Until when a scorer that failed gets no order.
        self._rests: dict[PeerId, float] = {}
        # Measured seconds per token.
        self._token_s: dict[PeerId, float] = {}
        self._next_order = 0
        self.scored = 0
        self.scoring_s = self.loading_s = 0.0

    @property
    def pending(self) -> int:
        """Parts of answers that wait for a scorer or are being scored."""
        return len(self._queue) + sum(len(order.parts) for order in self._orders.values())

    # --- what happens

    def joined(self, peer: Peer) -> None:
        """A peer said hello: its earlier order goes back to the queue."""
        self.gone(peer.peer)
        if peer.kind == "auditor" or (peer.trusted and peer.scores and not peer.quantization):
            self._peers.add(peer.peer)

    def gone(self, peer: PeerId) -> None:
        """A peer's session ended, or another one replaced it."""
        self._loaded.pop(peer, None)
        self._peers.discard(peer)
        self._overdue.pop(peer, None)
        if (order := self._orders.pop(peer, None)) is not None:
            self._put_back(order)

    def put(self, part: AnswerPart) -> None:
        """Let this part wait for a scorer."""
        self._lose(self._queue.put(part))

    def forget(self, worker: PeerId) -> list[AnswerPart]:
        """Remove what waits of this worker's answers; returns the removed parts."""
        return self._queue.forget(worker)

    def answered(self, peer: Peer, message: AnswersScored) -> list[AnswerPart]:
        """The parts that this message scores, in its sequence; none: another scorer has the order by now.

        PeerFault: this peer may not score, or the answer does not fit the order.
        """
        order = self._take(peer, message.order)
        if order is None:
            return []
        self._measure(peer.peer, order, message.scoring_s)
        if len(message.found) != len(order.parts):
            raise PeerFault(f"scores of {len(message.found)} parts; expected {len(order.parts)}")
        self.scored += len(order.parts)
        self.scoring_s += message.scoring_s
        self.loading_s += message.loading_s
        return order.parts

    def failed(self, peer: Peer, order: int, now: float) -> bool:
        """A scorer failed: the parts of its order wait for another try. Returns whether it had this
        order. PeerFault: this peer may not score.
        """
        taken = self._take(peer, order)
        if taken is None:
            return False
        self._loaded.pop(peer.peer, None)
        self._rests[peer.peer] = now + SCORER_REST_S
        self._put_back(taken)
        return True

    def deadlines(self, now: float) -> None:
        """Give up orders that take too long."""
        for peer, order in list(self._orders.items()):
            if now >= order.until:
                # The scorer gets another order only once it has answered this one or said hello.
                del self._orders[peer]
                self._overdue[peer] = order.order
                self._put_back(order)

    def wake_at(self, now: float) -> float | None:
        times = [order.until for order in self._orders.values()]
        if self._queue.versions() and self._peers:
            due = self._queue.due_at(self._newest)
            later = [*self._rests.values(), *(() if due is None else (due,))]
            times += [at for at in later if at > now]
        return min(times, default=None)

    def advance(self, now: float) -> list[Send]:
        """Give every idle scorer its next order."""
        for key in list(self._queue.versions()):
            if self._versions.live(key) is None:
                self._lose(self._queue.lose(key))
        self._versions.pinned = self._needed()
        idle = self._idle(now) if self._queue.versions() else []
        if not idle:
            return []
        sends = []
        newest = self._newest
        copies = {key_of(record): record.path for record in self._versions.copies()}
        held = {key for peer in idle for key in peer.engine.held}
        for key in [key for key in self._queue.versions() if key not in {*copies, *held}]:
            self._lose(self._queue.lose(key))
        for peer in idle:
            parts = self._queue.take(
                copies if peer.kind == "auditor" else peer.engine.held,
                loaded=self._loaded.get(peer.peer, peer.engine.serving),
                newest=newest,
                tokens_max=int(ORDER_S / self._token_s.get(peer.peer, TOKEN_S)),
                now=now,
            )
            if parts:
                sends.append(self._order(peer, parts, copies.get(parts[0].key, ""), now))
        return sends

    # --- inside

    @property
    def _newest(self) -> VersionKey | None:
        newest = self._versions.newest
        return None if newest is None else key_of(newest)

    def _needed(self) -> set[str]:
        """The paths of the snapshot copies that auditors need or may need: workers may still write
        answers with any version within the staleness bound, and with those that they hold.
        """
        window = self._versions.copies()[: min(COPIES_MAX, self._rules.staleness_max + 2)]
        scored = (order.parts[0].key for order in self._orders.values())
        keys = {*self._queue.versions(), *scored, *self._versions.held}
        records = (self._versions.live(key) for key in keys)
        return {record.path for record in (*records, *window) if record is not None}

    def _idle(self, now: float) -> list[Peer]:
        """The scorers without an order."""
        self._rests = {peer: until for peer, until in self._rests.items() if until > now}
        busy = self._orders.keys() | self._overdue.keys() | self._rests.keys()
        peers = map(self._members.get, sorted(self._peers - busy))
        return [
            peer
            for peer in peers
            if peer is not None and peer.alive and (peer.kind == "auditor" or peer.engine.serving)
        ]

    def _order(self, peer: Peer, parts: list[AnswerPart], path: str, now: float) -> Send:
        assert peer.session is not None
        order, key = self._next_order, parts[0].key
        self._next_order += 1
        self._orders[peer.peer] = ScoringOrder(order, parts, now + ORDER_S_MAX)
        self._loaded[peer.peer] = key
        answers = tuple(part.answer for part in parts)
        return Send(
            peer.session,
            ScoreAnswers(order, key.version, key.digest, path, self._replay, answers),
        )

    def _take(self, peer: Peer, number: int) -> ScoringOrder | None:
        """Take this order from the peer. None: another scorer has it by now. PeerFault: this peer may
        not score.
        """
        if peer.kind != "auditor" and not peer.trusted:
            raise PeerFault("only auditors score answers")
        if self._overdue.get(peer.peer) == number:
            del self._overdue[peer.peer]
        order = self._orders.get(peer.peer)
        if order is None or order.order != number:
            return None
        return self._orders.pop(peer.peer)

    def _put_back(self, order: ScoringOrder) -> None:
        for part in order.parts:
            part.tries += 1
            self.put(part)

    def _lose(self, parts: list[AnswerPart]) -> None:
        for part in parts:
            self._lost(part)

    def _measure(self, peer: PeerId, order: ScoringOrder, scoring_s: float) -> None:
        """Measure the seconds that this scorer takes for a token, so that orders take ORDER_S."""
        tokens = sum(part.tokens for part in order.parts)
        before = self._token_s.get(peer, TOKEN_S)
        self._token_s[peer] = before + 0.5 * (max(0.0, scoring_s) / tokens - before)
        keep_newest(self._token_s, SCORERS_MAX)

    def check(self) -> None:
        self._queue.check()
        assert all(order.parts for order in self._orders.values())
