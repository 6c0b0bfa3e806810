"""The learner's loop: take a batch, check it, train, commit, publish, checkpoint.

    session --> publish resume_step --> | take n: faults? refuse, take again
                                        | train n; commit n (it answers kappa)
                                        | n - last published >= kappa, or the last step: publish n
                                        | every checkpoint_every steps, and at the end: begin to save checkpoint n
                                        | when one is whole: say what is durable, the oldest one kept (`checkpoint`)
                                        +-- n + 1

Told to stop, it ends after the step at hand, with a checkpoint; a coordinator that is away then is not waited for.
While step n trains, batch n + 1 is being taken, and version n - 1 written and published; it is out before version n is
begun. All ranks run this loop in step (`ranks`); rank 0 alone speaks and writes. The order keeps I4: what is committed
was trained, what the coordinator believes durable is on disk, and after any crash the newest checkpoint says where to
go on.
"""

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from echo2d.client import (
    Batch,
    Coordinator,
    IntegrityFault,
    NotResumable,
    OperatorFault,
    Session,
    Unanswered,
    base_digest,
)
from echo2d.sd_notify import Notifier
from learner.batch_prefetch import BatchPrefetch
from learner.batches import BatchRules, Trained, faults
from learner.checkpoint import OWN, Checkpoints
from learner.config import LearnerConfig, Place
from learner.lora import AdapterWriter
from learner.model import Policy, StepReport
from learner.packing import Answer, answers_of, parts
from learner.publish import Publisher, SnapshotWriter
from learner.ranks import Ranks, device_of
from learner.step_metrics import line_of, row_of
from learner.stopwatch import TRAIN, WAIT, Stopwatch
from learner.tracking import Tracking, makers

BEAT_S = 1.0  # how soon a waiting learner hears of a version that could not be published, or of a rank that is to stop
DAMAGED_MAX = (
    3  # times that a batch may come damaged: on its way that happens once, at its source always
)

log = logging.getLogger("echo2d.learner")


