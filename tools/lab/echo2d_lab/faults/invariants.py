"""The judge of a simulated run: the invariants that must always hold, checked at every record, answer and lease.

It sees at once what no single process knows: the ledger, which worker got which lease, which version an engine really
loaded, which rewards the task gives. It uses none of the code that it judges. Numbers as in docs/design/invariants.md:

    I1 no token is too old, and none is of a revoked version when its batch freezes
    I2 spans name the versions that wrote the tokens, handed over or not
    I4 acknowledged data are durable, and are trained on once
    I5 groups are whole
    I7 a result comes only from the worker that has the lease
    I8 (`check` of the cores)
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable

from echo2d.core.audit.events import Convict
from echo2d.core.base.ids import Digest, FormId, GroupId, PeerId, RequestId
from echo2d.core.broadcast.events import SendRoot
from echo2d.core.cluster.events import PublishAsked, Reply, Send, VersionPublished
from echo2d.core.coordinator.events import (
    BatchAsked,
    CheckpointAsked,
    CheckpointKept,
    CommitAsked,
    CoordinatorAction,
    CoordinatorEvent,
    CoordinatorRecord,
    EpochOpened,
    RefuseAsked,
    SessionAsked,
)
from echo2d.core.coordinator.state import CoordinatorState
from echo2d.core.protocol.control_messages import (
    EncodeVersion,
    HeldLease,
    LeaseGranted,
    SampleAnswered,
    VersionKey,
)
from echo2d.core.protocol.trajectory import (
    BatchBody,
    Partial,
    StoredGroup,
    TrajectoryRecord,
    batch_digest,
    pack_batch,
    unpack_batch,
    unpack_logprobs,
    unpack_tokens,
)
from echo2d.core.rules.run import RunRules
from echo2d.core.weights.form import FormFacts
from echo2d.core.weights.signed_index import Root
from echo2d.core.work.evaluation.events import Evaluated
from echo2d.core.work.events import (
    BatchCommitted,
    BatchFrozen,
    EpisodeForgotten,
    GroupDropped,
    LeaseGiven,
    PromptTaken,
    SampleKept,
    SampleLeftOut,
    SampleReturned,
    SampleRewarded,
    StepEnvironment,
    TurnKept,
)
from echo2d.core.work.leases import TRAINING, kind_of
from echo2d.core.work.training.batch_order import Quotas
from echo2d_lab.faults.engine import VOCAB, mark
from echo2d_lab.faults.environment import branches_after, given_after, turns_of
from echo2d_lab.faults.fault_schedule import NEVER_CLEAR
from echo2d_lab.faults.memory_ledger import MemoryLedger
from echo2d_lab.faults.scored_episodes import ScoredEpisodes


def reward_of(cursor: int, sample: int) -> float:
    """The task's reward; for every sixth prompt all rewards are equal."""
    return 1.0 if cursor % 6 == 0 else float((cursor + sample) % 2)


