"""Run the learner's loop: take a batch, check it, train, commit, publish, checkpoint.

    open a session, publish the version to resume from, then for each step n:
        take batch n             if groups have faults: refuse them and take the batch again
        train step n
        commit step n            the answer gives kappa, the publish period
        publish version n        if kappa steps have passed since the last publish, or n is the last
        save checkpoint n        every checkpoint_every steps, and when the loop ends
        report a durable step    when a checkpoint is complete: the step of the oldest one kept

While step n trains, batch n + 1 is fetched in the background, and the newest version is written and
published there; the next publish begins only when this one has ended. All ranks run this loop in step
(`ranks`), and only rank 0 talks to the coordinator and writes files.

The order keeps I4: a committed step has been trained, a step reported durable is on disk, and after
a crash the newest checkpoint says where to resume. When told to stop, the learner saves a
checkpoint within learner.stop_within_s: of the present step, or of the one before (`stopping`). From
then on it does not wait for an unreachable coordinator.

A step that is left is not committed, and its batch comes again. Its gradient is dropped. If some of
its optimizer steps are already applied, the newest checkpoint decides what is saved. If it is

    of the step before           nothing is saved: the next learner trains the whole step
    of an older step             a checkpoint is saved that names the groups that were trained
                                 (`begun_step`); the next learner trains the others

So an epoch saves each step at most once, and no group is trained twice or left out. In the second case
the next session publishes other bytes under the same version number, and everything that workers have
written under that version is revoked. So such a checkpoint is saved only if whole steps would be lost
without it. With `recomputed` proximal logprobs it cannot be saved, so the step is finished.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from echo2d.client import (
    Batch,
    Coordinator,
    Evaluation,
    IntegrityFault,
    NotResumable,
    OperatorFault,
    PromptsOver,
    Session,
    Unanswered,
    base_digest,
)
from echo2d.learner.batch.checks import BatchRules, Trained, faults
from echo2d.learner.batch.packing import PackedAnswer, answers_of, parts, whole_answers
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig, Place
from echo2d.learner.metrics.report import StepReport
from echo2d.learner.metrics.rows import evaluation_line, facts_of, row_of
from echo2d.learner.metrics.stopwatch import TRAIN, WAIT, Stopwatch
from echo2d.learner.metrics.tracking import TrackedRun, Tracking, makers
from echo2d.learner.model.begun_step import BegunStep, StepLeftError
from echo2d.learner.model.load import check_teacher
from echo2d.learner.model.policy import PoisonedGroupsError, Policy
from echo2d.learner.objective.hooks import advantages_of
from echo2d.learner.ranks.ranks import Ranks, device_of
from echo2d.learner.saving.adapter import AdapterWriter, check_scale
from echo2d.learner.saving.checkpoint import OWN, Checkpoints
from echo2d.learner.saving.files import make_directory
from echo2d.learner.saving.identity import settings_of, tell_changes
from echo2d.learner.saving.publish import Publisher, SnapshotWriter
from echo2d.learner.saving.remote import RemoteCheckpoints
from echo2d.learner.stopping import StopClock
from echo2d.logs import say
from echo2d.sd_notify import Notifier

# While the learner waits, it checks every BEAT_S seconds whether a publish failed or a rank was told to stop.
BEAT_S = 1.0

log = logging.getLogger("echo2d.learner")


class Learner:
    """One learner session. metrics.jsonl gets a row per train step; a step trained again after a
    crash has two.
    """

    # What `sft_train` says otherwise: names that rows and log lines leave out, and what one does with the result.
    left_out: frozenset[str] = frozenset()
    result = (
        "`echo2d keep export` on the coordinator's host writes the model; with a larger learner.steps, --resume goes "
        "on (`echo2d run` does so by itself)"
    )

    def __init__(
        self,
        config: LearnerConfig,
        coordinator: Coordinator,
        prefetch: BatchPrefetch,
        *,
        resume: bool,
        identity: str = "",
        take_over: bool = False,
        service: Notifier | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._prefetch = prefetch
        self._service = service or Notifier()
        self._ranks = ranks or Ranks(device=device_of(config.device, Place()))
        self._config = config = self._ranks.share(lambda: self._fitted(config))
        self.watch = Stopwatch()
        directory = config.out_dir / "checkpoints"
        url = config.checkpoint_url
        # Every rank checks that the package is installed, but only rank 0 uses it.
        remote = RemoteCheckpoints(url) if url else None
        self._checkpoints = Checkpoints(directory, config.checkpoints_kept, self._ranks, remote)
        self._identity, self._take_over = identity, take_over
        self._ranks.share(self._open_tracking)
        if not resume and self._has_checkpoints():
            where = f"{directory} or {url}" if url else str(directory)
            other = "out_dir and checkpoint_url" if url else "out_dir"
            raise OperatorFault(f"{where} is not empty; use --resume or another learner.{other}")
        if self._ranks.leads:
            tell_changes(config)
        self._advantages = advantages_of(config)
        self._policy = Policy(config, self._ranks)
        self._run_id = self._ranks.share(lambda: self._coordinator.run_id)
        self._writer = self._make_writer()
        self._publisher = Publisher(self._writer, coordinator, self._ranks)
        self._resume, self._trained, self._evaluated = resume, Trained(), 0
        self._over = False
        self._begun: BegunStep | None = None  # of the step after `_step`
        self._stop = StopClock(self._ranks, config.stop_within_s, lambda: prefetch.stopped_at)
        self._publishes_late = False
        self._known: dict[str, str] = {}  # facts besides those of a step, for its log line
        # For each time that the present batch came: how many of its groups were refused as poison.
        self._poisoned: list[int] = []
        self._evals: Sequence[str] = ()
        self._step = self._saved = self._published = self._restore() if resume else 0
        self._resumed_at = self._step

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self._step

    def run(self) -> None:
        """Train until the last step or until `prefetch.stop`, then save a checkpoint and wait until it is
        saved.
        """
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
        if self._publishes_late and self._published < self._step:
            with contextlib.suppress(Unanswered):
                self._publish(self._step)
        # If a publish or a report was not answered, the opening of the next session makes up for it.
        with contextlib.suppress(Unanswered):
            self._ranks.share(self._publisher.settle)
            if self._ranks.share(lambda: self._evals and self._published == self._step):
                self._ranks.share(self._await_evaluations)
        with contextlib.suppress(Unanswered):
            self._report_durable(wait=True)
        # Only rank 0 settles inside `share`; every rank must finish its own shards.
        self._checkpoints.settle()
        if self._ranks.leads and self._step >= self._config.steps:
            log.info("finished step=%d of=%d: %s", self._step, self._config.steps, self.result)
        elif self._ranks.leads and not self._step:
            log.info("stopped before the end of the first step: nothing was saved")
        elif self._ranks.leads:
            log.info(
                "stopped at step=%d of=%d, which is saved: --resume goes on (`echo2d run` does so by itself)",
                self._step,
                self._config.steps,
            )

    def _train(self) -> None:
        self._service.starting(f"opening a session at {self._config.url or 'the coordinator'}")
        session = self._open_session()
        self._published = self._step
        self._epoch, self._publish_every = session.epoch, session.publish_every
        self._rules = _rules(session, self._policy, self._config)
        _check_sampling(session, self._config)
        if self._config.teacher and session.filter_zero_variance:
            raise OperatorFault(
                "policy.filter_zero_variance: expected false, because a group learns from learner.teacher also if its "
                "rewards are all equal; found true"
            )
        self._evals = session.evaluations
        # Old versions are removed before the first publish, which needs the space on the disk. The learner of
        # the epoch before may not know yet that it is fenced and may still be publishing, so its version stays
        # until this session has published.
        self._ranks.share(lambda: self._writer.clean(self._epoch - 1))
        self._publish(self._step)
        self._ranks.share(self._start_batches)
        self._step_began_at = time.monotonic()
        if self._begun:
            # The time of the step is the sum of both learners' times.
            self._step_began_at -= self._begun.seconds
        while self._step < self._config.steps and not self._stop.told:
            waiting = time.monotonic()
            batch = self._ranks.share(
                lambda: self._take(self._step + 1), stopped=lambda: self._prefetch.stopped
            )
            if batch is None:
                if self._ranks.share(lambda: self._over) and self._published < self._step:
                    self._publish(self._step)
                break
            self._follow(batch)
            self._advance(batch, wait_s=time.monotonic() - waiting)
        if self._stop.told:
            # Perhaps only another rank was told to stop.
            self._prefetch.stop()

    def _open_tracking(self) -> None:
        """Runs on rank 0 only, which writes all metrics."""
        config = self._config
        make_directory("out_dir", config.out_dir)
        make_directory("snapshot_root", config.snapshot_root)
        self._tracking = Tracking(config.out_dir, makers(config.track, self._tracked_run))

    def _tracked_run(self) -> TrackedRun:
        # An address may have a password in it.
        settings = {
            key: value for key, value in settings_of(self._config).items() if "url" not in key
        }
        return TrackedRun(self._tracked_as, self._config.out_dir, self._resumed_at, settings)

    @property
    def _tracked_as(self) -> str:
        """The run's name on boards: learners of one name continue each other's curves."""
        return self._run_id

    def _fitted(self, config: LearnerConfig) -> LearnerConfig:
        """The config with which the longest answer fits on the GPUs, and the teacher can read each row. Runs on rank 0
        only.

        OperatorFault: the teacher has another tokenizer.
        """
        on_gpu = self._ranks.device.type == "cuda"
        if config.teacher:
            most, given = check_teacher(config.model, config.teacher), config.row_tokens_max
            # If row_tokens_max is 0, a plan for GPUs regards the teacher.
            if most and (given > most or not (given or on_gpu)):
                log.warning("row_tokens_max is %d, because learner.teacher reads no more", most)
                config = dataclasses.replace(config, row_tokens_max=most)
        auto = "auto" in (config.recompute, config.moments) or not config.row_tokens_max
        if not on_gpu or not auto:
            return config
        self._service.starting("planning the memory")
        # The import takes a second, and a learner on a CPU does not need it.
        from echo2d.learner.plan import fitted_on_gpu

        memory = torch.cuda.get_device_properties(self._ranks.device).total_memory
        answer_tokens = self._coordinator.rules().answer_tokens
        found = fitted_on_gpu(config, self._ranks.shards, memory, answer_tokens)
        log.info(
            "planned recompute=%s moments=%s row_tokens_max=%d answer_tokens=%d",
            found.recompute,
            found.moments,
            found.row_tokens_max,
            answer_tokens,
        )
        return found

    def _make_writer(self) -> SnapshotWriter:
        config, weights = self._config, self._policy.weights()
        if config.lora_rank:
            digest = self._ranks.share(lambda: base_digest(config.model))
            return AdapterWriter(config, self._run_id, weights, digest)
        root, layout = config.snapshot_root, self._policy.layout
        return SnapshotWriter(config.model, root, self._run_id, weights, layout)

    def _start_batches(self) -> None:
        """Wait until the first version is published, then request the first batch. Rank 0 only."""
        log.info(
            "session epoch=%d resume_step=%d steps=%d", self._epoch, self._step, self._config.steps
        )
        self._publisher.settle()
        self._resumed_at, self._batches_asked_at = self._step, time.monotonic()
        self._service.turned(self._status_line)
        self._writer.clean(self._epoch)
        self._prefetch.start(self._fetch)
        self._request(self._step + 1)

    def _while_waiting(self) -> float:
        """Called on rank 0 while it waits for a batch. Returns the seconds until the next call."""
        # This raises if publishing failed: the batch may need that version and would never come.
        self._publisher.settle(patient=False)
        if self._ranks.beat(stopped=self._prefetch.stopped):
            self._prefetch.stop()
        self._service.turned(self._status_line)
        return self._service.wait_s(BEAT_S) or 0.0

    def _status_line(self) -> str:
        done, published, saved = self._step, self._published, self._saved
        return (
            f"step {done} of {self._config.steps} done, "
            f"version {published} published, checkpoint {saved}"
        )

    def _open_session(self) -> Session:
        """Open a session at the newest checkpoint.

        An older learner may go on saving checkpoints until this session replaces it. If the coordinator
        then refuses the step, the checkpoint that is newest now is loaded.
        """
        while True:
            try:
                return self._ranks.share(self._ask_for_session)
            except NotResumable:
                tried, self._step = self._step, self._restore() if self._resume else 0
                self._saved = self._step
                if self._step <= tried:
                    raise

    def _ask_for_session(self) -> Session:
        return self._coordinator.open_session(
            self._step, learner=self._identity, take_over=self._take_over, steps=self._config.steps
        )

    def _request(self, step: int) -> None:
        if self._ranks.leads and step <= self._config.steps:
            self._prefetch.request(step)

    def _fetch(self, step: int) -> Batch:
        """Take a batch. If it arrives damaged, take it again. IntegrityFault: its digest did not match three
        times.
        """
        # A batch damaged in transit arrives whole the next time; one damaged at its source never
        # does.
        for _ in range(2):
            try:
                return self._coordinator.take_batch(step)
            except IntegrityFault as fault:
                log.warning("refused step=%d reason=%s", step, fault)
        return self._coordinator.take_batch(step)

    def _wait_for_batch(self, step: int) -> Batch | None:
        with self.watch(WAIT):
            try:
                return self._prefetch.wait(step, self._while_waiting)
            except PromptsOver as ended:
                log.info("the run ends after step %d: %s", self._step, ended)
                self._over = True
                return None

    def _take(self, step: int) -> Batch | None:
        """Return the requested batch of `step` once it has no faults; None if the learner must stop, or
        there will be no more batches.
        """
        while (batch := self._wait_for_batch(step)) is not None:
            self._follow(batch)
            with self.watch("check"):
                reasons = faults(batch, step, self._rules, self._trained)
            if not reasons:
                return batch
            self._refuse(batch, reasons)
        return None

    def _follow(self, batch: Batch) -> None:
        """Use the run's new staleness bound S, if the operator has changed it."""
        now, before = batch.staleness_max, self._rules.staleness_max
        if now is not None and now != before:
            if self._ranks.leads:
                log.warning(
                    "staleness_max is %d from step %d on; it was %d", now, batch.step, before
                )
            self._rules = dataclasses.replace(self._rules, staleness_max=now)

    def _refuse(self, batch: Batch, reasons: dict[int, str]) -> None:
        """Have these groups replaced, and take the batch again. Rank 0 only."""
        log.warning("refused step=%d reasons=%s", batch.step, reasons)
        self._coordinator.refuse(batch, reasons)
        self._prefetch.forget(batch.step)
        self._request(batch.step)

    def _refuse_poison(self, batch: Batch, poison: PoisonedGroupsError) -> None:
        """Have the groups replaced whose gradients or penalties are not finite. FloatingPointError: this was necessary
        more than poison_max times in a row.
        """
        self._poisoned.append(len(poison.groups))
        if len(self._poisoned) > self._config.poison_max:
            times = f"{len(self._poisoned)} times in a row"
            raise FloatingPointError(
                f"{poison}; groups of step {batch.step} were poisonous {times}"
            )
        reason = "the gradient of this group alone, or its KL to the base, is not finite"
        self._ranks.share(lambda: self._refuse(batch, dict.fromkeys(poison.groups, reason)))

    def _advance(self, batch: Batch, *, wait_s: float) -> None:
        """Train on the batch, commit it, and publish and save a checkpoint if these are due. A batch with poisonous
        groups changes nothing and comes again.
        """
        step = batch.step
        self._request(step + 1)
        self._stop.begin_step()
        try:
            report = self._trained_on(batch)
        except PoisonedGroupsError as poison:
            self._refuse_poison(batch, poison)
            # The wait for this batch does not count as training time.
            self._step_began_at += wait_s
            return
        except StepLeftError as left:
            self._leave(step, left.begun, wait_s)
            return
        self._stop.end_step()
        self._begun = None
        self._trained.add(batch)
        # Set before the commit, which may remain unanswered: then the session that resumes at this step
        # commits it.
        self._step = step
        with self.watch("pace"):
            self._pace(wait_s)
        now = time.monotonic()
        t_train_s, self._step_began_at = now - self._step_began_at - wait_s, now
        figures = report.figures(t_train_s, _truncated(batch, self._rules))
        with self.watch("commit"):
            self._publish_every = self._ranks.share(
                lambda: self._coordinator.commit(
                    batch, t_train_s=t_train_s, scores=report.scores, figures=figures
                )
            )
        publishes = step - self._published >= self._publish_every or step == self._config.steps
        # When told to stop, the checkpoint comes first, because a publish waits for the one before it.
        self._publishes_late = publishes and self._stop.told
        if publishes and not self._publishes_late:
            with self.watch("publish"):
                self._publish(step)
        # Recorded before the checkpoint: a durable step is not trained again, so a crash between the two would
        # lose its row.
        self._ranks.share(lambda: self._record(batch, report, t_train_s=t_train_s, wait_s=wait_s))
        self._poisoned.clear()
        if self._stop.told:
            return
        if step - self._saved >= self._config.checkpoint_every:
            with self.watch("checkpoint"):
                self._report_durable(wait=True)
                self._checkpoint()
        self._report_durable(wait=False)

    def _trained_on(self, batch: Batch) -> StepReport:
        """Train on the batch. The exceptions are those of `Policy.train_step`."""
        penalties, kl_base = {}, None
        if self._config.penalizes:
            answers = whole_answers(batch, self._rules)
            with self.watch(TRAIN):
                penalties = self._policy.penalties(answers, self._leaves)
            tokens = sum(len(each.logprobs_n) for each in answers)
            kl_base = sum(penalties.values()) / tokens / self._config.kl_coef
        with self.watch("layout"):
            laid_out = self._policy.lay_out(self._parts(batch, penalties))
        with self.watch(TRAIN):
            report = self._policy.train_step(
                batch.step,
                laid_out,
                self._rules.staleness_max,
                begun=self._begun,
                leaves=self._leaves,
            )
        if kl_base is None:
            return report
        return dataclasses.replace(report, means=dataclasses.replace(report.means, kl_base=kl_base))

    def _leaves(self, done: int, total: int, applied: int) -> bool:
        """Whether all ranks leave the present step; a `begun_step.Leaves`."""
        # Once an optimizer step is applied, the next learner cannot compute again what the weights at the start of the
        # step decide: proximal logprobs and penalties.
        needs_save, checkpoints = self._saved < self._step, self._checkpoints
        decides = self._config.proximal == "recomputed" or self._config.penalizes
        may = not (applied and needs_save and decides)
        return self._stop.leaves(
            done, total, save_s=checkpoints.took_s, busy_s=checkpoints.busy_s, may=may
        )

    def _leave(self, step: int, begun: BegunStep | None, wait_s: float) -> None:
        """Leave `step` uncommitted. begun: those of its optimizer steps that are applied."""
        if begun is not None:
            seconds = time.monotonic() - self._step_began_at - wait_s
            self._begun = dataclasses.replace(begun, seconds=seconds)
        log.info(
            "left step=%d applied=%d newest_checkpoint=%d",
            step,
            begun.parts if begun else 0,
            self._saved,
        )

    def _parts(
        self, batch: Batch, penalties: dict[tuple[int, int], float]
    ) -> list[list[PackedAnswer]]:
        """The answers of each optimizer step, without groups that are trained already."""
        config, trained = self._config, self._begun.groups if self._begun else ()
        groups = answers_of(batch, self._rules, self._advantages, penalties)
        dealt = parts(groups, config.optimizer_steps, step=batch.step, rng_seed=config.rng_seed)
        left = [[each for each in part if each.group_id not in trained] for part in dealt]
        return [part for part in left if part]

    def _pace(self, wait_s: float) -> None:
        """Wait until the step has taken learner.step_floor_s, not counting the wait for its batch."""
        ends_at = self._step_began_at + wait_s + self._config.step_floor_s
        while (left_s := ends_at - time.monotonic()) > 0 and not self._prefetch.stopped:
            # Sleep at most 0.1 s at a time, so that a stop is noticed soon.
            time.sleep(min(left_s, 0.1))

    def _publish(self, version: int) -> None:
        self._publisher.begin(self._epoch, version, self._policy.weights())
        self._published = version

    def _checkpoint(self) -> None:
        progress = {
            "run": self._run_id,
            "base": self._writer.base_digest,
            "lora_alpha": self._config.lora_alpha,
            "trained": self._trained.steps,
            "evaluated": self._evaluated,
            "begun": self._begun.plain() if self._begun else None,
        }
        self._checkpoints.save(
            self._step, self._epoch, self._policy.state(), progress, self._policy.progress()
        )
        self._saved = self._step

    def _report_durable(self, *, wait: bool) -> None:
        """Tell the coordinator which step is durable, if a save ended since the last call."""

        def report() -> None:
            if self._checkpoints.settle(wait=wait):
                self._coordinator.checkpoint(self._checkpoints.durable)

        self._ranks.share(report)

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
        self._evaluated = int(progress.get("evaluated", 0))
        self._begun = BegunStep.of(progress["begun"]) if progress.get("begun") else None
        return int(progress["step"])

    def _check_owner(self, progress: dict[str, Any]) -> None:
        """OperatorFault: the checkpoint is of another run or another base model."""
        place, run = self._config.out_dir, progress.get("run")
        if run != self._run_id:
            raise OperatorFault(
                f"learner.out_dir: {place} has checkpoints of run {run}; this is run {self._run_id}"
            )
        if progress["base"] != self._writer.base_digest:
            raise OperatorFault(
                f"learner.model: the adapter in {place} belongs to another base model"
            )
        check_scale(self._config, progress)

    def _record(self, batch: Batch, report: StepReport, *, t_train_s: float, wait_s: float) -> None:
        lap, published = self.watch.lap(), self._published
        row = row_of(
            batch,
            report,
            published=published,
            t_train_s=t_train_s,
            wait_s=wait_s,
            seconds=lap,
            grad_clip=self._config.grad_clip,
        )
        row["truncated"] = _truncated(batch, self._rules)
        row["poisoned"] = report.poisoned + sum(self._poisoned)
        every = self._config.track_samples_every
        shows = every and self._tracking.has_boards and batch.step % every == 0
        kept = {name: value for name, value in row.items() if name not in self.left_out}
        self._tracking.record(kept, self._coordinator.samples(batch.step) if shows else ())
        done, began_at = batch.step - self._resumed_at, self._batches_asked_at
        eta_s = (time.monotonic() - began_at) / done * (self._config.steps - batch.step)
        facts = facts_of(row, batch, steps=self._config.steps, eta_s=eta_s) | self._known
        shown = {name: value for name, value in facts.items() if name not in self.left_out}
        say(log, logging.INFO, "trained", **shown)
        if self._evals:
            self._record_evaluations(self._coordinator.evaluations(self._evaluated))

    def _record_evaluations(self, found: Sequence[Evaluation]) -> None:
        """Record the evaluations since the last call, each in its own row. Rank 0 only."""
        for each in found:
            self._evaluated = each.number
            row = {"step": self._step, "eval": {each.name: dataclasses.asdict(each)}}
            self._tracking.record(row)
            log.info("evaluated %s", evaluation_line(each))

    def _await_evaluations(self) -> None:
        """Have the last version evaluated, and wait for the result. Rank 0 only."""
        ends_at = time.monotonic() + self._config.eval_wait_s
        while True:
            found, unfinished = self._coordinator.evaluate(self._step, self._evaluated)
            self._record_evaluations(found)
            if not unfinished or self._prefetch.stopped:
                return
            if time.monotonic() > ends_at:
                log.warning("not evaluated version=%d names=%s", self._step, unfinished)
                return
            self._service.turned(self._status_line)
            time.sleep(BEAT_S)