class Learner:
    """One learner session, from `run` to the last step or a stopped intake.

    metrics.jsonl gets a row per train step; where a step was trained again after a crash, its last row counts.
    """

    def __init__(
        self,
        config: LearnerConfig,
        coordinator: Coordinator,
        prefetch: BatchPrefetch,
        *,
        resume: bool,
        service: Notifier | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._prefetch = prefetch
        self._ranks = ranks or Ranks(device=device_of(config.device, Place()))
        self.watch = Stopwatch()
        directory = config.out_dir / "checkpoints"
        self._checkpoints = Checkpoints(directory, config.checkpoints_kept, self._ranks)
        self._service = service or Notifier()
        self._ranks.share(self._open_books)
        if not resume and self._has_checkpoints():
            raise OperatorFault(
                f"{directory} is not empty; use --resume or another learner.out_dir"
            )
        self._policy = Policy(config, self._ranks)
        self._run_id = self._ranks.share(lambda: self._coordinator.run_id)
        self._writer = self._make_writer()
        self._publisher = Publisher(self._writer, coordinator, self._ranks)
        self._resume, self._trained = resume, Trained()
        self._step = self._saved = self._published = self._restore() if resume else 0

    def run(self) -> None:
        """Train until the last step, or finish the current one after `intake.stop`. Checkpointed when it returns."""
        try:
            with self._publisher:
                self._run()
        finally:
            if self._ranks.leads:
                self._tracking.close()

    def _run(self) -> None:
        with contextlib.suppress(Unanswered):
            self._train()
        if self._step > self._saved:
            self._checkpoint()
        with contextlib.suppress(Unanswered):  # the next session's resume_step says the same
            self._ranks.share(self._publisher.settle)
        with contextlib.suppress(Unanswered):
            self._tell_durable(wait=True)
        self._checkpoints.settle()  # this rank's part of it

    def _train(self) -> None:
        self._service.starting(f"opening a session at {self._config.url}")
        session = self._open_session()
        self._published = self._step
        self._epoch, self._publish_every = session.epoch, session.publish_every
        self._rules = _rules(session, self._policy.vocab_size)
        self._ranks.share(self._make_room)
        self._publish(self._step)
        self._ranks.share(self._begin)
        self._mark = time.monotonic()  # when the last commit was ready, or the session
        while self._step < self._config.steps:
            waiting = time.monotonic()
            batch = self._ranks.share(
                lambda: self._take(self._step + 1), stopped=lambda: self._prefetch.stopped
            )
            if batch is None:
                break
            self._advance(batch, wait_s=time.monotonic() - waiting)

    def _open_books(self) -> None:
        """On rank 0, which alone notes anything."""
        config = self._config
        _make("out_dir", config.out_dir)
        _make("snapshot_root", config.snapshot_root)
        self._tracking = Tracking(config.out_dir, makers(config.track, config.out_dir))

    def _make_writer(self) -> SnapshotWriter:
        config, weights = self._config, self._policy.weights()
        if config.lora_rank:
            digest = self._ranks.share(lambda: base_digest(config.model))
            return AdapterWriter(config, self._run_id, weights, digest)
        return SnapshotWriter(config.model, config.snapshot_root, self._run_id, weights)

    def _make_room(self) -> None:
        """For the first version. The learner before this one may not have heard yet that it is over: its own stays."""
        self._writer.clean(self._epoch - 1)

    def _begin(self) -> None:
        """What rank 0 does when it has its session, and the version to begin with is on its way."""
        log.info(
            "session epoch=%d resume_step=%d steps=%d", self._epoch, self._step, self._config.steps
        )
        self._publisher.settle()
        self._service.turned(self._words)
        self._writer.clean(self._epoch)
        self._prefetch.start(self._fetch)
        self._ask(self._step + 1)

    def _alive(self) -> float:
        """While rank 0 waits for a batch. For how many seconds it may go on."""
        self._publisher.settle(patient=False)  # a batch may wait for that version
        if self._ranks.beat(stopped=self._prefetch.stopped):
            self._prefetch.stop()
        self._service.turned(self._words)
        return self._service.wait_s(BEAT_S) or 0.0

    def _words(self) -> str:
        done, published, saved = self._step, self._published, self._saved
        return f"step {done} of {self._config.steps} done, version {published} published, checkpoint {saved}"

    def _open_session(self) -> Session:
        """At the newest checkpoint: an older learner may go on making them until this one has its session."""
        while True:
            try:
                return self._ranks.share(lambda: self._coordinator.open_session(self._step))
            except NotResumable:
                tried, self._step = self._step, self._restore() if self._resume else 0
                self._saved = self._step
                if self._step <= tried:
                    raise

    def _ask(self, step: int) -> None:
        if step <= self._config.steps:
            self._prefetch.request(step)

    def _fetch(self, step: int) -> Batch:
        """IntegrityFault: again and again its bytes are not what its digest says."""
        for _ in range(DAMAGED_MAX - 1):
            try:
                return self._coordinator.take_batch(step)
            except IntegrityFault as fault:
                log.warning("refused step=%d reason=%s", step, fault)
        return self._coordinator.take_batch(step)

    def _arrived(self) -> Batch | None:
        with self.watch(WAIT):
            return self._prefetch.wait(self._alive)

    def _take(self, step: int) -> Batch | None:
        """The batch of `step`, already asked for, without faults; None when the learner is to stop."""
        while (batch := self._arrived()) is not None:
            with self.watch("check"):
                reasons = faults(batch, step, self._rules, self._trained)
            if not reasons:
                return batch
            log.warning("refused step=%d reasons=%s", step, reasons)
            self._coordinator.refuse(batch, reasons)
            self._ask(step)
        return None

    def _advance(self, batch: Batch, *, wait_s: float) -> None:
        """Train on the batch, commit it, and publish and checkpoint if it is time."""
        step = batch.step
        self._ask(step + 1)
        with self.watch("layout"):
            laid_out = self._policy.lay_out(self._parts(batch))
        with self.watch(TRAIN):
            report = self._policy.train_step(step, laid_out, self._rules.staleness_max)
        self._trained.add(batch)
        self._step = step  # also if no answer to the commit comes: who resumes here commits it
        with self.watch("pace"):
            self._pace(wait_s)
        now = time.monotonic()
        t_train_s, self._mark = now - self._mark - wait_s, now
        with self.watch("commit"):
            self._publish_every = self._ranks.share(
                lambda: self._coordinator.commit(batch, t_train_s=t_train_s)
            )
        if step - self._published >= self._publish_every or step == self._config.steps:
            with self.watch("publish"):
                self._publish(step)
        # first: what is durable is not trained again
        self._ranks.share(lambda: self._record(batch, report, t_train_s=t_train_s, wait_s=wait_s))
        if step - self._saved >= self._config.checkpoint_every:
            with self.watch("checkpoint"):
                self._tell_durable(wait=True)
                self._checkpoint()
        self._tell_durable(wait=False)

    def _parts(self, batch: Batch) -> list[list[Answer]]:
        """The answers of each optimizer step."""
        config = self._config
        groups = answers_of(batch, self._rules, scaled=config.scaled)
        return parts(groups, config.optimizer_steps, step=batch.step, rng_seed=config.rng_seed)

    def _pace(self, wait_s: float) -> None:
        time.sleep(max(0.0, self._mark + wait_s + self._config.step_floor_s - time.monotonic()))

    def _publish(self, version: int) -> None:
        self._publisher.begin(self._epoch, version, self._policy.weights())
        self._published = version

    def _checkpoint(self) -> None:
        progress = {
            "run": self._run_id,
            "base": self._writer.base_digest,
            "trained": self._trained.steps,
        }
        self._checkpoints.save(
            self._step, self._epoch, self._policy.state(), progress, self._policy.progress()
        )
        self._saved = self._step

    def _tell_durable(self, *, wait: bool) -> None:
        """If a checkpoint is whole by now."""

        def tell() -> None:
            if self._checkpoints.settle(wait=wait):
                self._coordinator.checkpoint(self._checkpoints.durable)

        self._ranks.share(tell)

    def _has_checkpoints(self) -> bool:
        return self._ranks.share(lambda: bool(self._checkpoints))

    def _restore(self) -> int:
        if not self._has_checkpoints():
            return 0
        state = self._policy.state()
        progress = self._checkpoints.load_newest(state)
        self._check_owner(progress)
        self._policy.restore(state, progress[OWN])
        self._trained = Trained(progress["trained"])
        return int(progress["step"])

    def _check_owner(self, progress: dict[str, Any]) -> None:
        """OperatorFault: to go on from it would be to train something else."""
        place, run = self._config.out_dir, progress.get("run")
        if run != self._run_id:
            raise OperatorFault(
                f"learner.out_dir: {place} has checkpoints of run {run}; this is run {self._run_id}"
            )
        if progress["base"] != self._writer.base_digest:
            raise OperatorFault(
                f"learner.model: the adapter in {place} belongs to another base model"
            )

    def _record(self, batch: Batch, report: StepReport, *, t_train_s: float, wait_s: float) -> None:
        lap, published = self.watch.lap(), self._published
        row = row_of(
            batch, report, published=published, t_train_s=t_train_s, wait_s=wait_s, seconds=lap
        )
        self._tracking.note(row)
        log.info("trained %s", line_of(row, batch))


def _rules(session: Session, vocab_size: int) -> BatchRules:
    return BatchRules(
        session.staleness_max,
        session.trajectories_per_step // session.group_size,
        session.group_size,
        vocab_size,
        masks=session.over_stale == "mask",
    )


def _make(key: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperatorFault(f"learner.{key}: cannot make {directory}: {error.strerror}") from error
