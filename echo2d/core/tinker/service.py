"""The training service of the Tinker API as one machine.

    client: session -> model -> operations 0, 1, 2, ... --in their order--> learner --> result --> client
                                  one model after another, callers in turn

Every operation has a future, whose name follows from its model and number, and every fault of an operation is told in
that future: a client that is refused in another way may never send its next number. A session ends when its client says
so or is silent for SILENT_S; its models go with it, its checkpoints stay.

An operation is in the ledger before its future is told, and its result before the client is. The models live in the
memory of the learner, which can make them again. So no operation is lost, and none is applied twice, whatever dies.
Not here: HTTP (`net/tinker`), what the learner does next (`learner_work`), what workers draw next (`samplers`).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import starmap
from typing import Any, assert_never

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import RequestId
from echo2d.core.cluster.events import Persist, Reply
from echo2d.core.cluster.membership import Membership
from echo2d.core.cluster.peer import Peer
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.protocol.control_messages import PromptRead
from echo2d.core.status.schema import CallerStatus, HeldWeights, SessionStatus, TinkerStatus
from echo2d.core.tinker.checkpoints import (
    SavedModels,
    checkpoint_json,
    model_json,
    part,
    weights_json,
)
from echo2d.core.tinker.client_models import ClientModel, ClientModels, session_of
from echo2d.core.tinker.draw_queue import BASE, AskedSample
from echo2d.core.tinker.events import (
    AwaitResult,
    CancelSample,
    CheckpointDropped,
    CheckpointSaved,
    ClientAsked,
    DeleteCheckpoint,
    EndSession,
    ExpireCheckpoint,
    KeepSession,
    KeptClients,
    ListCheckpoints,
    ListModels,
    OpenSampler,
    OpenSession,
    OperationAsked,
    OperationEnded,
    OperationLost,
    OperationTaken,
    SampleAsked,
    SampleEnded,
    SamplerOpened,
    SessionName,
    SessionOpened,
    SessionOver,
    ShowCheckpoint,
    ShowModel,
    ShowQueue,
    ShowSampler,
    StopSample,
    Submit,
    TinkerEvent,
)
from echo2d.core.tinker.figures import Figures, Prices
from echo2d.core.tinker.futures import Failed, FutureId
from echo2d.core.tinker.held_snapshots import HoldingWorkers
from echo2d.core.tinker.learner_work import Action, LearnerWork
from echo2d.core.tinker.operations import NumberRefusedError, Operation
from echo2d.core.tinker.prompt_orders import PromptOrders
from echo2d.core.tinker.results import Results, future_of
from echo2d.core.tinker.samplers import Samplers

# A session ends after this long without a call. A client's heartbeat may starve while its own code computes.
SILENT_S = 900.0
# Checkpoints expire by a wall clock that jumped ahead by more than this only if it stays so for CLOCK_DOUBTED_S.
CLOCK_JUMP_S, CLOCK_DOUBTED_S = 60.0, 600.0
# The next limits are for one caller.
CALLER_SESSIONS_MAX = 64
CALLER_MODELS_MAX = 16
CALLER_OPERATIONS_MAX = 8192
CALLER_WAITING_BYTES_MAX = 256 << 20
CALLER_SAMPLES_MAX = 4096
# A sampler remembers this many numbers of calls.
SAMPLER_NUMBERS_MAX = 8192


class TinkerService:
    """See the module docstring. `now` is monotonic seconds. names: the names of the base model in the API.

    kept: what the ledger has. workers: what they hold. staleness_max: as in `LearnerWork`.
    """

    def __init__(
        self,
        names: Iterable[str],
        members: Membership,
        versions: PublishedVersions,
        kept: KeptClients,
        workers: HoldingWorkers,
        *,
        staleness_max: int | None = None,
        now: float,
    ) -> None:
        self._names = frozenset(names)
        self._samplers, self._figures, self._results = Samplers(workers), Figures(), Results()
        self.prompts = PromptOrders(self._samplers, members, versions)
        self._checkpoints, self._models = SavedModels(kept.models, kept.checkpoints), ClientModels()
        self._work = LearnerWork(
            self._names,
            versions,
            staleness_max=staleness_max,
            hold=workers.hold,
            models=self._models,
            results=self._results,
            checkpoints=self._checkpoints,
            samplers=self._samplers,
            figures=self._figures,
        )
        # The sessions of each caller, and when each was heard last.
        self._sessions = defaultdict[str, dict[SessionName, float]](dict)
        self._advanced_at = -math.inf
        # Seconds since 1970 at monotonic 0; None: not known yet. Since when calls have said that it is much later.
        self._wall_at_0: float | None = None
        self._jumped_at: float | None = None
        for session in kept.sessions:
            self._sessions[session.caller][session.session] = now
            self._figures.opened(session.session, now=now)
        for sampler in kept.samplers:
            self._samplers.open(sampler)
        self._models.recover(kept, self._results)

    # --- events

    def handle(self, event: TinkerEvent, *, now: float) -> list[Action]:
        match event:
            case ClientAsked():
                self._read_clock(event.wall_s, now)
                return [*self._asked(event, now), *self.advance(now=now)]
            case OperationAsked(request):
                return [*self._work.asked(request, event.saved), *self.advance(now=now)]
            case OperationEnded():
                self._read_clock(event.wall_s, now)
                return [*self._work.ended(event, now=now), *self.advance(now=now)]
            case OperationLost(model, number):
                return [*self._work.lost(model, number, now=now), *self.advance(now=now)]
            case SampleEnded():
                return [*self._sample_ended(event, now), *self.advance(now=now)]
            case _:
                assert_never(event)

    def _read_clock(self, wall_s: float, now: float) -> None:
        ahead = 0.0 if self._wall_at_0 is None else wall_s - now - self._wall_at_0
        if ahead <= CLOCK_JUMP_S:
            self._jumped_at = None
        elif self._jumped_at is None:
            self._jumped_at = now
        if self._jumped_at is None or now >= self._jumped_at + CLOCK_DOUBTED_S:
            self._wall_at_0, self._jumped_at = wall_s - now, None

    def learner_began(self, *, now: float) -> list[Action]:
        """Another learner session has begun, without the models of the one before."""
        return [*self._work.began(now=now), *self.advance(now=now)]

    def request_gone(self, request: RequestId) -> None:
        """The caller of a waiting request hung up, or its long poll timed out."""
        self._results.request_gone(request)
        self._work.request_gone(request)

    def prompt_read(self, peer: Peer, message: PromptRead, *, now: float) -> list[Action]:
        """A worker has read a prompt, or could not. PeerFault: it may not."""
        self.prompts.answered(peer, message, now=now)
        return self.advance(now=now)

    def read_prompts(self, *, now: float) -> list[Action]:
        """Give prompts to workers. Call it when prompts, workers or what they hold may have changed."""
        given_up = self.prompts.advance(now=now)
        return [*(self.advance(now=now) if given_up else []), *self.prompts.give(now=now)]

    def advance(self, *, now: float) -> list[Action]:
        """End what is over, and give the learner its next operation. Call it when a deadline has passed."""
        actions: list[Action] = [*self._results.forget_told(now=now)]
        for caller, sessions in self._sessions.items():
            for session, heard_at in list(sessions.items()):
                if heard_at + SILENT_S <= now:
                    actions += self._end_session(caller, session, "its client was silent", now)
        for model in list(self._models):
            while (number := self._models[model].operations.skip_missing(now=now)) is not None:
                actions += self._work.missed(model, number, now)
        if self._wall_at_0 is not None:
            for path in self._checkpoints.expired(self._wall_at_0 + now):
                actions += self._drop(path)
        self._advanced_at = now
        return [*actions, *self._work.give(now=now), *self._samplers.begin(now=now)]

    def wake_at(self) -> float | None:
        times = [at for sessions in self._sessions.values() for at in sessions.values()]
        expires = self._checkpoints.expires_at
        waits = (self._samplers.wake_at(self._advanced_at), self.prompts.wake_at())
        found = [at for at in waits if at is not None]
        found += [*(at + SILENT_S for at in times), *self._models.gaps()]
        if expires is not None and self._wall_at_0 is not None:
            found.append(expires - self._wall_at_0)
        return min(found, default=None)

    # --- calls of clients

    def _asked(self, event: ClientAsked, now: float) -> list[Action]:  # noqa: C901 - one line per call
        caller, request = event.caller, event.request
        own = self._sessions[caller]
        match event.call:
            case OpenSession(session):
                if len(own) >= CALLER_SESSIONS_MAX:
                    return [
                        _refusal(request, 429, f"a token may have {CALLER_SESSIONS_MAX} sessions")
                    ]
                own[session] = now
                self._figures.opened(session, now=now)
                opened = Persist(SessionOpened(session, caller))
                told = {"type": "create_session", "session_id": session}
                return [opened, Reply(request, 200, told)]
            case KeepSession(session):
                if session not in own:
                    return [_refusal(request, 410, f"session {session} has ended")]
                own[session] = now
                return [Reply(request, 200, {"type": "session_heartbeat"})]
            case EndSession(session):
                ended = self._end_session(caller, session, "its client has finished", now)
                return [*ended, Reply(request, 200, {})]
            case Submit(operation):
                return self._submit(event, operation, now)
            case AwaitResult(future):
                return [*self._results.ask(caller, request, future, now=now)]
            case ShowQueue(future):
                return [Reply(request, 200, self._queue_state(caller, future))]
            case OpenSampler():
                return self._open_sampler(event, event.call, now)
            case ShowSampler(name):
                sampler = self._samplers.get(caller, name)
                if sampler is None:
                    return [_missing(request, "sampler", name)]
                body = {"sampler_id": name, "base_model": sampler.base, "model_path": sampler.path}
                return [Reply(request, 200, body)]
            case SampleAsked():
                return self._sample(event, event.call, now)
            case CancelSample(future):
                known = self._sample_of(caller, future) is not None
                stopped = (
                    self._stop_sample(caller, future, "it was cancelled", now) if known else []
                )
                return [*stopped, Reply(request, 200, {})]
            case ShowModel(model):
                made = self._checkpoints.model(caller, model)
                if made is None:
                    return [_missing(request, "model", model)]
                return [Reply(request, 200, model_json(made))]
            case ListModels(offset, limit):
                models = self._checkpoints.models(caller)
                body = part("training_runs", models, offset, limit, model_json)
                return [Reply(request, 200, body)]
            case ListCheckpoints(of_model, offset, limit):
                saved = self._checkpoints.of(caller, of_model)
                body = part("checkpoints", saved, offset, limit, checkpoint_json)
                return [Reply(request, 200, body)]
            case ShowCheckpoint(path) | DeleteCheckpoint(path) | ExpireCheckpoint(path):
                found = self._checkpoints.get(caller, path)
                if found is None:
                    return [_missing(request, "checkpoint", path)]
                return self._checkpoint(event, found)
            case _:
                assert_never(event.call)

    def _checkpoint(self, event: ClientAsked, saved: CheckpointSaved) -> list[Action]:
        match event.call:
            case DeleteCheckpoint():
                return [*self._drop(saved.path), Reply(event.request, 200, {})]
            case ExpireCheckpoint(path, ttl_s):
                at = None if ttl_s is None else event.wall_s + ttl_s
                kept = self._checkpoints.expire(path, at)
                return [Persist(kept), Reply(event.request, 200, {"expires_at": at})]
            case _:
                return [Reply(event.request, 200, weights_json(saved.model))]

    def _submit(self, event: ClientAsked, operation: Operation, now: float) -> list[Action]:
        request, name = event.request, operation.model
        sessions, futures = self._sessions[event.caller], self._results.of(event.caller)
        session, model = session_of(name), self._models.get(name)
        if session not in sessions or (model is None and operation.number):
            return [_missing(request, "model", name)]
        sessions[session] = now
        mine = self._models.of(event.caller)
        if sum(each.operations.waiting_bytes for each in mine) > CALLER_WAITING_BYTES_MAX:
            return [_refusal(request, 429, f"more than {CALLER_WAITING_BYTES_MAX} bytes wait")]
        if sum(each.operations.waiting for each in mine) >= CALLER_OPERATIONS_MAX:
            return [_refusal(request, 429, f"{CALLER_OPERATIONS_MAX} operations wait")]
        if model is None:
            if len(mine) >= CALLER_MODELS_MAX:
                return [_refusal(request, 429, f"a token may have {CALLER_MODELS_MAX} models")]
            model = self._models[name] = ClientModel(event.caller, session)
        future, taken = future_of(name, operation.number), list[Action]()
        stays = replace(operation, body=b"", body_bytes=len(operation.body))
        try:
            new = model.operations.submit(stays, now=now)
        except NumberRefusedError as refused:
            # The future of this number is that of the other call.
            future = FutureId(f"{future}/{operation.digest.hex()[:16]}")
            futures.promise(future)
            if futures.tell(future, now=now) is None:
                taken += self._results.keep(event.caller, future, Failed(str(refused)), now=now)
        else:
            forgotten = not new and future not in futures
            futures.promise(future)
            if new:
                taken.append(Persist(OperationTaken(operation)))
            if forgotten:
                gone = Failed("its result is no longer kept", "server")
                taken += self._results.keep(event.caller, future, gone, now=now)
        return [*taken, Reply(request, 200, {"request_id": future, "model_id": name})]

    def _open_sampler(self, event: ClientAsked, asked: OpenSampler, now: float) -> list[Action]:
        sessions = self._sessions[event.caller]
        if asked.session not in sessions:
            return [_missing(event.request, "session", asked.session)]
        sessions[asked.session] = now
        folder, base, whole = BASE, asked.base, False
        if asked.path is not None:
            saved = self._checkpoints.get(event.caller, asked.path)
            if saved is None:
                return [_missing(event.request, "checkpoint", asked.path)]
            folder, base, whole = saved.folder, saved.model.base, saved.model.rank == 0
            if whole and "/weights/" in asked.path:
                detail = "full weights are sampled from a path of save_weights_for_sampler"
                return [_refusal(event.request, 400, detail)]
        if base not in self._names:
            known = ", ".join(sorted(self._names))
            return [_refusal(event.request, 400, f"base_model: expected one of {known}")]
        found = self._samplers.get(event.caller, asked.sampler)
        opened: list[Action] = []
        if found is None:
            opened = self._work.add_sampler(
                SamplerOpened(
                    asked.sampler,
                    event.caller,
                    asked.session,
                    folder,
                    base,
                    asked.path,
                    whole=whole,
                )
            )
        elif (found.folder, found.base, found.path) != (folder, base, asked.path):
            detail = f"sampler {asked.sampler} is open already, with other weights"
            return [_refusal(event.request, 400, detail)]
        return [*opened, Reply(event.request, 200, {"sampling_session_id": asked.sampler})]

    def _sample(self, event: ClientAsked, asked: SampleAsked, now: float) -> list[Action]:
        futures, request = self._results.of(event.caller), event.request
        sampler = self._samplers.get(event.caller, asked.sampler)
        if sampler is None:
            return [_missing(request, "sampler", asked.sampler)]
        self._sessions[event.caller][sampler.session] = now
        future = FutureId(f"{sampler.name}/{asked.number}")
        names = [f"{future}/{each}{sampler.origin}" for each in range(asked.count)]
        told = {"type": "asample", "request_id": future, "sample_sequence_ids": names}
        known = sampler.digests.get(asked.number)
        if known == asked.digest:
            return [Reply(request, 200, told)]
        waiting, prompts = self._samplers.waiting(event.caller)
        if waiting >= CALLER_SAMPLES_MAX or prompts > CALLER_WAITING_BYTES_MAX:
            return [_refusal(request, 429, f"{waiting} samples wait")]
        oldest = next(iter(sampler.digests), asked.number)
        forgets = len(sampler.digests) == SAMPLER_NUMBERS_MAX
        if known is None and forgets and asked.number < oldest:
            return [_refusal(request, 410, f"number {asked.number} is no longer known")]
        if known is not None:
            future = FutureId(f"{future}/{asked.digest.hex()[:16]}")
            fault: str | None = f"number {asked.number} was used for another call"
        else:
            fault = asked.fault
            sampler.digests[asked.number] = asked.digest
            keep_newest(sampler.digests, SAMPLER_NUMBERS_MAX)
        futures.promise(future)
        kept = list[Action]()
        if asked.order is not None and fault is None:
            self._samplers.ask(AskedSample(future, sampler, asked.order, now))
        elif futures.tell(future, now=now) is None:
            failed = Failed(fault or "it says nothing to draw")
            kept += self._results.keep(event.caller, future, failed, now=now)
        return [*kept, Reply(request, 200, told | {"request_id": future})]

    def _sample_ended(self, event: SampleEnded, now: float) -> list[Action]:
        sample = self._samplers.drawn(event.future)
        if sample is not None and sample.version is not None and event.gone:
            self._samplers.held.lost(sample.version)
        if self._samplers.ended(event.future, again=event.again, now=now) or sample is None:
            return []
        result = event.result
        if isinstance(result, bytes):
            self._figures.sampled(sample, event.tokens)
            if sample.order.top_tokens:
                sample.drawn = result
                self._samplers.ask(sample)
                return []
            result = sample.answer(result)
        return [*self._results.keep(sample.sampler.caller, event.future, result, now=now)]

    def _stop_sample(self, caller: str, future: FutureId, why: str, now: float) -> list[Action]:
        """End a sample that its client needs no longer. why: what its future says."""
        drawn = self._samplers.drop(future)
        if (scoring := self._work.scoring) is not None and scoring.future == future:
            scoring.dropped = True
        stop: list[Action] = [StopSample(future)] if drawn else []
        return [*stop, *self._results.keep(caller, future, Failed(why), now=now)]

    def _end_session(self, caller: str, session: SessionName, why: str, now: float) -> list[Action]:
        if self._sessions[caller].pop(session, None) is None:
            return []
        actions: list[Action] = [Persist(SessionOver(session))]
        self._figures.session_ended(session)
        why = f"the session has ended: {why}"
        samples = self._samplers.end_session(session)
        if (scoring := self._work.scoring) is not None and scoring.sampler.session == session:
            samples.append(scoring)
        for sample in samples:
            actions += self._stop_sample(caller, sample.future, why, now)
        self._work.untidy = True
        for name, model in self._models.in_session(session):
            model.lost, model.over = why, True
            for number in model.operations.end_all():
                failed = Failed(why, "server")
                actions += self._results.keep(caller, future_of(name, number), failed, now=now)
            if not model.busy:
                self._work.forget(name)
        return actions

    def _drop(self, path: str) -> list[Action]:
        self._checkpoints.drop(path)
        self._work.untidy = True
        return [Persist(CheckpointDropped(path))]

    # --- the learner

    def _sample_of(self, caller: str, future: FutureId) -> AskedSample | None:
        """What this caller waits for under this name, if it is a sample that has not ended."""
        scoring = self._work.scoring
        if scoring is not None and scoring.future == future:
            sample: AskedSample | None = scoring
        else:
            sample = self._samplers.sample(future)
        return sample if sample is not None and sample.sampler.caller == caller else None

    def _queue_state(self, caller: str, future: FutureId) -> dict[str, Any]:
        """As the API names it."""
        own = self._sample_of(caller, future) is not None
        if own and self._samplers.paused(future):
            why = "workers serve one version of full weights at a time, and another sampler has its turn"
            return {"queue_state": "paused_capacity", "queue_state_reason": why}
        return {"queue_state": "active"}

    # --- status

    def status(self, prices: Prices, *, now: float) -> TinkerStatus:
        queues, models, saved = self._samplers.queues(), self._models, self._checkpoints
        scoring = self._work.scoring
        if scoring is not None:
            queues[scoring.sampler.session].unscored += 1
        sessions, callers = list[SessionStatus](), list[CallerStatus]()
        for name, held in self._sessions.items():
            checkpoints = Counter(
                each.model.model.partition(":")[0] for each in saved.of(name, None)
            )
            mine = [each for each in models.items() if each[1].caller == name]
            own = [
                self._figures.session(
                    name,
                    session,
                    heard_at,
                    [
                        self._figures.model(model, each.made, each.operations)
                        for model, each in mine
                        if each.session == session
                    ],
                    queues[session],
                    checkpoints[session],
                    prices,
                    now=now,
                )
                for session, heard_at in held.items()
            ]
            sessions += own
            callers.append(self._figures.caller(name, own, checkpoints.total()))
        return TinkerStatus(
            held=tuple(starmap(HeldWeights, self._samplers.names().items())),
            sessions=tuple(sessions),
            callers=tuple(callers),
        )

    def check(self) -> None:
        self._figures.check()
        self._models.check()
        self._results.check()
        self._samplers.check()
        self._work.check()


def _missing(request: RequestId, what: str, name: str) -> Reply:
    return _refusal(request, 404, f"no {what} {name[:200]}")


def _refusal(request: RequestId, status: int, detail: str) -> Reply:
    return Reply(request, status, {"detail": detail})