def _rules(session: Session, policy: Policy, config: LearnerConfig) -> BatchRules:
    return BatchRules(
        session.staleness_max,
        session.trajectories_per_step // session.group_size,
        session.group_size,
        policy.vocab_size,
        session.group_min,
        masks=session.over_stale == "mask",
        trains_cut=config.cut_off == "train",
        row_tokens_max=config.row_tokens_max,
        refuses_long=config.too_long == "refuse",
        experts=policy.expert_shape,
    )


def _truncated(batch: Batch, rules: BatchRules) -> float:
    """The share of answers that are longer than row_tokens_max allows."""
    found = [
        rules.room(group, len(trajectory.tokens)) < len(trajectory.tokens)
        for group in batch.groups
        for trajectory in group.trajectories
    ]
    return sum(found) / len(found)


def _check_sampling(session: Session, config: LearnerConfig) -> None:
    """OperatorFault: the run's tasks are sampled in a way that this learner cannot train."""
    for task, sampling in session.samplings.items():
        if sampling.temperature == 0:
            raise OperatorFault(
                f"sampling.temperature: task {task!r} is trained on, so it must be sampled at a temperature above 0; "
                "at 0 each token is the likeliest one, and all answers to a prompt are the same"
            )
    if config.too_long == "refuse" and 0 < config.row_tokens_max <= session.answer_tokens:
        raise OperatorFault(
            f"learner.row_tokens_max: an answer may have {session.answer_tokens} tokens (sampling.max_new_tokens, or "
            f"task.episode_tokens), but a prompt with its answer may have {config.row_tokens_max} here; use more ranks "
            'or a smaller limit of answers, or train the first tokens only with learner.too_long = "truncate"'
        )
