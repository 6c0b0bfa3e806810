"""The audit of a run: which answers are scored again, what waits for it, and who is convicted.

    answer accepted --drawn--> waits for an auditor --> scored --> judged --> group goes on
          |                                                          |-> flagged: given back
          +-- of a new or flagged worker: its group waits            +-> worker convicted

An auditor is the run's own process on the learner host, or a worker that the operator trusts; it
holds the weights and computes what `evidence` describes. Limits are learnt from trusted workers. As
long as they are being learnt, nobody else gets leases. If no worker is trusted at all, a share is
scored, nothing waits, nobody is convicted, and the operator is told who looks like a liar.
An answer that has waited for `wait_s` is given to another worker, if there is one.
Kept true: no answer that waits is part of a batch; a trusted worker is never convicted.
Not here: the order of scoring (`scoring_queue`), the statistics (`case`), what becomes of groups
(`rollouts/groups`) and of a convicted worker (`coordinator/state`).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Literal

from blake3 import blake3

from echo2d.core.audit.baseline import BASELINE_TRAJECTORIES, GROSS, Baseline, HonestLimits
from echo2d.core.audit.case import Case, Cases
from echo2d.core.audit.events import AuditAction, AuditTold, Convict, LimitsLearnt
from echo2d.core.audit.scoring_queue import AnswerPart, AuditItem, ScoringQueue, WaitingSample
from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.cluster.events import Note, Persist, Send
from echo2d.core.cluster.membership import Membership, Peer
from echo2d.core.cluster.rules import RunRules
from echo2d.core.cluster.statistics import Statistics
from echo2d.core.cluster.versions import PublishedVersions, key_of
from echo2d.core.protocol.control_messages import (
    AnswersScored,
    AnswerToScore,
    ScoreAnswers,
    ScoringFailed,
    VersionKey,
)
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.protocol.seeds import sample_seeds
from echo2d.core.protocol.trajectory import AuthoredSpan, TrajectoryRecord, TrajectoryScore
from echo2d.errors import PeerFault

# An order that takes longer goes to another auditor.
ORDER_S_MAX = 120.0
# Evidence that waits for limits; beyond, answers count as not scored.
UNJUDGED_MAX = 4096
# Without limits: flagged answers that make a worker look like a liar.
SUSPICIOUS = 5
# Samples of a new or flagged worker that are leased or wait for their verdict.
TRIAL_MAX = 32
# A clear worker may use so many more slots for each of its audited answers: whoever says that it has
# thousands must have shown as much.
SLOTS_PER_AUDIT = 16
# Snapshot copies that are kept because answers may name their versions.
COPIES_MAX = 6
# An order is as large as fits into ORDER_S; TOKEN_S is believed of a scorer that was never measured.
ORDER_S = 10.0
TOKEN_S = 0.01
SCORERS_MAX = 1024
# A scorer that failed gets no order for so long.
REST_S = 5.0
BEFORE = "convicted before the coordinator was started"
# Verdicts after which an old delay has lost all but 1/e of its weight.
DELAY_MEMORY = 64

WorkerStanding = Literal["", "trusted", "new", "clear", "flagged", "convicted", "suspected"]


@dataclass(frozen=True, slots=True)
class SampleVerdict:
    """What to do with a sample that waited. good: it may be trained on; otherwise give it back."""

    group: GroupId
    sample: int
    good: bool


@dataclass(frozen=True, slots=True)
class ScoringOrder:
    """What an auditor is scoring."""

    order: int
    parts: list[AnswerPart]
    until: float


class Audits:
    """See the module docstring. `now` is monotonic seconds.

    learnt: limits from before a restart; those of another class are not used. convicted, trusted:
    workers that are known from before, by the access table.
    """

    def __init__(
        self,
        rules: RunRules,
        learnt: LimitsLearnt | None,
        *,
        members: Membership,
        versions: PublishedVersions,
        statistics: Statistics,
        convicted: Collection[PeerId] = (),
        trusted: Collection[PeerId] = (),
    ) -> None:
        assert rules.audit is not None
        self._run, self._rules = rules, rules.audit
        self._members, self._versions, self._statistics = members, versions, statistics
        self.cases = Cases(rules.audit)
        for worker in convicted:
            self.cases.of(worker).verdict = BEFORE
        self._trusted_before = trusted
        self.baseline = Baseline()
        if (
            rules.audit.trusts
            and learnt is not None
            and learnt.engine_class == rules.audit.engine_class
        ):
            self.baseline.limits = HonestLimits(learnt.k, learnt.misses)
        self._queue = ScoringQueue()
        self._orders: dict[PeerId, ScoringOrder] = {}
        self._loaded: dict[PeerId, VersionKey] = {}
        # Orders that were given up and not answered yet; until when a scorer rests after a failure;
        # and seconds per token.
        self._overdue: dict[PeerId, int] = {}
        self._rests: dict[PeerId, float] = {}
        self._token_s: dict[PeerId, float] = {}
        self._next_order = 0
        self._waiting: dict[GroupId, dict[int, WaitingSample]] = {}
        # When each waiting sample is given to another worker: (time, number, sample), a heap.
        self._patience: list[tuple[float, int, WaitingSample]] = []
        self._waits_begun = 0
        # Peers that may score: auditors, and trusted workers whose engine can.
        self._scorers: set[PeerId] = set()
        self._unjudged: list[AuditItem] = []
        # Answers of trusted workers that are queued for the limits.
        self._learning = 0
        # Answers of workers that wait for their verdict.
        self._on_trial: Counter[PeerId] = Counter()
        self._verdicts: list[SampleVerdict] = []
        self._convicted: list[PeerId] = []
        self.scored = self.skipped = 0
        self.scoring_s = self.loading_s = 0.0
        self.delay_s: float | None = None

    # --- what others ask

    @property
    def trusts(self) -> bool:
        """Whether the operator trusts some workers."""
        return self._rules.trusts

    @property
    def learns(self) -> bool:
        """Whether limits are still being learnt from trusted workers."""
        return self._rules.trusts and self.baseline.limits is None

    @property
    def pending(self) -> int:
        """Parts of answers that wait for an auditor or are being scored."""
        return len(self._queue) + sum(len(order.parts) for order in self._orders.values())

    def waits(self, group: GroupId) -> bool:
        """Whether a sample of this group waits for its verdict."""
        return group in self._waiting

    @property
    def groups_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def need_not_wait(self, worker: PeerId) -> bool:
        """Whether this worker's answers go on without a verdict."""
        if self._trusts(worker) or not self._judges:
            return True
        case = self.cases.get(worker)
        return not self.learns and case is not None and case.standing == "clear"

    def is_convicted(self, worker: PeerId) -> bool:
        case = self.cases.get(worker)
        return case is not None and bool(case.verdict) and not self._trusts(worker)

    def standing(self, worker: PeerId) -> WorkerStanding:
        """A word for the status."""
        if self._trusts(worker):
            return "trusted"
        case = self.cases.get(worker)
        if self._judges:
            return "new" if case is None else case.standing
        return "suspected" if case is not None and case.flagged >= SUSPICIOUS else ""

    def _needed(self) -> set[str]:
        """The paths of the snapshot copies that auditors still need, and may need: what workers
        write now may name any version within the staleness bound.
        """
        window = self._versions.copies()[: min(COPIES_MAX, self._run.staleness_max + 2)]
        keys = {*self._queue.versions(), *(o.parts[0].key for o in self._orders.values())}
        records = (self._versions.live(key) for key in keys)
        return {record.path for record in (*records, *window) if record is not None}

    # --- what happens

    def any_convicted(self, authors: Iterable[PeerId]) -> bool:
        """Whether one of these workers is convicted."""
        return any(map(self.is_convicted, authors))

    def delivered(
        self, group: GroupId, prompt: bytes, record: TrajectoryRecord, *, now: float
    ) -> None:
        """A result was accepted. prompt: int32."""
        for author in dict.fromkeys(span.author for span in record.spans):
            case = self.cases.of(author)
            case.delivered += 1
            drawn, audited, waits = self._drawn(author, case, group, record.sample)
            waiting = self._wait(author, group, record.sample, now) if waits else None
            if audited:
                self._enqueue(author, group, prompt, record, waiting, now, drawn=drawn)

    def scored_by_learner(self, scored: Iterable[tuple[TrajectoryRecord, TrajectoryScore]]) -> None:
        """What the learner's own forward pass found: nobody is convicted by it, but a worker whose
        logprobs are far from the learner's is audited like a flagged one.
        """
        for trajectory, score in scored:
            authors = {span.author for span in trajectory.spans}
            if score.k > GROSS.k and len(authors) == 1:
                (author,) = authors
                self.cases.doubt(author)
                self._bound(author)

    def forget(self, group: GroupId) -> None:
        """The group is gone: nothing of it waits. What is queued is scored all the same."""
        self._waiting.pop(group, None)

    def withdraw(self, group: GroupId, number: int) -> None:
        """The sample is given back: its verdict does not matter any more."""
        samples = self._waiting.get(group, {})
        if samples.pop(number, None) is not None and not samples:
            del self._waiting[group]

    def joined(self, peer: Peer) -> None:
        """A peer said hello: it has no order any more."""
        self.gone(peer.peer)
        if peer.kind == "auditor" or (peer.trusted and peer.scores):
            self._scorers.add(peer.peer)
        peer.held_back = self.learns and peer.kind == "worker" and not peer.trusted
        if peer.trusted:
            # What it wrote before a restart waited because nobody knew that it is trusted.
            theirs = [item for item in self._unjudged if item.worker == peer.peer]
            self._unjudged = [item for item in self._unjudged if item.worker != peer.peer]
            for item in theirs:
                self._settle(item.waiting, good=True)
        self._bound(peer.peer)

    def pardoned(self, worker: PeerId) -> None:
        """A person lets it in again, as a new worker."""
        self._drop_work(worker)
        self.cases.forget(worker)

    def found(self, peer: Peer, message: AnswersScored, *, now: float) -> list[AuditAction]:
        """An auditor answers an order. PeerFault: the answer does not fit the order."""
        order = self._take_order(peer, message.order)
        if order is None:
            return []
        self._measure(peer.peer, order, message.scoring_s)
        if len(message.found) != len(order.parts):
            raise PeerFault("an audit's answer does not fit its order")
        self.scored += len(order.parts)
        self.scoring_s += message.scoring_s
        self.loading_s += message.loading_s
        actions: list[AuditAction] = []
        for part, found in zip(order.parts, message.found, strict=True):
            item = part.item
            if not _is_sane(found):
                self._skip(part)
                continue
            item.found = found if item.found is None else item.found.plus(found)
            item.left -= 1
            if not item.left:
                actions += self._take_in(item, now)
        return actions

    def failed(self, peer: Peer, message: ScoringFailed) -> list[AuditAction]:
        """An auditor cannot do what was ordered: its answers wait for another try."""
        order = self._take_order(peer, message.order)
        if order is None:
            return []
        self._loaded.pop(peer.peer, None)
        self._rests[peer.peer] = self._statistics.now + REST_S
        self._put_back(order)
        return [self._statistics.fault("audit", f"{peer.name}: {message.reason}")]

    def gone(self, peer: PeerId) -> None:
        """A peer's session ended, or is another one now: it has no order any more."""
        self._loaded.pop(peer, None)
        self._scorers.discard(peer)
        self._overdue.pop(peer, None)
        if (order := self._orders.pop(peer, None)) is not None:
            self._put_back(order)

    def deadlines(self, *, now: float) -> None:
        """Give up orders and waits that take too long."""
        for peer, order in list(self._orders.items()):
            if now >= order.until:
                # It gets no other one before it has answered this one, or comes back.
                del self._orders[peer]
                self._overdue[peer] = order.order
                self._put_back(order)
        if not self._patience or self._patience[0][0] > now:
            return
        workers = {peer.peer for peer in self._members.workers() if peer.slots}
        while self._patience and self._patience[0][0] <= now:
            sample = heappop(self._patience)[2]
            if not self._still_waits(sample):
                continue
            if workers - sample.authors:
                self._decide(sample, good=False)
            else:
                self._remind(sample, now)

    def wake_at(self) -> float | None:
        times = [order.until for order in self._orders.values()]
        if self._patience:
            times.append(self._patience[0][0])
        if self._queue.versions() and self._scorers:
            due = self._queue.due_at(self._newest)
            later = [*self._rests.values(), *(() if due is None else (due,))]
            times += [at for at in later if at > self._statistics.now]
        return min(times, default=None)

    def advance(self, *, now: float) -> list[AuditAction]:
        """Give every idle auditor its next order."""
        for key in list(self._queue.versions()):
            if self._versions.live(key) is None:
                for part in self._queue.lose(key):
                    self._skip(part)
        self._versions.pinned = self._needed()
        idle = self._idle() if self._queue.versions() else []
        if not idle:
            return []
        actions: list[AuditAction] = []
        newest = self._newest
        copies = {key_of(record): record.path for record in self._versions.copies()}
        served = {peer.serving for peer in idle}
        for key in [key for key in self._queue.versions() if key not in {*copies, *served}]:
            for part in self._queue.lose(key):
                self._skip(part)
        for peer in idle:
            parts = self._queue.take(
                copies if peer.kind == "auditor" else {peer.serving},
                loaded=self._loaded.get(peer.peer, peer.serving),
                newest=newest,
                tokens_max=int(ORDER_S / self._token_s.get(peer.peer, TOKEN_S)),
                now=now,
            )
            if parts:
                actions.append(self._order(peer, parts, copies.get(parts[0].key, ""), now))
        return actions

    def take_verdicts(self) -> tuple[list[SampleVerdict], list[PeerId]]:
        """What was decided since the last call: about samples that wait, and who is convicted.

        Samples that go back come first, so that no group is complete with one of them.
        """
        verdicts, convicted = sorted(self._verdicts, key=lambda each: each.good), self._convicted
        self._verdicts, self._convicted = [], []
        for verdict in verdicts:
            sample = self._waiting.get(verdict.group, {}).get(verdict.sample)
            if sample is not None and sample.decided:
                self.withdraw(verdict.group, verdict.sample)
        return verdicts, convicted

    # --- inside: who is audited

    @property
    def _judges(self) -> bool:
        return self._rules.trusts or self.baseline.limits is not None

    def _trusts(self, worker: PeerId) -> bool:
        peer = self._members.get(worker)
        return worker in self._trusted_before if peer is None else peer.trusted

    def _drawn(
        self, author: PeerId, case: Case, group: GroupId, sample: int
    ) -> tuple[bool, bool, bool]:
        """Whether an answer of this author is drawn by its share, whether it is audited, and whether
        its group waits for that.
        """
        if self._trusts(author) and self.learns:
            return False, self._still_to_learn > 0, False
        drawn = self._draw(author, group, sample) < self._rules.share
        if self._trusts(author) or not self._judges:
            return drawn, drawn, False
        return drawn, drawn or case.left > 0, case.left > 0

    @property
    def _still_to_learn(self) -> int:
        """Answers of trusted workers that limits still lack, besides those that are queued."""
        return BASELINE_TRAJECTORIES - len(self.baseline.trusted) - self._learning

    def _draw(self, author: PeerId, group: GroupId, sample: int) -> float:
        """A number in [0, 1) that nobody outside can know."""
        text = b"audit %s %d %d" % (author.encode(), group, sample)
        digest = blake3(text, key=self._run.seed_key).digest(8)
        return int.from_bytes(digest, "big") / 2.0**64

    def _wait(self, author: PeerId, group: GroupId, number: int, now: float) -> WaitingSample:
        """One more author of this sample is to be judged."""
        samples = self._waiting.setdefault(group, {})
        if number not in samples:
            samples[number] = WaitingSample(group, number, now)
            self._remind(samples[number], now)
        samples[number].authors.add(author)
        samples[number].left += 1
        return samples[number]

    def _remind(self, sample: WaitingSample, now: float) -> None:
        """Look after `wait_s` whether it still waits."""
        self._waits_begun += 1
        heappush(self._patience, (now + self._rules.wait_s, self._waits_begun, sample))

    def _enqueue(
        self,
        author: PeerId,
        group: GroupId,
        prompt: bytes,
        record: TrajectoryRecord,
        waiting: WaitingSample | None,
        now: float,
        *,
        drawn: bool,
    ) -> None:
        spans = [span for span in record.spans if span.author == author]
        versions = tuple(span.version for span in spans)
        item = AuditItem(author, group, record.sample, versions, waiting, len(spans))
        item.drawn, item.teaches = drawn, self._trusts(author) and self.learns
        self._learning += item.teaches
        if waiting is not None:
            self._on_trial[author] += 1
            self._bound(author)
        (seed,) = sample_seeds(self._run.seed_key, group, (record.sample,))
        for span in spans:
            answer = _to_score(prompt, record, span, None if self._rules.replay == "none" else seed)
            for lost in self._queue.put(AnswerPart(item, span.key, answer, now)):
                self._skip(lost)

    # --- inside: orders

    @property
    def _newest(self) -> VersionKey | None:
        newest = self._versions.newest
        return None if newest is None else key_of(newest)

    def _idle(self) -> list[Peer]:
        """The auditors without an order."""
        now = self._statistics.now
        self._rests = {peer: until for peer, until in self._rests.items() if until > now}
        busy = self._orders.keys() | self._overdue.keys() | self._rests.keys()
        peers = map(self._members.get, sorted(self._scorers - busy))
        return [
            peer
            for peer in peers
            if peer is not None and peer.alive and (peer.kind == "auditor" or peer.serving)
        ]

    def _order(self, peer: Peer, parts: list[AnswerPart], path: str, now: float) -> Send:
        assert peer.session is not None
        order, key = self._next_order, parts[0].key
        self._next_order += 1
        self._orders[peer.peer] = ScoringOrder(order, parts, now + ORDER_S_MAX)
        self._loaded[peer.peer] = key
        answers = tuple(part.answer for part in parts)
        rules = self._run
        return Send(
            peer.session,
            ScoreAnswers(
                order, key.version, key.digest, path, rules.temperature, rules.top_p, self._rules.replay, answers
            ),
        )  # fmt: skip

    def _take_order(self, peer: Peer, number: int) -> ScoringOrder | None:
        """PeerFault: this peer may not audit. None: the order is another one's by now."""
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
            for lost in self._queue.put(part):
                self._skip(lost)

    def _skip(self, part: AnswerPart) -> None:
        """Nobody will score this part, so its item has no verdict."""
        self.skipped += 1
        item = part.item
        if item.over:
            return
        self._over(item)
        self._settle(item.waiting, good=False)
        if item.waiting is None and self._judges and not self._trusts(item.worker):
            # It owes an audit: its next answer waits for one.
            case = self.cases.of(item.worker)
            case.left = max(case.left, 1)
            self._bound(item.worker)

    def _drop_work(self, worker: PeerId) -> None:
        """Nothing that this worker wrote is scored any more."""
        for part in self._queue.forget(worker):
            if not part.item.over:
                self._over(part.item)

    def _measure(self, peer: PeerId, order: ScoringOrder, scoring_s: float) -> None:
        """How long a token takes here, so that orders take ORDER_S."""
        tokens = sum(part.tokens for part in order.parts)
        before = self._token_s.get(peer, TOKEN_S)
        self._token_s[peer] = before + 0.5 * (max(0.0, scoring_s) / tokens - before)
        keep_newest(self._token_s, SCORERS_MAX)

    def _over(self, item: AuditItem) -> None:
        """An item is scored, or given up."""
        item.over = True
        self._learning -= item.teaches
        if item.waiting is not None:
            self._on_trial -= Counter([item.worker])
            self._bound(item.worker)

    def _bound(self, worker: PeerId) -> None:
        """A worker on trial holds few samples at a time, so that it cannot flood the auditor."""
        peer = self._members.get(worker)
        if peer is None:
            return
        allowed = self._slots_allowed(worker)
        if allowed != peer.slots_allowed:
            peer.slots_allowed = allowed
            self._members.changed.add(worker)

    def _slots_allowed(self, worker: PeerId) -> int | None:
        """None: all that it has. The more of its answers were audited, the more slots it may use."""
        if self._trusts(worker) or not self._judges:
            return None
        if not self.need_not_wait(worker):
            return max(0, TRIAL_MAX - self._on_trial[worker])
        return TRIAL_MAX + SLOTS_PER_AUDIT * self.cases.of(worker).audited

    # --- inside: verdicts

    def _take_in(self, item: AuditItem, now: float) -> list[AuditAction]:
        """All of an item is scored."""
        assert item.found is not None
        if not self._rules.logprobs:
            item.found = replace(item.found, k=0.0)
        if item.over:
            return []
        self._over(item)
        if self._trusts(item.worker):
            self._settle(item.waiting, good=True)
        if item.teaches and self.learns:
            return [*self._told(item, (), ""), *self._learn(item.found, now)]
        if self.learns:
            if len(self._unjudged) < UNJUDGED_MAX:
                self._unjudged.append(item)
            else:
                self.skipped += 1
            return []
        return self._judge(item, now)

    def _learn(self, found: Evidence, now: float) -> list[AuditAction]:
        self.baseline.add(found)
        limits = self.baseline.limits
        if limits is None:
            return []
        for peer in self._members:
            if peer.held_back:
                peer.held_back = False
                self._members.changed.add(peer.peer)
            self._bound(peer.peer)
        waiting, self._unjudged = self._unjudged, []
        learnt = LimitsLearnt(self._rules.engine_class, limits.k, limits.misses)
        actions: list[AuditAction] = [
            Persist(learnt), Note("audit", f"limits are learnt: K {limits.k:.2g}, missed seeds {limits.misses:.2g}")
        ]  # fmt: skip
        for item in waiting:
            actions += self._judge(item, now)
        return actions

    def _judge(self, item: AuditItem, now: float) -> list[AuditAction]:
        assert item.found is not None
        limits = self.baseline.limits
        if limits is None:
            reasons = self.cases.suspect(item.worker, item.found, GROSS)
            return self._told(item, reasons, "")
        reasons, verdict = self.cases.judge(item.worker, item.found, limits, drawn=item.drawn)
        self._delay(item.waiting, now)
        self._settle(item.waiting, good=not reasons and not verdict)
        actions = self._told(item, reasons, verdict)
        self._bound(item.worker)
        if verdict and self._trusts(item.worker):
            text = f"{self._name(item.worker)} is trusted, but its answers are not right: {verdict}"
            return [*actions, self._statistics.fault("audit", text)]
        if verdict:
            self._convicted.append(item.worker)
            self._drop_work(item.worker)
            text = f"{self._name(item.worker)} is convicted: {verdict}"
            fault = self._statistics.fault("audit", text)
            return [*actions, fault, Convict(item.worker, verdict)]
        return actions

    def _told(self, item: AuditItem, reasons: tuple[str, ...], verdict: str) -> list[AuditAction]:
        assert item.found is not None
        name = self._name(item.worker)
        return [
            AuditTold(
                item.worker, name, item.group, item.sample, item.versions, item.found, reasons, verdict
            )
        ]  # fmt: skip

    def _settle(self, sample: WaitingSample | None, *, good: bool) -> None:
        """A sample has a verdict about one of its authors, or will not get one."""
        if sample is None or not self._still_waits(sample):
            return
        sample.left -= 1
        if not good:
            self._decide(sample, good=False)
        elif not sample.left:
            self._decide(sample, good=True)

    def _decide(self, sample: WaitingSample, *, good: bool) -> None:
        # It is taken out of what waits only with its verdict: its group must not go on before.
        sample.decided = True
        self._verdicts.append(SampleVerdict(sample.group, sample.sample, good))

    def _still_waits(self, sample: WaitingSample) -> bool:
        """False: it is decided, its group is gone, or another worker got the sample meanwhile."""
        if sample.decided:
            return False
        return self._waiting.get(sample.group, {}).get(sample.sample) is sample

    def _delay(self, sample: WaitingSample | None, now: float) -> None:
        if sample is not None and self._still_waits(sample):
            before = now - sample.since if self.delay_s is None else self.delay_s
            self.delay_s = before + (now - sample.since - before) / DELAY_MEMORY

    def _name(self, worker: PeerId) -> str:
        peer = self._members.get(worker)
        return worker if peer is None else peer.name

    def check(self) -> None:
        self._queue.check()
        self.cases.check()
        assert all(self._waiting.values())
        assert all(
            each.left > 0 or each.decided
            for samples in self._waiting.values()
            for each in samples.values()
        )
        assert len(self._unjudged) <= UNJUDGED_MAX
        assert self._learning >= 0
        assert all(count > 0 for count in self._on_trial.values())
        assert not any(self._trusts(worker) for worker in self._convicted)


def _to_score(
    prompt: bytes, record: TrajectoryRecord, span: AuthoredSpan, seed: int | None
) -> AnswerToScore:
    start, end = 4 * span.start, 4 * span.end
    return AnswerToScore(
        prompt + record.tokens[:start],
        record.tokens[start:end],
        record.logprobs[start:end],
        span.start,
        seed,
    )


def _is_sane(found: Evidence) -> bool:
    numbers = (found.k, found.excess, found.variance, found.cold, found.hot)
    if not (all(map(math.isfinite, numbers)) and found.k >= 0 <= found.variance):
        return False
    return 0 <= (found.misses or 0) <= found.tokens > 0
