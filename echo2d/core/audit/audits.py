"""The audit of a run: which answers are scored again, which groups wait for that, and which workers are convicted.

    answer accepted --drawn--> waits for an auditor --> scored --> judged --> group goes on
          |                                                          |-> flagged: given back
          +-- of a new or flagged worker: its group waits            +-> worker convicted

An auditor is the run's own process on the learner host, or a worker that the operator trusts; it
holds the weights and computes what `evidence` describes. Limits are learnt from the answers of trusted
workers, and no other worker gets leases before they are learnt. If the operator trusts no worker, a
share of the answers is scored, but no group waits and no worker is convicted; the operator only sees
which workers look like liars.
If a sample has waited for its verdict for `wait_s`, another worker makes it again, if there is one.
Each answer is judged by the limits of its class. Workers that compute with quantized weights have a
class of their own, and get no leases before its limits are learnt. Where workers may refit in place,
answers that one worker wrote with several versions are another class: their KV caches may mix
versions, so a clean prefill does not give their logprobs. Until the limits of this class are learnt,
its answers are flagged only if no engine can have written them.
Kept true: no batch contains an answer that waits for its verdict; a trusted worker is never convicted.
Not here: which auditor scores when (`scorers`), what waits (`waiting_samples`), the statistics
(`case`), what happens to groups (`work/training/groups`) and to a convicted worker (`coordinator/state`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from blake3 import blake3

from echo2d.core.audit.baseline import BASELINE_TRAJECTORIES, GROSS, Baseline, HonestLimits
from echo2d.core.audit.case import Case, Cases
from echo2d.core.audit.events import AuditAction, AuditTold, Convict, LimitsLearnt
from echo2d.core.audit.scorers import Scorers
from echo2d.core.audit.scoring_queue import AnswerPart, AuditItem
from echo2d.core.audit.waiting_samples import WaitingSample, WaitingSamples
from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.cluster.events import Note, Persist
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.protocol.columns import cut_columns, wanted_columns
from echo2d.core.protocol.control_messages import (
    AnswersScored,
    AnswerToScore,
    ScoringFailed,
)
from echo2d.core.protocol.evidence import TOLERANCES, Evidence
from echo2d.core.protocol.experts import EXPERTS
from echo2d.core.protocol.sampling import WHOLE, Sampling
from echo2d.core.protocol.seeds import sample_seeds
from echo2d.core.protocol.trajectory import AuthoredSpan, TrajectoryRecord, TrajectoryScore
from echo2d.core.rules.audit import AnswerClass

# At most this many scored answers wait for limits; any others count as not scored.
UNJUDGED_MAX = 4096
# A new or flagged worker has at most this many samples that are leased or wait for their verdict.
TRIAL_MAX = 32
BEFORE = "convicted before the coordinator was started"
PLAIN, MIXED = AnswerClass(), AnswerClass(mixed=True)
# The quantization of a worker that has not said hello since a restart. Its class has no limits, so
# its answers are judged only after the worker has said hello.
_UNKNOWN = "?"
WorkerStanding = Literal["", "trusted", "new", "clear", "flagged", "convicted", "suspected"]


class Audits:
    """See the module docstring. `now` is monotonic seconds.

    learnt: limits from before a restart. convicted, trusted: workers that the access table lists as
    such at the start.
    """

    def __init__(
        self,
        parts: RunParts,
        learnt: Iterable[LimitsLearnt],
        *,
        convicted: Collection[PeerId] = (),
        trusted: Collection[PeerId] = (),
    ) -> None:
        rules, members, versions, statistics = (
            parts.rules,
            parts.members,
            parts.versions,
            parts.statistics,
        )
        assert rules.audit is not None
        self._run, self._rules = rules, rules.audit
        self._members, self._statistics = members, statistics
        self.cases = Cases(rules.audit)
        for worker in convicted:
            self.cases.of(worker).verdict = BEFORE
        self._trusted_before = trusted
        # Only classes of trusted workers are kept, so that no other worker can fill this with invented classes.
        self._baselines: dict[AnswerClass, Baseline] = {}
        # Limits from before a restart, by the name of their class; used until the class has a baseline.
        self._learnt_before = {
            each.engine_class: HonestLimits(each.k, each.misses, each.tolerance, each.rerouted)
            for each in learnt
            if rules.audit.trusts
        }
        self.baseline, self.mixed = self._of(PLAIN), self._of(MIXED)
        self.scorers = Scorers(rules, members=members, versions=versions, lost=self._skip)
        self.waiting = WaitingSamples(rules.audit.wait_s)
        self._unjudged: list[AuditItem] = []
        # By class, how many answers of trusted workers are queued so that limits are learnt from them.
        self._learning: Counter[AnswerClass] = Counter()
        # How many answers of each worker wait for their verdict.
        self._on_trial: Counter[PeerId] = Counter()
        self._convicted: list[PeerId] = []
        self.skipped = 0

    # --- what others ask

    @property
    def trusts(self) -> bool:
        """Whether the operator trusts some workers."""
        return self._rules.trusts

    @property
    def in_place(self) -> bool:
        """Whether workers may refit in place."""
        return self._rules.in_place

    def learns(self, quantization: str = "") -> bool:
        """Whether the limits of workers with this quantization are still being learnt."""
        found = (self._limits(AnswerClass(quantization, mixed)) for mixed in (False, True))
        return self._rules.trusts and not any(found)

    def need_not_wait(self, worker: PeerId) -> bool:
        """Whether this worker's answers are used without a verdict."""
        if self._trusts(worker) or not self._judges:
            return True
        case = self.cases.get(worker)
        learns = self.learns(self._quantization(worker))
        return not learns and case is not None and case.standing == "clear"

    def is_convicted(self, worker: PeerId) -> bool:
        case = self.cases.get(worker)
        return case is not None and bool(case.verdict) and not self._trusts(worker)

    def standing(self, worker: PeerId) -> WorkerStanding:
        """How far this worker is trusted, in a word for the status."""
        if self._trusts(worker):
            return "trusted"
        case = self.cases.get(worker)
        if self._judges:
            return "new" if case is None else case.standing
        # Without limits no worker is convicted, but a worker with 5 flagged answers is shown as suspected.
        return "suspected" if case is not None and case.flagged >= 5 else ""

    # --- what happens

    def any_convicted(self, authors: Iterable[PeerId]) -> bool:
        """Whether one of these workers is convicted."""
        return any(map(self.is_convicted, authors))

    def delivered(
        self,
        group: GroupId,
        prompt: bytes,
        record: TrajectoryRecord,
        *,
        sampling: Sampling = WHOLE,
        rng_seed: int | None = None,
        now: float,
    ) -> None:
        """A whole sample was accepted: an answer, or an episode. prompt: int32. sampling: how it was drawn. rng_seed:
        by which; None: by the run's own seed for this sample.

        Each author is judged by its own spans only; tokens that an environment gave have no author.
        """
        for author in dict.fromkeys(span.author for span in record.spans):
            case = self.cases.of(author)
            case.delivered += 1
            mixed = self._rules.in_place and _mixes(record, author)
            kind = AnswerClass(self._quantization(author), mixed)
            drawn, audited, waits = self._drawn(author, case, group, record.sample, kind)
            waiting = self.waiting.begin(author, group, record.sample, now) if waits else None
            if audited:
                self._enqueue(
                    author, group, prompt, record, waiting, now, sampling=sampling, rng_seed=rng_seed,
                    drawn=drawn, kind=kind,
                )  # fmt: skip

    def scored_by_learner(self, scored: Iterable[tuple[TrajectoryRecord, TrajectoryScore]]) -> None:
        """Take in the scores of the learner's own forward pass. These scores never convict a worker. A worker
        whose logprobs are far from the learner's is audited like a flagged worker.
        """
        for trajectory, score in scored:
            authors = {span.author for span in trajectory.spans}
            if score.k > GROSS.k and len(authors) == 1:
                (author,) = authors
                self.cases.doubt(author)
                self._bound(author)

    def joined(self, peer: Peer, *, now: float) -> list[AuditAction]:
        """A peer said hello."""
        self.scorers.joined(peer)
        learns = self.learns(peer.quantization)
        peer.service.held_back = learns and peer.kind == "worker" and not peer.trusted
        # This worker's answers from before a restart were held until its quantization was known.
        theirs = [item for item in self._unjudged if item.worker == peer.peer]
        self._unjudged = [item for item in self._unjudged if item.worker != peer.peer]
        actions: list[AuditAction] = []
        for item in theirs:
            if item.kind.quantization == _UNKNOWN:
                item.kind = item.kind._replace(quantization=peer.quantization)
            if peer.trusted:
                self.waiting.settle(item.waiting, item.worker, good=True)
            else:
                actions += self._judge_or_keep(item, now)
        self._bound(peer.peer)
        return actions

    def pardoned(self, worker: PeerId) -> None:
        """A person pardoned this worker: it starts again as a new one."""
        self._drop_work(worker)
        self.cases.forget(worker)

    def found(self, peer: Peer, message: AnswersScored, *, now: float) -> list[AuditAction]:
        """An auditor answered an order. PeerFault: the answer does not fit the order."""
        actions: list[AuditAction] = []
        for part, found in zip(self.scorers.answered(peer, message), message.found, strict=False):
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
        """An auditor failed at its order: the answers in the order wait for another try."""
        if not self.scorers.failed(peer, message.order, self._statistics.now):
            return []
        return [self._statistics.fault("audit", f"{peer.name}: {message.reason}")]

    def deadlines(self, *, now: float) -> None:
        """Give up orders and waits that take too long."""
        self.scorers.deadlines(now)
        workers: set[PeerId] | None = None
        for sample in self.waiting.overdue(now):
            if workers is None:
                workers = {peer.peer for peer in self._members.workers() if peer.slots}
            if workers - sample.authors:
                self.waiting.refuse(sample, sample.authors)
            else:
                self.waiting.look_later(sample, now)

    def wake_at(self) -> float | None:
        times = (self.scorers.wake_at(self._statistics.now), self.waiting.wake_at)
        return min((at for at in times if at is not None), default=None)

    def take_convicted(self) -> list[PeerId]:
        """The workers that were convicted since the last call."""
        convicted, self._convicted = self._convicted, []
        return convicted

    # --- inside: who is audited

    @property
    def _judges(self) -> bool:
        return self._rules.trusts or self.baseline.limits is not None

    def _trusts(self, worker: PeerId) -> bool:
        peer = self._members.get(worker)
        return worker in self._trusted_before if peer is None else peer.trusted

    def _drawn(
        self, author: PeerId, case: Case, group: GroupId, sample: int, kind: AnswerClass
    ) -> tuple[bool, bool, bool]:
        """Decide about an answer of this author. Returns three booleans: the answer was drawn for an audit; it is
        audited, drawn or not; its group waits for the verdict.
        """
        if self._teaches(author, kind):
            return False, self._still_to_learn(kind) > 0, False
        drawn = self._draw(author, group, sample) < self._rules.share
        if self._trusts(author) or not self._judges:
            return drawn, drawn, False
        return drawn, drawn or case.left > 0, case.left > 0

    def _quantization(self, worker: PeerId) -> str:
        peer = self._members.get(worker)
        if peer is None:
            return _UNKNOWN if self._run.quantized_workers else ""
        return peer.quantization

    def _of(self, kind: AnswerClass) -> Baseline:
        if kind not in self._baselines:
            self._baselines[kind] = Baseline(limits=self._limits(kind))
        return self._baselines[kind]

    def _limits(self, kind: AnswerClass) -> HonestLimits | None:
        """The limits of this class; None: not learnt yet."""
        baseline = self._baselines.get(kind)
        if baseline is None:
            return self._learnt_before.get(self._rules.name_of(kind))
        return baseline.limits

    def _teaches(self, author: PeerId, kind: AnswerClass) -> bool:
        """Whether limits are learnt from this author's answers of this class."""
        known = kind.quantization != _UNKNOWN
        return known and self._rules.trusts and self._trusts(author) and self._limits(kind) is None

    def _still_to_learn(self, kind: AnswerClass) -> int:
        """How many more answers of trusted workers the limits need, beyond those that are queued."""
        there = len(self._of(kind).trusted)
        return BASELINE_TRAJECTORIES - there - self._learning[kind]

    def _draw(self, author: PeerId, group: GroupId, sample: int) -> float:
        """A number in [0, 1) that no worker can predict."""
        text = b"audit %s %d %d" % (author.encode(), group, sample)
        digest = blake3(text, key=self._run.seed_key).digest(8)
        return int.from_bytes(digest, "big") / 2.0**64

    def _enqueue(
        self,
        author: PeerId,
        group: GroupId,
        prompt: bytes,
        record: TrajectoryRecord,
        waiting: WaitingSample | None,
        now: float,
        *,
        sampling: Sampling,
        rng_seed: int | None,
        drawn: bool,
        kind: AnswerClass,
    ) -> None:
        spans = [span for span in record.spans if span.author == author]
        versions = tuple(span.version for span in spans)
        item = AuditItem(author, group, record.sample, versions, waiting, len(spans))
        item.drawn, item.kind = drawn, kind
        item.teaches = self._teaches(author, kind)
        self._learning[kind] += item.teaches
        if waiting is not None:
            self._on_trial[author] += 1
            self._bound(author)
        seed = None
        if self._rules.seeds != "none":
            (own,) = sample_seeds(self._run.seed_key, group, (record.sample,))
            seed = own if rng_seed is None else rng_seed
        for span in spans:
            answer = _to_score(prompt, record, span, seed, sampling)
            self.scorers.put(AnswerPart(item, span.key, answer, now))

    def _skip(self, part: AnswerPart) -> None:
        """No auditor will score this part, so its item gets no verdict."""
        self.skipped += 1
        item = part.item
        if item.over:
            return
        self._end_item(item)
        self.waiting.settle(item.waiting, item.worker, good=False)
        if item.waiting is None and self._judges and not self._trusts(item.worker):
            # The worker owes an audit: its next answer is audited, and the group waits for that verdict.
            case = self.cases.of(item.worker)
            case.left = max(case.left, 1)
            self._bound(item.worker)

    def _drop_work(self, worker: PeerId) -> None:
        """Stop scoring what this worker wrote."""
        for part in self.scorers.forget(worker):
            if not part.item.over:
                self._end_item(part.item)

    def _end_item(self, item: AuditItem) -> None:
        """An item is scored, or given up."""
        item.over = True
        self._learning[item.kind] -= item.teaches
        if item.waiting is not None:
            self._on_trial -= Counter([item.worker])
            self._bound(item.worker)

    def _bound(self, worker: PeerId) -> None:
        """A worker on trial holds few samples at a time, so that it cannot flood the auditor."""
        peer = self._members.get(worker)
        if peer is None:
            return
        allowed = self._slots_allowed(worker)
        if allowed != peer.service.slots_allowed:
            peer.service.slots_allowed = allowed
            self._members.changed.add(worker)

    def _slots_allowed(self, worker: PeerId) -> int | None:
        """How many slots this worker may use; the number grows with each audited answer. None: all slots."""
        if self._trusts(worker) or not self._judges:
            return None
        if not self.need_not_wait(worker):
            return max(0, TRIAL_MAX - self._on_trial[worker])
        # Each audited answer lets a clear worker use 16 more slots. So a worker that claims thousands
        # of slots gets them only after many audited answers.
        return TRIAL_MAX + 16 * self.cases.of(worker).audited

    # --- inside: verdicts

    def _take_in(self, item: AuditItem, now: float) -> list[AuditAction]:
        """Every part of this item is scored: judge it, or learn limits from it."""
        assert item.found is not None
        if not self._rules.logprobs:
            item.found = replace(item.found, k=0.0)
        if item.over:
            return []
        self._end_item(item)
        if self._trusts(item.worker):
            self.waiting.settle(item.waiting, item.worker, good=True)
        if item.teaches and self._limits(item.kind) is None:
            return [*self._report(item, (), ""), *self._learn(item.found, now, item.kind)]
        return self._judge_or_keep(item, now)

    def _judge_or_keep(self, item: AuditItem, now: float) -> list[AuditAction]:
        """Judge this item, or keep it until the limits of its class are learnt."""
        if self.learns(item.kind.quantization):
            if len(self._unjudged) < UNJUDGED_MAX:
                self._unjudged.append(item)
            else:
                self.skipped += 1
            return []
        return self._judge(item, now)

    def _learn(self, found: Evidence, now: float, kind: AnswerClass) -> list[AuditAction]:
        baseline = self._of(kind)
        baseline.add(found)
        limits = baseline.limits
        if limits is None:
            return []
        for peer in self._members:
            if peer.service.held_back and not self.learns(peer.quantization):
                peer.service.held_back = False
                self._members.changed.add(peer.peer)
            self._bound(peer.peer)
        still = [item for item in self._unjudged if self.learns(item.kind.quantization)]
        waiting = [item for item in self._unjudged if not self.learns(item.kind.quantization)]
        self._unjudged = still
        learnt = LimitsLearnt(self._rules.name_of(kind), *dataclasses.astuple(limits))
        of = f" of {kind.quantization} workers" if kind.quantization else ""
        which = f"limits of answers{of} whose KV mixes versions" if kind.mixed else f"limits{of}"
        text = f"{which} are learnt: K {limits.k:.2g}, missed seeds {limits.misses:.2g}"
        if limits.exact:
            text += "; they hold only for the precision of your trusted workers"
        actions: list[AuditAction] = [Persist(learnt), Note("audit", text)]
        for item in waiting:
            actions += self._judge(item, now)
        return actions

    def _judge(self, item: AuditItem, now: float) -> list[AuditAction]:
        assert item.found is not None
        limits = self._limits(item.kind)
        if limits is None and self._judges:
            # Only limits of other classes are learnt.
            limits = GROSS
        if limits is None:
            reasons = self.cases.suspect(item.worker, item.found, GROSS)
            return self._report(item, reasons, "")
        reasons, verdict = self.cases.judge(item.worker, item.found, limits, drawn=item.drawn)
        self.waiting.measure(item.waiting, now)
        self.waiting.settle(item.waiting, item.worker, good=not reasons and not verdict)
        actions = self._report(item, reasons, verdict)
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

    def _report(self, item: AuditItem, reasons: tuple[str, ...], verdict: str) -> list[AuditAction]:
        assert item.found is not None
        name = self._name(item.worker)
        return [
            AuditTold(
                item.worker, name, item.group, item.sample, item.versions, item.found, reasons, verdict
            )
        ]  # fmt: skip

    def _name(self, worker: PeerId) -> str:
        peer = self._members.get(worker)
        return worker if peer is None else peer.name

    def check(self) -> None:
        self.scorers.check()
        self.waiting.check()
        self.cases.check()
        assert len(self._unjudged) <= UNJUDGED_MAX
        assert all(count >= 0 for count in self._learning.values())
        mixed = (each for kind, each in self._baselines.items() if kind.mixed)
        assert self._rules.in_place or not any(each.trusted for each in mixed)
        assert all(count > 0 for count in self._on_trial.values())
        assert not any(self._trusts(worker) for worker in self._convicted)


