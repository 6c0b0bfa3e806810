"""Answers the learner's calls: sessions, publishes, batches, commits, refusals, checkpoints.

    session --> publish resume_step --> batch n --> commit n --> publish every kappa --> batch n + 1
                                          |  ^
                                          +--+ refuse n, a few times at most

A call for a batch waits until the batch is full; every call gets exactly one Reply. Every call except
`session` carries its epoch, and calls of an older epoch are refused (`fenced`). The body of an
error is {"error": a word, "detail": a sentence}. Not here: the staleness gates
(`work/training/staleness.py`), and how versions travel (`broadcast/publishing.py`).
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any

from echo2d.core.audit.audits import Audits
from echo2d.core.base.ids import Epoch, RequestId
from echo2d.core.broadcast.publishing import Publishing
from echo2d.core.cluster.events import (
    Note,
    Persist,
    PublishAsked,
    Reply,
    Send,
    StopRun,
    VersionPublished,
    VersionRevoked,
)
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.run_capacity import publish_every
from echo2d.core.cluster.versions import PublishRefusal, facts_of, key_of
from echo2d.core.coordinator.events import (
    AliveTold,
    BatchAsked,
    CheckpointAsked,
    CheckpointKept,
    CommitAsked,
    CoordinatorAction,
    EpochAsked,
    EpochOpened,
    EvaluationsAsked,
    Recovered,
    RefuseAsked,
    RulesAsked,
    SessionAsked,
    TotalsKept,
)
from echo2d.core.protocol.control_messages import VersionKey, VersionsRevoked
from echo2d.core.protocol.trajectory import (
    GroupRecord,
    StepFigures,
    StoredGroup,
    TrajectoryRecord,
    TrajectoryScore,
)
from echo2d.core.status.schema import LearnerStatus
from echo2d.core.work.evaluation.evaluations import Evaluations
from echo2d.core.work.evaluation.json_form import evaluated_json
from echo2d.core.work.events import BatchCommitted
from echo2d.core.work.training.groups import Groups
from echo2d.core.work.training.staleness import PREFETCH_STEPS, REFUSALS_MAX, Staleness, StepBatch

# Calls that wait for a batch; a learner has one or two.
WAITING_MAX = 64


class LearnerCalls:
    """See the module docstring. Call `advance` after every event: it freezes requested batches."""

    def __init__(
        self,
        parts: RunParts,
        recovered: Recovered,
        *,
        staleness: Staleness,
        groups: Groups,
        publishing: Publishing,
        audits: Audits | None,
        evaluations: Evaluations,
    ) -> None:
        self._audits = audits
        self._evaluations = evaluations
        self._rules, self._members = parts.rules, parts.members
        self._versions, self._statistics = parts.versions, parts.statistics
        self._staleness = staleness
        self._groups = groups
        self._publishing = publishing
        self.epoch = recovered.epoch
        self._resume_step = recovered.resume_step
        self._learner, self._steps = recovered.learner, recovered.steps
        # Monotonic seconds of the newest call of its session; None: none came since the start.
        self._heard_at: float | None = None
        self._began_at = parts.statistics.now
        # The version of its echo2d; empty: its session has not told that it lives.
        self._software = ""
        self._figures = StepFigures()
        self._kappa_told: int | None = None
        # The highest step whose batch was requested in this epoch.
        self._asked_step = 0
        self._waiting: dict[RequestId, int] = {}

    @property
    def publish_every(self) -> int:
        """kappa: the configured one, or the one that follows from the measurements."""
        return publish_every(self._rules, self._statistics)

    def learner(self, now: float) -> LearnerStatus:
        """The learner that has the run."""
        since = self._began_at if self._heard_at is None else self._heard_at
        steps, step_s = self._steps or None, self._statistics.learner.step_s
        left = None if steps is None else max(0, steps - self._staleness.committed)
        return LearnerStatus(
            name=self._learner,
            software=self._software,
            heard=self._heard_at is not None,
            silent_s=0.0 if self._waiting else now - since,
            steps=steps,
            eta_s=None if left is None or step_s is None else left * step_s,
            figures=self._figures,
        )

    @property
    def waits(self) -> bool:
        """Whether the learner waits for the batch of its next step."""
        return self._staleness.committed + 1 in self._waiting.values()

    @property
    def missing(self) -> int:
        """How many groups the next batch still lacks."""
        return self._staleness.missing

    # --- calls

    def session_asked(self, event: SessionAsked, *, now: float) -> list[CoordinatorAction]:
        """Open a new epoch, which fences the older ones, and revoke what they published beyond
        `resume_step`. Another learner's session ends only if the caller says so."""
        if self.epoch and event.learner != self._learner and not event.take_over:
            return [_error(event.request, "held", self._held(now))]
        lowest, highest = self._staleness.checkpoint, self._staleness.newest_step
        if event.resume_step < lowest:
            detail = (
                f"batches up to step {lowest} are deleted; "
                f"resume at {lowest} or later, not at {event.resume_step}: start the learner with "
                "--resume and the learner.out_dir that has its checkpoints, or begin a new run in "
                "another run.run_dir"
            )
            return [_error(event.request, "resume", detail, lowest=lowest)]
        if event.resume_step > highest:
            detail = (
                f"this run has come to step {highest}; "
                f"step {event.resume_step} must be another run's: use the learner.out_dir of this "
                "run's learner"
            )
            return [_error(event.request, "resume", detail, highest=highest)]
        self.epoch, self._resume_step, self._asked_step = (
            Epoch(self.epoch + 1),
            event.resume_step,
            0,
        )
        self._learner, self._steps, self._heard_at = event.learner, event.steps, now
        self._software, self._figures = "", StepFigures()
        self._statistics.session_opened()
        actions: list[CoordinatorAction] = [
            Persist(EpochOpened(self.epoch, event.resume_step, event.learner, event.steps)),
            *self._fence_waiting(),
        ]
        passed, unfinished = self._staleness.resume(event.resume_step)
        for batch in passed:
            assert batch.digest is not None
            actions.append(Persist(BatchCommitted(batch.step, self.epoch, batch.digest, 0.0)))
        for stored in unfinished:
            actions += self._groups.discard(stored, "stale")
        if not self._rules.tinker:
            # With [tinker] versions are no steps, and samples need those that workers serve.
            above = self._versions.above(event.resume_step, before=self.epoch)
            actions += self._revoke(above, now)
        note = Note("session", f"epoch {self.epoch} begins after step {event.resume_step}")
        return [*actions, note, Reply(event.request, 200, self._session_body())]

    def rules_asked(self, event: RulesAsked) -> list[CoordinatorAction]:
        """Answer what a session would be answered now, without opening one."""
        return [Reply(event.request, 200, self._session_body())]

    def alive(self, event: AliveTold) -> list[CoordinatorAction]:
        """The learner lives, whatever it is busy with."""
        if fenced := self.fenced(event.request, event.epoch):
            return fenced
        self._software = event.software
        return [Reply(event.request, 200, {})]

    def epoch_asked(self, event: EpochAsked) -> list[CoordinatorAction]:
        """Whether this epoch may upload a version."""
        return self.fenced(event.request, event.epoch) or [Reply(event.request, 200, {})]

    def publish_asked(self, event: PublishAsked, *, now: float) -> list[CoordinatorAction]:
        """Publish a snapshot that has been copied, unless its epoch may not publish it now."""
        if not self._hears(event.epoch):
            return [self._fenced(event.request)]
        of_steps = (self._resume_step, self._staleness.committed)
        resume_step, committed = (event.version,) * 2 if self._rules.tinker else of_steps
        verdict = self._versions.judge(event, resume_step=resume_step, committed=committed)
        if isinstance(verdict, PublishRefusal):
            return [_error(event.request, verdict.error, verdict.detail)]
        actions: list[CoordinatorAction] = []
        if verdict is None:
            actions += self._revoke(self._versions.replaced_by(event), now)
            verdict = self._versions.publish(event)
            self._statistics.versions_published += 1
            self._publishing.published(verdict, now=now)
            self._evaluations.published(verdict)
            actions.append(Persist(verdict))
        return [*actions, Reply(event.request, 200, facts_of(verdict))]

    def differs(
        self, record: VersionPublished, reason: str, *, now: float
    ) -> list[CoordinatorAction]:
        """A version's files are not what its publish said: the version is revoked.

        If the run cannot go on without it, the run stops. After its restart it waits for a session
        that publishes the version again.
        """
        text = f"version {record.version} is revoked: {reason}"
        alone = not self._versions.others_of(record)
        stops = alone or not self._publishing.goes_on_without(record)
        revoked = self._revoke([key_of(record)], now)
        end = StopRun(text) if stops else self._statistics.fault("publish", text)
        return [*revoked, end]

    def batch_asked(self, event: BatchAsked) -> list[CoordinatorAction]:
        """Answer at once if the batch is full; otherwise `advance` answers later."""
        if not self._hears(event.epoch):
            return [self._fenced(event.request)]
        last = self._staleness.committed + PREFETCH_STEPS
        if event.step > last:
            return [
                _error(
                    event.request, "order", f"batch {event.step} is too far ahead; at most {last}"
                )
            ]
        batch = self._staleness.batch(event.step)
        if batch is not None:
            return [self._batch_reply(event.request, batch)]
        if event.step < self._staleness.open_step:
            return [
                _error(
                    event.request,
                    "deleted",
                    f"batch {event.step} lies before this session or checkpoint",
                )
            ]
        if self._staleness.crowded:
            return [
                _error(
                    event.request,
                    "checkpoint",
                    "too many batches are kept; report a checkpoint first",
                )
            ]
        if len(self._waiting) >= WAITING_MAX:
            return [
                _error(event.request, "busy", f"{WAITING_MAX} calls wait for batches", status=503)
            ]
        self._asked_step = max(self._asked_step, event.step)
        self._waiting[event.request] = event.step
        return []

    def commit_asked(self, event: CommitAsked) -> list[CoordinatorAction]:
        """The optimizer step was applied. A repeated call gets the same answer."""
        if not self._hears(event.epoch):
            return [self._fenced(event.request)]
        if event.step > self._staleness.committed + 1:
            detail = (
                f"step {self._staleness.committed} is the last one committed; "
                f"{event.step} cannot follow"
            )
            return [_error(event.request, "order", detail)]
        reply = Reply(event.request, 200, {"publish_every": self.publish_every})
        if event.step <= self._staleness.checkpoint:
            # The batch has been deleted, so its digest cannot be compared any more.
            return [reply]
        batch = self._staleness.batch(event.step)
        if batch is None or batch.digest != event.batch_digest:
            return [_error(event.request, "digest", f"this is not the batch of step {event.step}")]
        if event.step <= self._staleness.committed:
            return [reply]
        if self._staleness.commit(event.step):
            self._statistics.trained(event.step, batch.groups, event.t_train_s, event.figures)
            self._figures = event.figures or StepFigures()
            if event.scores:
                scored = _scored(batch.groups, event.scores)
                self._statistics.qualities.scored_by_learner(scored)
                if self._audits is not None:
                    self._audits.scored_by_learner(scored)
        committed = BatchCommitted(event.step, self.epoch, batch.digest, event.t_train_s)
        kappa = self.publish_every
        return [
            Persist(committed),
            Persist(TotalsKept(self._statistics.run_trained, self._statistics.run_dropped)),
            *self._kappa_changed(kappa),
            Reply(event.request, 200, {"publish_every": kappa}),
        ]

    def refuse_asked(self, event: RefuseAsked) -> list[CoordinatorAction]:
        """Replace the groups of a batch that the learner does not want to train on."""
        if not self._hears(event.epoch):
            return [self._fenced(event.request)]
        batch = self._staleness.batch(event.step)
        if event.step <= self._staleness.committed:
            return [_error(event.request, "order", f"step {event.step} is committed")]
        members = set() if batch is None else {stored.record.group for stored in batch.groups}
        refused = {group: reason for group, reason in event.groups if group in members}
        # The call is repeated, or is about the batch as it was before an earlier refusal.
        if batch is None or not refused:
            return [Reply(event.request, 200, {"replaced": 0})]
        actions: list[CoordinatorAction] = []
        for stored in self._staleness.refuse(event.step, refused, self._uses_unpublished):
            actions += self._groups.discard(
                stored, "refused", refused.get(stored.record.group, "revoked")
            )
        actions += [self._statistics.fault("refusal", f"step {event.step}: {batch.reasons[-1]}")]
        if len(batch.reasons) >= REFUSALS_MAX:
            reasons = "; ".join(batch.reasons)
            actions.append(
                StopRun(f"batch {event.step} was refused {REFUSALS_MAX} times: {reasons}")
            )
        return [*actions, Reply(event.request, 200, {"replaced": len(refused)})]

    def checkpoint_asked(self, event: CheckpointAsked) -> list[CoordinatorAction]:
        """Steps up to this one are durable at the learner, so their batches are deleted."""
        if not self._hears(event.epoch):
            return [self._fenced(event.request)]
        if event.step > self._staleness.committed:
            detail = (
                f"step {event.step} is not committed; {self._staleness.committed} is the last one"
            )
            return [_error(event.request, "order", detail)]
        reply = Reply(
            event.request, 200, {"checkpoint": max(event.step, self._staleness.checkpoint)}
        )
        if event.step <= self._staleness.checkpoint:
            return [reply]
        self._staleness.keep_checkpoint(event.step)
        return [Persist(CheckpointKept(event.step, self.epoch)), reply]

    def evaluations_asked(self, event: EvaluationsAsked) -> list[CoordinatorAction]:
        """Tell what was evaluated; a learner may also have its newest version evaluated."""
        unfinished: list[str] = []
        if event.version is not None:
            if event.epoch is not None and not self._hears(event.epoch):
                return [self._fenced(event.request)]
            if not self._evaluations.want(event.version):
                detail = f"version {event.version} is not the newest one"
                return [_error(event.request, "version", detail)]
            unfinished = self._evaluations.unfinished(event.version)
        told = [evaluated_json(each) for each in self._evaluations.after(event.after)]
        return [Reply(event.request, 200, {"evaluations": told, "unfinished": unfinished})]

    def fenced(self, request: RequestId, epoch: Epoch) -> list[CoordinatorAction]:
        """The refusal of a call of an older session; empty: it is of the one in force."""
        return [] if self._hears(epoch) else [self._fenced(request)]

    def request_gone(self, request: RequestId) -> None:
        """The caller has gone: forget its request."""
        self._waiting.pop(request, None)

    def advance(self) -> list[CoordinatorAction]:
        """Freeze the requested batches that can be filled, and answer the calls for them."""
        actions: list[CoordinatorAction] = []
        # Which rows are held out must be known before a batch is made.
        while self._evaluations.ready:
            actions += self._groups.before_batch(self._asked_step)
            batch = self._staleness.freeze(self._asked_step, self._groups.in_flight_by_task)
            if batch is None:
                break
            actions.append(Persist(batch.frozen()))
        for request, step in list(self._waiting.items()):
            full = self._staleness.batch(step)
            if full is not None:
                del self._waiting[request]
                actions.append(self._batch_reply(request, full))
        if self._waiting and (task := self._groups.ended):
            step = self._staleness.open_step
            detail = f"the prompts of task {task!r} have ended: batch {step} cannot be filled"
            actions += [_error(each, "ended", detail) for each in self._waiting]
            self._waiting.clear()
        waits = self.waits
        lacks_rewards = (
            waits and self._groups.unscored > 0 and self._groups.lack_only_rewards(self.missing)
        )
        self._statistics.learner.waits(
            waits=waits, lacks_rewards=lacks_rewards, now=self._statistics.now
        )
        return actions

    # --- inside

    def _session_body(self) -> dict[str, Any]:
        rules = self._rules
        return {
            "epoch": self.epoch,
            "run_id": rules.run_id,
            "staleness_max": rules.staleness_max,
            "publish_every": self.publish_every,
            "trajectories_per_step": rules.trajectories_per_step,
            "group_size": rules.group_size,
            "group_min": rules.samples_min,
            "over_stale": rules.over_stale,
            "filter_zero_variance": rules.filter_zero_variance,
            "evaluations": [each.name for each in rules.evals],
            "samplings": {task.name: asdict(task.sampling) for task in rules.tasks},
            "answer_tokens": max((task.tokens_max for task in rules.tasks), default=0),
            "checkpoint": self._staleness.checkpoint,
        }

    def _kappa_changed(self, kappa: int) -> list[CoordinatorAction]:
        before, self._kappa_told = self._kappa_told, kappa
        if before in (None, kappa):
            return []
        return [Note("kappa", f"publish_every is {kappa} train steps from now on; it was {before}")]

    def _revoke(self, keys: Collection[VersionKey], now: float) -> list[CoordinatorAction]:
        """Withdraw published versions: workers stop serving them (I1), and the groups that they
        wrote are dropped, except those in full batches."""
        if not keys:
            return []
        actions: list[CoordinatorAction] = [
            Persist(VersionRevoked(self.epoch, key.version, key.digest)) for key in keys
        ]
        self._versions.revoke(keys)
        self._publishing.revoked(keys)
        actions += self._groups.revoke(keys, now=now)
        for stored in self._staleness.withdraw(lambda group: group.uses(keys)):
            actions += self._groups.discard(stored, "revoked", again=True)
        message = VersionsRevoked(self.epoch, tuple(keys))
        peers = [peer for peer in self._members if peer.session is not None and peer.kind != "seed"]
        return [
            *actions,
            *(Send(peer.session, message) for peer in peers if peer.session is not None),
        ]

    def _uses_unpublished(self, group: GroupRecord) -> bool:
        """Whether a version that has been revoked wrote tokens of the group."""
        spans = (span for trajectory in group.trajectories for span in trajectory.spans)
        return any(self._versions.live(span.key) is None for span in spans)

    def _fence_waiting(self) -> list[CoordinatorAction]:
        fenced = [self._fenced(request) for request in self._waiting]
        self._waiting.clear()
        return list(fenced)

    def _hears(self, epoch: Epoch) -> bool:
        """Whether a call belongs to the session in force; if so, its learner was heard now."""
        # Epoch 0 comes before the first session, so no call can belong to it.
        if epoch != self.epoch or not epoch:
            return False
        self._heard_at = self._statistics.now
        return True

    def _held(self, now: float) -> str:
        """Says which other learner has the run, and when it was last heard."""
        heard = (
            "was not heard since the coordinator started"
            if self._heard_at is None
            else f"was last heard {now - self._heard_at:.0f} s ago"
        )
        return (
            f"learner {self._learner or 'without a name'} has the run and {heard}; "
            "another one gets it only with --take-over (open_session(take_over=True)), which ends "
            "that session"
        )

    def _batch_reply(self, request: RequestId, batch: StepBatch) -> Reply:
        return Reply(request, 200, batch.body(), batch.digest, self._rules.staleness_max)

    def _fenced(self, request: RequestId) -> Reply:
        return _error(request, "fenced", f"epoch {self.epoch} is in force", epoch=self.epoch)

    def check(self) -> None:
        assert len(self._waiting) <= WAITING_MAX
        assert all(step <= self._asked_step for step in self._waiting.values())
        assert all(self._staleness.batch(step) is None for step in self._waiting.values())


def _error(request: RequestId, error: str, detail: str, *, status: int = 409, **more: int) -> Reply:
    return Reply(request, status, {"error": error, "detail": detail, **more})


def _scored(
    groups: Iterable[StoredGroup], scores: Iterable[TrajectoryScore]
) -> list[tuple[TrajectoryRecord, TrajectoryScore]]:
    """The trajectories of these groups that have a score, each with its last score."""
    found = {(score.group, score.sample): score for score in scores}
    return [
        (trajectory, found[stored.record.group, trajectory.sample])
        for stored in groups
        for trajectory in stored.record.trajectories
        if (stored.record.group, trajectory.sample) in found
    ]
