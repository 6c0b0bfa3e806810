"""Scores versions on held-out questions during the run: only one version writes each answer.

    version published, due --> open --all answers scored--> Evaluated
                                |  no worker serves it any more --> Evaluated, "n of N"
                                +- revoked --> forgotten

The first version is due, then each version whose number is at least `every` above the last due one, and any version
that the learner asks for. Leases of an evaluation go before all other work and name exactly this version. A worker
with such a lease keeps this version for up to `hold_s` after it could load a newer one. Another version never writes
the missing answers; the score says how many questions it covers.
Groups of evaluations have numbers of their own and never reach the buffer of batches, and a question that is asked
here is refused as a prompt of training (`held_out`).
With an audit, only trusted workers write the answers.
An environment is played in episodes. Between two turns an answer waits in memory for the environment. The worker of
the last turn may have the prefix cached, so it learns that the turn was accepted only when the next turn is leased, or
when it is known that none follows. Until then the worker keeps the version, for at most `hold_s`.
Not here: the arithmetic (`summary`), the questions (`questions`), one evaluation (`open_evaluation`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.cluster.events import Note, Persist, Send, VersionPublished
from echo2d.core.cluster.parts import RunParts
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import key_of
from echo2d.core.protocol.answer_end import WHOLE_ENDS
from echo2d.core.protocol.control_messages import LeaseGranted, SampleFinished, VersionKey
from echo2d.core.protocol.seeds import sample_seeds
from echo2d.core.protocol.trajectory import NOTHING
from echo2d.core.rules.tasks import EvalRules
from echo2d.core.work.episodes import ParkedEpisode, end_turn
from echo2d.core.work.evaluation.events import Evaluated, EvaluationAction
from echo2d.core.work.evaluation.open_evaluation import EVALUATION, OpenEvaluation
from echo2d.core.work.evaluation.questions import EvalQuestion, Questions
from echo2d.core.work.evaluation.summary import ScoredSample, best_by_name, summed_up
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeEnded,
    ForgetEpisode,
    PromptDrawn,
    PromptFailed,
    PromptsEnded,
    SampleScored,
    ScoreSample,
    TurnKept,
)
from echo2d.core.work.kind import Cause, PendingSamples, TaskWork
from echo2d.core.work.leases import Lease, answer, group_of
from echo2d.core.work.results import Written, written_by
from echo2d.core.work.scheduler import LeaseScheduler

# A worker that failed a lease gets none of this evaluation for this long: it loads a newer version, or
# is broken, and another one should try.
EVALUATION_AVOID_S = 10.0
# At most this many evaluations are remembered; the ledger keeps all.
KNOWN_MAX = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingAnswers(PendingSamples):
    """A waiting answer to a question of an evaluation."""

    evaluation: OpenEvaluation
    question: EvalQuestion


class Evaluations(TaskWork[PendingAnswers]):
    """See the module docstring. `now` is monotonic seconds.

    known: earlier evaluations, oldest first. Call `advance` after every event.
    """

    number = EVALUATION

    def __init__(
        self,
        parts: RunParts,
        known: Sequence[Evaluated],
        *,
        scheduler: LeaseScheduler,
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
        self._scheduler = scheduler
        if rules.evals:
            scheduler.add(self)
        self._questions = {each.name: Questions(each) for each in rules.evals}
        self._known = list(known[-KNOWN_MAX:])
        # The evaluation with the best score, by name.
        self._best = best_by_name(self._known, self._is_published)
        self._number = known[-1].number if known else 0
        self._open: list[OpenEvaluation] = []
        # Versions that are due while their questions are not complete yet.
        self._waiting: list[tuple[EvalRules, VersionPublished]] = []
        # The last version that was due, by name.
        self._due_at = self._last_due()
        self._serial = 0
        # This comes before any copy of a version is deleted.
        self._keep_scored()
        self._began = False
        self._rows: set[str] = set()

    # --- for others

    @property
    def ready(self) -> bool:
        """Whether all questions are known."""
        return all(questions.complete for questions in self._questions.values())

    @property
    def known(self) -> Sequence[Evaluated]:
        """All finished evaluations, oldest first."""
        return self._known

    @property
    def open(self) -> Sequence[OpenEvaluation]:
        return self._open

    def after(self, number: int) -> list[Evaluated]:
        """The evaluations with a higher number."""
        return [each for each in self._known if each.number > number]

    def is_held_out(self, row: str) -> bool:
        """Whether an evaluation asks this row."""
        return row in self._rows

    def asks(self, task: str) -> bool:
        return task in self._questions

    # --- versions

    def published(self, record: VersionPublished) -> None:
        """Evaluate this version if it is due."""
        for rules in self._rules.evals:
            last = self._due_at.get(rules.name)
            if last is None or record.version >= last + rules.every:
                self._wants(rules, record)

    def want(self, version: Version) -> bool:
        """Have this version evaluated. False: it is not the newest version, and was never evaluated."""
        record = self._versions.newest
        if record is None or record.version != version:
            return any(each.version == version for each in self._known)
        digest = record.digest
        for rules in self._rules.evals:
            done = any(
                (each.name, each.version, each.digest) == (rules.name, version, digest)
                for each in self._known
            )
            if not done and not self._is_wanted(rules, record):
                self._wants(rules, record)
        return True

    def unfinished(self, version: Version) -> list[str]:
        """The names of the evaluations of this version that are still under way."""
        waiting = [rules.name for rules, each in self._waiting if each.version == version]
        return [
            *waiting,
            *(each.rules.name for each in self._open if each.key.version == version),
        ]

    def revoked(self) -> list[EvaluationAction]:
        """Versions were revoked: their scores no longer count."""
        self._waiting = [pair for pair in self._waiting if self._live(pair[1])]
        self._due_at = self._last_due()
        self._best = best_by_name(self._known, self._is_published)
        actions: list[EvaluationAction] = []
        for each in [one for one in self._open if self._versions.live(one.key) is None]:
            actions += self._close(each)
        return actions

    # --- the task

    def prompt_drawn(self, event: PromptDrawn) -> list[EvaluationAction]:
        questions, context = self._questions[event.source.task], self._rules.context_max
        if context is not None and len(event.tokens) // 4 >= context:
            questions.skip(event.cursor)
            text = f"question {event.cursor} fills the model's context of {context}"
            return [self._statistics.fault("prompt", f"{event.source.task}: {text}")]
        questions.drawn(EvalQuestion(event.cursor, event.tokens, event.source))
        if event.source.row:
            self._rows.add(event.source.row)
        return []

    def prompt_failed(self, event: PromptFailed) -> list[EvaluationAction]:
        self._questions[event.task].skip(event.cursor)
        text = f"question {event.cursor} cannot be made: {event.reason}"
        return [self._statistics.fault("prompt", f"{event.task}: {text}")]

    def prompts_ended(self, event: PromptsEnded) -> list[EvaluationAction]:
        self._questions[event.task].ended(event.cursor)
        return []

    def scored(self, event: SampleScored) -> list[EvaluationAction]:
        """A reward was computed, or failed. The evaluation may have ended meanwhile."""
        found = self._of(event.group)
        kept = None if found is None else found.kept(event.group, event.sample)
        if found is None or kept is None:
            return []
        if event.reward is None or not math.isfinite(event.reward):
            found.score(event.group, event.sample, None)
            return [self._statistics.fault("reward", f"{found.rules.name}: {event.reason}")]
        scored = replace(kept, reward=event.reward, parts=event.parts)
        found.score(event.group, event.sample, scored)
        return []

    # --- environments

    def parked_episode(self, group: GroupId, sample: int) -> ParkedEpisode | None:
        """As in `TaskWork`. None also if the evaluation has ended meanwhile."""
        found = self._of(group)
        return None if found is None else found.parked_episode(group, sample)

    def go_on(
        self, asked: ParkedEpisode, event: EnvironmentStepped, *, now: float
    ) -> list[EvaluationAction]:
        found = self._of(event.group)
        assert found is not None
        found.go_on(event.group, event.sample, asked.answered(event))
        return []

    def end_episode(
        self, asked: ParkedEpisode, event: EpisodeEnded, *, cut_off: bool = False, now: float
    ) -> list[EvaluationAction]:
        """An episode is whole, with its reward."""
        found, turn = self._of(event.group), asked.parked.turn
        assert found is not None
        truncated = cut_off or turn.finish not in WHOLE_ENDS
        whole = ScoredSample(math.nan, (), turn.partial.written, truncated)
        found.end_episode(event.group, event.sample, whole)
        told = found.take_held_back(event.group, event.sample)
        scored = SampleScored(event.group, event.sample, event.reward, event.reason, event.parts)
        return [*self._accepted(told), *self.scored(scored)]

    # --- for the scheduler

    def priority(self, *, now: float) -> int:
        return -2

    def pending(self, *, now: float) -> Iterator[PendingAnswers]:
        for evaluation in list(self._open):
            version = evaluation.key.version
            suits = partial(self._suits, evaluation, now)
            # Answers are placed one by one. If all had to find free slots at once, the run would take the slots first.
            for question, sample in evaluation.waiting():
                before = evaluation.episode(evaluation.group(question.cursor), sample)
                yield PendingAnswers(
                    (sample,),
                    version,
                    None if before is None else before.partial.spans[-1].author,
                    newest=version,
                    suits=suits,
                    evaluation=evaluation,
                    question=question,
                )
                if evaluation.waits(question, sample):
                    # If one answer found no slot, the others will not find one either.
                    break

    def grant(
        self, pending: PendingAnswers, worker: Peer, samples: Sequence[int], *, now: float
    ) -> list[Send]:
        evaluation, question = pending.evaluation, pending.question
        assert worker.session is not None
        assert worker.engine.serving == evaluation.key
        group = evaluation.group(question.cursor)
        before = evaluation.episode(group, samples[0])
        base = NOTHING if before is None else before.partial
        if before is None:
            # Other answers to the question are leased with it, as far as the worker has room: they share its prompt.
            room = max(1, self._scheduler.free_at(worker.peer))
            samples = evaluation.waiting_of(question)[:room]
        task = evaluation.rules.task
        lease = self._scheduler.leases.start(
            None,
            group,
            worker.peer,
            evaluation.key,
            samples,
            base,
            room=task.max_new_tokens,
            since=None if before is None else before.since,
            now=now,
        )
        evaluation.lease(question, lease)
        given = lease.given
        limit = self._rules.limit(task, question.tokens, base.turn_start, base.branch_start)
        # All versions get the same seeds, so that chance makes their scores differ less.
        seeds = sample_seeds(
            self._rules.seed_key, group_of(EVALUATION, question.cursor), given.samples
        )
        granted = LeaseGranted(
            given.lease,
            given.attempt,
            group,
            question.tokens + base.branch,
            given.samples,
            limit.tokens - base.length,
            task.sampling,
            task.stop_token_ids,
            evaluation.key.version,
            self._rules.lease_silence_s,
            rng_seeds=seeds,
            hold_s=evaluation.rules.hold_s,
            stop_strings=task.stop_strings,
            earlier=base.written,
        )
        told = evaluation.take_held_back(group, given.samples[0])
        return [Send(worker.session, granted), *self._accepted(told)]

    # --- workers

    def finished(
        self, peer: Peer, lease: Lease | None, message: SampleFinished, *, now: float
    ) -> list[EvaluationAction] | None:
        """Judge a result, and keep it if only this version wrote it."""
        if lease is None or message.sample not in lease.samples:
            return None
        evaluation, leases = self._of(lease.given.group), self._scheduler.leases
        assert evaluation is not None
        question, task = evaluation.question(lease.given.group), evaluation.rules.task
        assert question is not None
        written = written_by(
            peer.peer,
            message,
            lease.given.base,
            rules=self._rules,
            task=task,
            prompt=question.tokens,
            believed=lambda key: key == evaluation.key and key in peer.engine.acknowledged,
        )
        if isinstance(written, str):
            self._avoid(evaluation, lease, now)
            refused = self._scheduler.refuse_bad(peer, message, written, now=now)
            return [*self._scheduler.stop(lease), *refused]
        leases.renew(lease, tokens=True, now=now)
        leases.answer(lease, message.sample)
        finish, length = written[1], len(message.tokens) // 4
        self._statistics.tokens_accepted += length
        if task.episode is not None:
            return self._end_turn(peer, evaluation, lease, message, written, now)
        whole = ScoredSample(math.nan, (), length, finish not in WHOLE_ENDS)
        evaluation.keep(lease, message.sample, whole)
        return [
            *answer(peer, message),
            ScoreSample(
                lease.given.group,
                message.sample,
                question.cursor,
                message.tokens,
                finish,
                evaluation.rules.name,
            ),
        ]

    def lost(
        self, lease: Lease, cause: Cause, reason: str, *, now: float
    ) -> list[EvaluationAction]:
        """The lease has ended: its open answers wait again."""
        evaluation = self._of(lease.given.group)
        assert evaluation is not None
        if cause in ("failed", "silent"):
            self._avoid(evaluation, lease, now)
        else:
            evaluation.ended(lease)
        return []

    def blames(self, lease: Lease, cause: Cause) -> bool:
        """A worker that must load a newer version, because it held this one for `hold_s`, is not at fault."""
        evaluation, newest = self._of(lease.given.group), self._versions.newest
        assert evaluation is not None
        return cause == "failed" and newest is not None and key_of(newest) == evaluation.key

    def wake_at(self) -> float | None:
        """When a worker may be tried again."""
        now = self._statistics.now
        return min(
            [at for each in self._open if (at := each.avoids_until(now)) is not None], default=None
        )

    # --- after every event

    def advance(self, *, now: float) -> list[EvaluationAction]:
        """Ask for questions, open the due evaluations, and close the finished ones."""
        if not self._rules.evals:
            return []
        if not self._began:
            # After a restart it is possible that the newest version has not been evaluated yet.
            self._began = True
            if (newest := self._versions.newest) is not None:
                self.published(newest)
        actions: list[EvaluationAction] = []
        for questions in self._questions.values():
            actions += questions.ask()
        ready = [pair for pair in self._waiting if self._questions[pair[0].name].complete]
        for rules, record in ready:
            self._waiting.remove((rules, record))
            actions += self._begin(rules, record, now)
        for evaluation in list(self._open):
            actions += _forgotten(evaluation)
            if evaluation.over or (evaluation.idle and not self._can_go_on(evaluation, now)):
                actions += self._tell(evaluation, now)
        self._keep_scored()
        return actions

    # --- inside

    def _end_turn(
        self,
        peer: Peer,
        evaluation: OpenEvaluation,
        lease: Lease,
        message: SampleFinished,
        written: Written,
        now: float,
    ) -> list[EvaluationAction]:
        """A turn of an episode has ended: pass it to the environment."""
        group, sample = lease.given.group, message.sample
        before = evaluation.episode(group, sample)
        parked = end_turn(peer, group, message, written, before, since=lease.since, now=now)
        # At most `slots` turns are held back, because a worker with very many results refuses leases.
        held_back = evaluation.park(lease, parked, held_back_max=peer.slots)
        asked = evaluation.parked_episode(group, sample)
        assert asked is not None
        return [*([] if held_back else answer(peer, message)), asked.step(self._rules)]

    def _accepted(self, *turns: TurnKept | None) -> list[Send]:
        """Tell workers that these turns were accepted."""
        told = []
        for turn in turns:
            if turn is not None:
                told += answer(self._members.get(turn.worker), turn)
        return told

    def _of(self, group: GroupId) -> OpenEvaluation | None:
        return next((each for each in self._open if each.question(group) is not None), None)

    def _keep_scored(self) -> None:
        """Keep the copies of the best versions, and of versions that may turn out to be the best."""
        self._versions.scored = frozenset(
            (
                *(VersionKey(each.version, each.digest) for each in self._best.values()),
                *(each.key for each in self._open),
                *(key_of(record) for _, record in self._waiting),
            )
        )

    def _is_published(self, found: Evaluated) -> bool:
        """Whether the version of this evaluation is published and not revoked."""
        return self._versions.live(VersionKey(found.version, found.digest)) is not None

    def _live(self, record: VersionPublished) -> bool:
        return self._versions.live(key_of(record)) is not None

    def _is_wanted(self, rules: EvalRules, record: VersionPublished) -> bool:
        return (rules, record) in self._waiting or any(
            (each.rules, each.key) == (rules, key_of(record)) for each in self._open
        )

    def _wants(self, rules: EvalRules, record: VersionPublished) -> None:
        self._due_at[rules.name] = record.version
        self._waiting.append((rules, record))

    def _begin(
        self, rules: EvalRules, record: VersionPublished, now: float
    ) -> list[EvaluationAction]:
        questions = list(self._questions[rules.name].all.values())
        evaluation = OpenEvaluation(rules, key_of(record), questions, serial=self._serial, now=now)
        self._serial += 1
        self._open.append(evaluation)
        mine = [each for each in self._open if each.rules.name == rules.name]
        # At most 4 versions of one [[eval]] are evaluated at a time; with a fifth, the oldest ends.
        return self._tell(mine[0], now) if len(mine) > 4 else []

    def _can_go_on(self, evaluation: OpenEvaluation, now: float) -> bool:
        """Whether some worker serves this version, or may serve it later."""
        newest = self._versions.newest
        if newest is not None and key_of(newest) == evaluation.key:
            return True
        return any(
            peer.alive
            and peer.engine.serving == evaluation.key
            and self._suits(evaluation, now, peer.peer)
            for peer in self._members.workers()
        )

    def _suits(self, evaluation: OpenEvaluation, now: float, worker: PeerId) -> bool:
        """Whether a worker may write answers of this evaluation."""
        peer = self._members.get(worker)
        trusted = self._rules.audit is None or (peer is not None and peer.trusted)
        return trusted and not evaluation.avoids(worker, now)

    def _last_due(self) -> dict[str, Version]:
        """The last version that was due and is not revoked, by name."""
        due: dict[str, Version] = {}
        for name, key in (
            *((each.name, VersionKey(each.version, each.digest)) for each in self._known),
            *((each.rules.name, each.key) for each in self._open),
            *((rules.name, key_of(record)) for rules, record in self._waiting),
        ):
            if self._versions.live(key) is not None:
                due[name] = max(key.version, due.get(name, key.version))
        return due

    def _avoid(self, evaluation: OpenEvaluation, lease: Lease, now: float) -> None:
        """The worker did not write its lease: for a while only others get leases of this evaluation."""
        evaluation.avoid(lease.worker, now + EVALUATION_AVOID_S)
        evaluation.ended(lease)

    def _tell(self, evaluation: OpenEvaluation, now: float) -> list[EvaluationAction]:
        """End the evaluation, and make its scores durable."""
        rules, key, rows = evaluation.rules, evaluation.key, evaluation.whole_rows()
        found = summed_up(rows, rules.samples, solved_at=rules.solved_at)
        self._number += 1
        record = Evaluated(
            self._number,
            rules.name,
            key.version,
            key.digest,
            len(rows),
            evaluation.of,
            rules.samples,
            found.mean,
            found.se,
            found.passes,
            found.parts,
            found.truncated,
            found.tokens,
            now - evaluation.began_at,
        )
        self._known.append(record)
        best = [*self._best.values(), record]
        self._best = best_by_name(best, self._is_published)
        del self._known[:-KNOWN_MAX]
        return [Persist(record), _note(record), *self._close(evaluation)]

    def _close(self, evaluation: OpenEvaluation) -> list[EvaluationAction]:
        self._open.remove(evaluation)
        actions: list[EvaluationAction] = []
        for lease in evaluation.leased.values():
            actions += self._scheduler.stop(lease)
        return [*actions, *self._accepted(*evaluation.close()), *_forgotten(evaluation)]

    def check(self) -> None:
        for questions in self._questions.values():
            questions.check()
        for evaluation in self._open:
            evaluation.check()
        leased = {key for each in self._open for key in each.leased}
        leases = self._scheduler.leases
        assert leased == {lease.key for lease in leases if lease.kind == EVALUATION}


def _forgotten(evaluation: OpenEvaluation) -> list[ForgetEpisode]:
    """Tell the environment which episodes are not continued."""
    name = evaluation.rules.name
    return [ForgetEpisode(group, sample, name) for group, sample in evaluation.take_dropped()]


def _note(found: Evaluated) -> Note:
    whole = "" if found.rows == found.of else f" ({found.rows} of {found.of} questions)"
    error = "" if math.isnan(found.se) else f" +- {found.se:.3f}"
    return Note(
        "evaluated", f"{found.name}: version {found.version}: {found.mean:.3f}{error}{whole}"
    )