def _mixes(record: TrajectoryRecord, author: PeerId) -> bool:
    """Whether this author changed to another version while it wrote.

    A worker that takes over a sample computes the KV caches itself, so they do not mix versions. But
    if the worker wrote an earlier turn of the sample, its engine may still hold that prefix, even if
    another worker wrote in between.
    """
    if record.given:
        return len({span.key for span in record.spans if span.author == author}) > 1
    return any(one.author == author == other.author for one, other in pairwise(record.spans))


def _to_score(
    prompt: bytes,
    record: TrajectoryRecord,
    span: AuthoredSpan,
    seed: int | None,
    sampling: Sampling,
) -> AnswerToScore:
    branch, start, end = 4 * record.branch_start(span.start), 4 * span.start, 4 * span.end
    return AnswerToScore(
        prompt + record.tokens[branch:start],
        record.tokens[start:end],
        record.logprobs[start:end],
        record.written_before(span.start),
        seed,
        sampling,
        cut_columns(wanted_columns(record.columns, (EXPERTS,)), span.start, span.end),
    )


def _is_sane(found: Evidence) -> bool:
    numbers = (found.k, found.excess, found.variance, found.cold, found.hot)
    if not (all(map(math.isfinite, numbers)) and found.k >= 0 <= found.variance):
        return False
    if not 0 <= found.rerouted <= 1:
        return False
    misses = (0,) * len(TOLERANCES) if found.misses is None else found.misses
    return (
        found.tokens > 0
        and len(misses) == len(TOLERANCES)
        and 0 <= min(misses) <= max(misses) <= found.tokens
    )