class InvariantChecker:
    """See the module docstring. honest(peer): whether the peer never lies."""

    def __init__(self, rules: RunRules, honest: Callable[[PeerId], bool]) -> None:
        self.ledger = MemoryLedger()
        self._rules, self._honest = rules, honest
        self._quotas = Quotas([task.weight for task in rules.tasks], rules.groups_per_step)
        self._asked: dict[RequestId, CoordinatorEvent] = {}
        self._granted: dict[HeldLease, tuple[PeerId, LeaseGranted]] = {}
        # The worker of each attempt, from the ledger.
        self.given_to: dict[HeldLease, PeerId] = {}
        # The workers that may have written tokens of a sample.
        self._writers: dict[tuple[GroupId, int], set[PeerId]] = defaultdict(set)
        self._kept: set[tuple[HeldLease, int]] = set()
        self._seeds: dict[tuple[GroupId, int], int] = {}
        self._step_of: dict[GroupId, int] = {}  # the step of every group that was ever frozen
        self._trained_in: dict[GroupId, int] = {}  # the step of every group in a committed batch
        self._refused: set[GroupId] = set()  # groups that the learner refused
        self.barred: set[PeerId] = set()
        self.convicted: set[PeerId] = set()
        # Kept answers that the version in their spans would not have written.
        self._lies: set[tuple[GroupId, int]] = set()
        # Rewards of samples that were drawn but are not trained on.
        self._surplus: dict[GroupId, list[float]] = defaultdict(list)
        audit = rules.audit
        self._all_wait = audit is not None and audit.trusts and audit.newcomer == NEVER_CLEAR
        self.steps_committed = self.newest_step = 0
        # Leases that continue another worker's output, and results of such leases.
        self.handed_over = self.joined = 0
        self.evaluated = 0  # whole evaluations
        self.scored_episodes = ScoredEpisodes(honest, self._published)
        self.outlived = 0  # results under leases of an earlier coordinator process
        self._before: frozenset[HeldLease] = frozenset()
        self._facts: dict[FormId, FormFacts] = {}  # facts of every signed form
        # Forms that the seed was ordered to make, by kind; "aside": for a few peers only.
        self.forms: Counter[str] = Counter()

    @property
    def audited(self) -> bool:
        return self._rules.audit is not None

    def restarted(self) -> None:
        """Record that another coordinator process begins."""
        self._before = frozenset(self._granted)
        self.scored_episodes.restarted()

    def compare(self, state: CoordinatorState) -> None:
        """Check that the machine holds exactly the durable data. Call it when no record waits to be written."""
        groups, ledger = state.status().groups, self.ledger
        in_batches = {
            group for frozen in ledger.frozen.values() for group in frozen.groups
        } & ledger.groups.keys()
        assert groups.buffered + groups.in_flight == len(ledger.groups) - len(in_batches), (
            "a group got lost"
        )

    # --- records that become durable

    def persist(  # noqa: C901 - one line per record
        self, record: CoordinatorRecord
    ) -> None:
        """Judge the record, and write it."""
        match record:
            case EpochOpened(epoch):
                assert epoch == self.ledger.epoch + 1
            case VersionPublished():
                self._check_published(record)
            case PromptTaken(_, cursor, _, source):
                open_groups = self.ledger.groups.values()
                taken = {(stored.source.task, stored.cursor) for stored in open_groups}
                assert (source.task, cursor) not in taken, "a prompt twice"
            case Evaluated():
                self._check_evaluated(record)
            case LeaseGiven():
                self.given_to[record.key] = record.worker
                self._check_given(record)
            case SampleKept(group, lease, attempt, kept):
                self._check_kept(group, HeldLease(lease, attempt), kept)
            case TurnKept():
                self._check_turn(record)
            case EpisodeForgotten(group, sample):
                self._lies.discard((group, sample))
            case SampleReturned(group, sample):
                assert self.audited
                assert group not in self._step_of, "a sample of a frozen group is returned"
                self._lies.discard((group, sample))
            case SampleLeftOut() | SampleRewarded():
                self._check_rewarded(record)
            case GroupDropped():
                self._check_dropped(record)
            case BatchFrozen():
                self._check_frozen(record)
            case BatchCommitted():
                self._check_committed(record)
            case CheckpointKept(step):
                assert self.ledger.checkpoint < step <= self._last_committed()
            case _:
                pass
        self.ledger.append(record)

    def _published(self) -> list[VersionKey]:
        return [VersionKey(each.version, each.digest) for each in self.ledger.published.values()]

    def _last_committed(self) -> int:
        """The last committed step of the epoch in force."""
        ledger = self.ledger
        mine = [step for step, each in ledger.committed.items() if each.epoch == ledger.epoch]
        return max([ledger.resume_step, ledger.checkpoint, *mine])

    def _check_published(self, record: VersionPublished) -> None:
        assert record.publish_seq == max(self.ledger.published, default=0) + 1
        assert record.epoch == self.ledger.epoch
        assert record.version <= self._last_committed()

    def _check_evaluated(self, record: Evaluated) -> None:
        key = VersionKey(record.version, record.digest)
        assert key not in self.ledger.revoked
        assert record.number == len(self.ledger.evaluated) + 1
        assert 0 <= record.rows <= record.of
        assert (record.rows == 0) == math.isnan(record.mean)
        self.evaluated += record.rows == record.of

    def _check_given(self, record: LeaseGiven) -> None:
        """A lease is only for samples without a result. A lease with tokens is for one sample; the tokens are valid."""
        stored = self.ledger.groups[record.group]
        assert not {each.sample for each in stored.record.trajectories} & set(record.samples)
        assert len(record.samples) == 1 or not record.base.length
        revoked = [
            VersionKey(span.version, span.digest) in self.ledger.revoked
            for span in record.base.spans
        ]
        assert not any(revoked), "I1: a lease continues output of a revoked version"
        tokens, logprobs = (
            unpack_tokens(record.base.tokens).tolist(),
            unpack_logprobs(record.base.logprobs).tolist(),
        )
        task = self._rules.task(stored.source.task)
        assert task is not None
        start = record.base.turn_start
        assert len(tokens) == len(logprobs) < start + task.max_new_tokens
        assert all(0 <= token < VOCAB for token in tokens)
        assert not set(task.stop_token_ids) & set(tokens[start:])
        if task.episode is not None:
            turns = self.ledger.turns.get((record.group, record.samples[0]), [])
            answered = [each for _, each in turns if each is not None]
            assert len(answered) == len(record.base.given), "D4: other turns than were answered"
        assert all(math.isfinite(logprob) and logprob <= 1e-4 for logprob in logprobs)

    def _check_kept(self, group: GroupId, key: HeldLease, kept: TrajectoryRecord) -> None:
        """I2, I7, and all other conditions of a result. The end of an episode equals its last turn."""
        assert math.isnan(kept.reward)
        if (turns := self.ledger.turns.get((group, kept.sample))) is None:
            self._check_answer(group, key, kept)
            return
        last = turns[-1][0]
        partial = last.partial
        assert (last.lease, last.attempt, last.turn) == (key.lease, key.attempt, kept.turns)
        assert partial == Partial(kept.tokens, kept.logprobs, kept.spans, kept.given, kept.branches)

    def _check_turn(self, turn: TurnKept) -> None:
        """A turn must be a valid result. Before it come exactly the environment's tokens, without logprobs."""
        task = self._rules.task(self.ledger.groups[turn.group].source.task)
        assert task is not None
        assert task.episode is not None
        assert turn.turn <= task.episode.turns_max
        partial, outside = turn.partial, task.episode.outside
        if not turn.turn:
            assert outside
            assert not partial.tokens
            return
        kept = TrajectoryRecord(
            turn.sample, partial.tokens, partial.logprobs, partial.spans, turn.finish,
            given=partial.given, branches=partial.branches,
        )  # fmt: skip
        self._check_answer(turn.group, HeldLease(turn.lease, turn.attempt), kept)
        assert len(kept.given) == turn.turn - (not outside)
        for number, given in enumerate(kept.given, not outside):
            assert kept.tokens[4 * given.start : 4 * given.end] == given_after(number)
            assert not any(kept.logprobs[4 * given.start : 4 * given.end])
            branches = outside and branches_after(number, kept.sample)
            assert (given.start in kept.branches) == branches, "D1: not the context of this call"

    def _check_answer(self, group: GroupId, key: HeldLease, kept: TrajectoryRecord) -> None:
        worker, lease = self._granted[key]
        prompt = self.ledger.groups[group].record.prompt
        assert (worker, lease.group) == (kept.worker, group), (
            "I7: a result for another worker's lease"
        )
        assert kept.sample in lease.samples
        branches = (0, *kept.branches)
        assert (prompt + kept.tokens[4 * branches[-1] :]).startswith(lease.prompt), (
            "I2: the result does not begin with the lease's prompt"
        )
        self.joined += lease.prompt != prompt
        self.outlived += key in self._before
        assert kept.worker not in self.barred, "I7: a result of a peer whose credential is revoked"
        tokens, logprobs = unpack_tokens(kept.tokens), unpack_logprobs(kept.logprobs)
        task = self._rules.task(self.ledger.groups[group].source.task)
        assert task is not None
        start = kept.given[-1].end if kept.given else 0
        limit = self._rules.limit(task, prompt, start, branches[-1]).tokens
        assert start < len(tokens) == len(logprobs) <= limit
        assert all(0 <= token < VOCAB for token in tokens.tolist())
        ends = [token in task.stop_token_ids for token in tokens.tolist()]
        assert not any(ends[start:-1]), "tokens after the end of an answer"
        full = len(tokens) == limit
        assert kept.finish == "stop" if ends[-1] else full and kept.finish == "length"
        assert all(-50 <= logprob <= 1e-4 for logprob in logprobs.tolist())
        ranges = [(span.start, span.end) for span in kept.spans]
        ranges += [(given.start, given.end) for given in kept.given]
        edges = [0, *(edge for each in sorted(ranges) for edge in each), len(tokens)]
        assert edges[::2] == edges[1::2], "I2: spans and given tokens do not cover the tokens"
        versions = [span.version for span in kept.spans]
        assert versions == sorted(versions), "an older version continued output of a newer one"
        honest = all(map(self._honest, self._writers[group, kept.sample]))
        first = len(prompt) // 4
        published = set(self._published())
        for span in kept.spans:
            version = VersionKey(span.version, span.digest)
            assert version in published - self.ledger.revoked, "I1: a token of no version"
            wrote = tokens[span.start : span.end].tolist()
            behind = first - max(start for start in branches if start <= span.start)
            signed = [
                mark(version, group, kept.sample, behind + at) for at in range(span.start, span.end)
            ]
            ended = span.end == len(tokens) and kept.finish == "stop"
            # An earlier turn may have ended right before the environment's answer.
            if ended or any(span.end == given.start for given in kept.given):
                signed[-1] = wrote[-1]
            assert not honest or wrote == signed, (
                "I2: a span names a version that did not write this here"
            )
            if wrote != signed:
                self._lies.add((group, kept.sample))
        self._kept.add((key, kept.sample))

    def _check_rewarded(self, record: SampleLeftOut | SampleRewarded) -> None:
        stored = self.ledger.groups[record.group]
        found = [each for each in stored.record.trajectories if each.sample == record.sample]
        if isinstance(record, SampleLeftOut) and not found:
            size, left_out = self._drawn(stored), len(stored.record.left_out)
            assert self._rules.group_patience, "I5: a group waits for each of its samples"
            assert size - left_out - 1 >= max(size - max(1, size // 8), self._rules.samples_min)
            return
        (kept,) = found
        if isinstance(record, SampleRewarded):
            assert math.isnan(kept.reward), "I5: a sample has a reward already"
            right = reward_of(stored.cursor, record.sample)
            assert record.reward == (0.0 if self._is_cut_off(stored, kept) else right), (
                "a reward that the task did not give"
            )
        elif not math.isnan(kept.reward):
            drawn = [*(each.sample for each in stored.record.trajectories), *stored.record.left_out]
            assert len(drawn) == self._drawn(stored) > self._rules.group_size, (
                "I5: left out for nothing"
            )
            self._surplus[record.group].append(kept.reward)

    def _is_cut_off(self, stored: StoredGroup, kept: TrajectoryRecord) -> bool:
        """Whether an episode ended because there was no room for another turn, before its environment ended it."""
        task = self._rules.task(stored.source.task)
        assert task is not None
        if task.episode is None or kept.turns == turns_of(stored.cursor, kept.sample):
            return False
        length = kept.length + len(given_after(kept.turns)) // 4
        # No context limits an answer in the simulation, so branches do not count.
        full = length >= self._rules.limit(task, stored.record.prompt, length).tokens
        assert full or kept.turns == task.episode.turns_max
        return True

    def _drawn(self, stored: StoredGroup) -> int:
        """The number of samples in a group of this task."""
        task = self._rules.task(stored.source.task)
        assert task is not None
        return self._rules.drawn(task)

    def _check_dropped(self, record: GroupDropped) -> None:
        """A group is dropped only for a reason that is true."""
        stored = self.ledger.groups[record.group]
        spans = [span for each in stored.record.trajectories for span in each.spans]
        reason = record.reason.partition(":")[0]
        rewards = [each.reward for each in stored.record.trajectories]
        match reason:
            case "revoked":
                assert any(
                    VersionKey(span.version, span.digest) in self.ledger.revoked for span in spans
                )
            case "filtered":
                assert self._rules.filter_zero_variance
                assert len(rewards) + len(stored.record.left_out) == self._drawn(stored) > 1
                assert len(set(rewards)) == 1
            case "refused":
                void = [
                    VersionKey(span.version, span.digest) in self.ledger.revoked for span in spans
                ]
                assert record.group in self._refused or any(void)
            case _:
                assert reason in ("stale", "reward", "lease", "result", "convicted", "returned"), (
                    reason
                )
                assert reason != "convicted" or self.convicted
        assert record.group not in self._trained_in or reason == "refused", (
            "a committed group is dropped"
        )

    def _check_frozen(self, record: BatchFrozen) -> None:
        """I1, I4, I5."""
        step, groups, size, ledger = record.step, record.groups, self._rules.group_size, self.ledger
        before = ledger.frozen.get(step)
        assert before is None or record.refusals > before.refusals, (
            "I4: a batch changed that was not refused"
        )
        assert step - 1 in ledger.frozen or step - 1 <= max(ledger.checkpoint, ledger.resume_step)
        assert len(set(groups)) == len(groups) == self._rules.trajectories_per_step // size
        held = {
            group for each in ledger.frozen.values() if each.step != step for group in each.groups
        }
        assert not held & set(groups), "I4: a group in two batches"
        for group in groups:
            assert self._step_of.setdefault(group, step) == step, "I4: a group in two batches"
            assert before is None or group in before.groups or group not in self._refused
            self._check_group(group, step, fresh=before is None or group not in before.groups)
        sources = [ledger.groups[group].source.task for group in groups]
        found = tuple(sources.count(task.name) for task in self._rules.tasks)
        assert found == self._quotas.of(step), "a task has more or less than its share of the step"
        body = pack_batch(BatchBody.of(step, [ledger.groups[group].record for group in groups]))
        assert batch_digest(body) == record.digest

    def _check_group(self, group: GroupId, step: int, *, fresh: bool) -> None:
        stored, size = self.ledger.groups[group], self._rules.group_size
        record, trajectories = stored.record, stored.record.trajectories
        samples = sorted([*(each.sample for each in trajectories), *record.left_out])
        assert samples == list(range(self._drawn(stored))), "I5: neither whole nor declared"
        assert len(trajectories) >= self._rules.samples_min, "I5: too many samples are left out"
        rewards = sorted(each.reward for each in trajectories)
        assert not any(map(math.isnan, rewards)), "I5: not scored"
        if surplus := self._surplus[group]:
            every = sorted([*rewards, *surplus])
            low = size // 2
            assert rewards == every[:low] + every[low - size :], "other samples contrast more"
        assert len(rewards) <= size, "I5: more samples than a group has are trained on"
        assert not self._all_wait or not any(
            (group, each.sample) in self._lies for each in trajectories
        ), "a lie is trained on before its verdict"
        spans = [span for each in trajectories for span in each.spans]
        ages = [step - 1 - span.version for span in spans]
        counts = min if self._rules.over_stale == "mask" else max
        assert min(ages) >= 0, "I1: a token of the future"
        assert counts(ages) <= self._rules.staleness_max, "I1: a token too old"
        revoked = [VersionKey(span.version, span.digest) in self.ledger.revoked for span in spans]
        assert not (fresh and any(revoked)), "I1: a token of a revoked version"

    def _check_committed(self, record: BatchCommitted) -> None:
        frozen = self.ledger.frozen[record.step]
        assert frozen.digest == record.digest, "I4: the committed batch is not the frozen one"
        assert record.epoch == self.ledger.epoch
        for group in frozen.groups:
            assert self._trained_in.setdefault(group, record.step) == record.step, (
                "I4: trained twice"
            )
        self.steps_committed += 1
        self.newest_step = max(self.newest_step, record.step)

    # --- messages

    def granted(self, peer: PeerId, lease: LeaseGranted) -> None:
        assert peer not in self.barred, "I7: a lease for a peer whose credential is revoked"
        assert peer not in self.convicted, "a lease for a convicted worker"
        key = HeldLease(lease.lease, lease.attempt)
        assert key not in self._granted, "I4: an attempt given twice"
        self._granted[key] = (peer, lease)
        for sample, seed in zip(lease.samples, lease.rng_seeds, strict=True):
            first = self._seeds.setdefault((lease.group, sample), seed)
            assert seed == first, "another attempt at a sample got another seed"
        for sample in lease.samples:
            self._writers[lease.group, sample].add(peer)
        stored = self.ledger.groups.get(lease.group)
        if kind_of(lease.group) != TRAINING:
            self.scored_episodes.granted(peer, lease)
        if stored is not None:
            output = len(lease.prompt) - len(stored.record.prompt)
            turns = self.ledger.turns.get((lease.group, lease.samples[0]), [])
            given_bytes = sum([len(each.tokens) for _, each in turns if each is not None])
            left = [len(kept.partial.tokens) for kept, each in turns if each and each.anew]
            output += max(left, default=0)  # the tokens before the newest branch
            # The ledger may be ahead of the message: the same transaction may have deleted the episode.
            void = lease.earlier and (lease.group, lease.samples[0]) in self.ledger.forgotten
            assert void or 4 * (lease.earlier + lease.written) + given_bytes == output
            self.handed_over += lease.written > 0

    def asked(self, request: RequestId, event: CoordinatorEvent) -> None:
        self._asked[request] = event
        if isinstance(event, RefuseAsked):
            self._refused.update(group for group, _ in event.groups)

    def convicts(self, worker: PeerId) -> None:
        assert not self._honest(worker), "an honest worker is convicted"
        self.convicted.add(worker)

    def performs(self, action: CoordinatorAction) -> None:
        """I4: only durable data are acknowledged."""
        match action:
            case Send(_, SampleAnswered(lease, attempt, sample, accepted)) if accepted:
                key = HeldLease(lease, attempt)
                # Answers of evaluations are scored again after a crash.
                of_run = kind_of(self._granted[key][1].group) == TRAINING
                assert not of_run or (key, sample) in self._kept, (
                    "I4: an accepted result is not durable"
                )
            case Send(_, EncodeVersion() as order):
                self.forms[f"{order.kind} aside" if order.aside else order.kind] += 1
            case SendRoot(_, root):
                facts = Root.decode(root).facts
                assert self._facts.setdefault(facts.form, facts) == facts, (
                    "I3: two forms under one name"
                )
                known = {record.digest for record in self.ledger.published.values()}
                assert facts.base_digest is None or facts.base_digest in known, (
                    "the base of a delta was never published"
                )
            case Convict(worker):
                self.convicts(worker)
            case StepEnvironment(group) if kind_of(group) != TRAINING:
                self.scored_episodes.stepped(action)
            case Reply(request, status):
                event = self._asked.pop(request, None)
                assert event is not None, "answered twice"
                if status == 200:
                    self._check_reply(event, action)
            case _:
                pass

    def _check_reply(self, event: CoordinatorEvent, reply: Reply) -> None:
        ledger, body = self.ledger, reply.body
        match event:
            case SessionAsked(_, step):
                assert isinstance(body, dict)
                assert body["epoch"] < ledger.epoch or (body["epoch"], step) == (
                    ledger.epoch,
                    ledger.resume_step,
                )
            case PublishAsked(version=version, digest=digest):
                assert isinstance(body, dict)
                record = ledger.published[body["publish_seq"]]
                assert (record.version, record.digest) == (version, digest)
            case BatchAsked(step=step):
                assert isinstance(body, bytes)
                self._check_batch(step, body, reply.digest)
            case CommitAsked(step=step, batch_digest=digest):
                assert step <= ledger.checkpoint or ledger.committed[step].digest == digest
            case CheckpointAsked(step=step):
                assert ledger.checkpoint >= step
            case _:
                pass

    def _check_batch(self, step: int, body: bytes, digest: Digest | None) -> None:
        """The learner always gets the frozen batch."""
        frozen = self.ledger.frozen[step]
        assert digest == batch_digest(body) == frozen.digest, "I4: another batch for the same step"
        batch: BatchBody = unpack_batch(body)
        assert (batch.step, tuple(group.group for group in batch.groups)) == (step, frozen.groups)
