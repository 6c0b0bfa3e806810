"""The training service of the Tinker API as one machine.

    client: session -> model -> operations 0, 1, 2, ... --in their order--> learner --> result --> client
                                  one model after another, callers in turn

Every operation has a future, whose name follows from its model and number, and every fault of an operation is told in
that future: a client that is refused in another way may never send its next number. A session ends when its client says
so or is silent for SILENT_S; its models go with it, its checkpoints stay.

An operation is in the ledger before its future is told, and its result before the client is. The models live in the
memory of the learner. After another learner session has begun, or the coordinator has, the learner makes a model again
before its next operation: from the last step whose state is on its disk, and the operations since (`replay`). So no
operation is lost, and none is applied twice.

After models, steps or checkpoints have gone, the learner is told which ones to keep, and frees the others. For samples
it publishes the weights that workers are to serve next.
Not here: HTTP (`net/tinker`), what an operation computes (the learner).
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, assert_never

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.codec import pack
from echo2d.core.base.ids import Digest, RequestId, Version
from echo2d.core.cluster.events import Persist, Reply
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.status.schema import CallerStatus, SessionStatus, TinkerStatus
from echo2d.core.tinker.checkpoints import (
    SavedModels,
    checkpoint_json,
    folder_of,
    model_json,
    part,
    state_folder,
    weights_json,
)
from echo2d.core.tinker.events import (
    LAYERS,
    AwaitResult,
    CancelSample,
    CheckpointDropped,
    CheckpointSaved,
    ClientAsked,
    DeleteCheckpoint,
    EndSession,
    ExpireCheckpoint,
    GiveOperation,
    GradientDropped,
    KeepSession,
    KeptClients,
    KeptOperation,
    ListCheckpoints,
    ListModels,
    ModelMade,
    OpenSampler,
    OpenSession,
    OperationAsked,
    OperationEnded,
    OperationOver,
    OperationTaken,
    ResultForgotten,
    SampleAsked,
    SampleEnded,
    SamplerName,
    SamplerOpened,
    SamplerOver,
    SessionName,
    SessionOpened,
    SessionOver,
    ShowCheckpoint,
    ShowModel,
    ShowSampler,
    StepSaved,
    StopSample,
    Submit,
    TinkerAction,
    TinkerEvent,
    TinkerRecord,
)
from echo2d.core.tinker.figures import Figures, Prices
from echo2d.core.tinker.futures import Failed, FutureId, Futures, Outcome
from echo2d.core.tinker.operations import (
    DROPPED,
    MISSING,
    ModelId,
    NumberRefusedError,
    Operation,
    OperationKind,
    Operations,
)
from echo2d.core.tinker.replay import Replay
from echo2d.core.tinker.samplers import BASE, AskedSample, Samplers, WeightsSampler

# A session ends after this long without a call. A client's heartbeat may starve while its own code computes.
SILENT_S = 900.0
# The next limits are for one caller.
CALLER_SESSIONS_MAX = 64
CALLER_MODELS_MAX = 16
CALLER_OPERATIONS_MAX = 8192
CALLER_WAITING_BYTES_MAX = 256 << 20
CALLER_SAMPLES_MAX = 4096
# Bodies that the ledger keeps to compute them again.
CALLER_KEPT_BYTES_MAX = 4 << 30
# Beyond this many samplers the oldest one ends.
CALLER_SAMPLERS_MAX = 256
# A sampler remembers this many numbers of calls.
SAMPLER_NUMBERS_MAX = 8192

CREATES: Final = frozenset({"create", "load"})
LOST = "the learner began again, and cannot compute this model again: make a model from the last checkpoint"

Action = Persist[TinkerRecord] | Reply | TinkerAction


@dataclass(slots=True)
class _Model:
    caller: str
    session: SessionName
    operations: Operations = field(default_factory=Operations)
    replay: Replay = field(default_factory=Replay)
    # None until it is made, or if making it failed.
    made: ModelMade | None = None
    # The checkpoint from which it is made.
    loads: CheckpointSaved | None = None
    # Why none of its operations can run.
    lost: str | None = None
    # How the running operation ends, although the learner drops the gradient for it.
    failed: Failed | None = None


@dataclass(slots=True)
class _Caller:
    futures: Futures = field(default_factory=Futures)
    sessions: dict[SessionName, float] = field(default_factory=dict)  # when each was heard last
    turn: int = 0  # the number of the last turn that it had


@dataclass(frozen=True, slots=True)
class _Order:
    """What the learner is told to do."""

    model: str  # empty: no client's
    number: int
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def given(self, request: RequestId) -> Reply | GiveOperation:
        """Answer the learner's call with it, as `client.tinker` reads it."""
        named = {"model": self.model, "number": self.number, "kind": self.kind}
        order = {**named, "arguments": self.arguments}
        if self.kind == "forward_backward":
            return GiveOperation(request, order, ModelId(self.model), self.number)
        return Reply(request, 200, pack({**order, "body": self.body}))


class TinkerService:
    """See the module docstring. `now` is monotonic seconds. names: the names of the base model in the API.

    kept: what the ledger has.
    """

    def __init__(
        self, names: Iterable[str], versions: PublishedVersions, kept: KeptClients, *, now: float
    ) -> None:
        self._names, self._versions = frozenset(names), versions
        self._samplers, self._figures = Samplers(), Figures()
        # The folder and version that the learner publishes now, and the last version that it was told to publish.
        self._publishing: tuple[str, Version] | None = None
        self._last_version = Version(0)
        # The sample whose prompt the learner scores now, and whether it has scored one since the last operation.
        self._scoring: AskedSample | None = None
        self._has_scored = False
        self._checkpoints = SavedModels(kept.models, kept.checkpoints)
        self._callers: dict[str, _Caller] = {}
        self._models: dict[ModelId, _Model] = {}
        self._turn = 0
        # Whether the learner may have models or checkpoints that are to be kept no longer.
        self._untidy = True
        # What the learner does now; it is told again if it missed the answer. None: nothing.
        self._order: _Order | None = None
        # The model of the operation that runs; None: the order is no client's.
        self._running: ModelId | None = None
        # What the learner has still to compute of the model that it makes again.
        self._again: deque[_Order] = deque()
        # The learner's call for the next operation.
        self._idle: RequestId | None = None
        # The calls that wait for a result.
        self._waiting: dict[RequestId, FutureId] = {}
        self._waiting_for: dict[FutureId, list[RequestId]] = {}
        # The number of the learner's orders that no client has numbered.
        self._own_orders = 0
        self._advanced_at = -math.inf
        # Seconds since 1970 at monotonic 0, by the newest call.
        self._wall_at_0: float | None = None
        self._recover(kept, now)

    def _recover(self, kept: KeptClients, now: float) -> None:
        for session in kept.sessions:
            self._callers.setdefault(session.caller, _Caller()).sessions[session.session] = now
            self._figures.opened(session.session, now=now)
        owners = {each.session: each.caller for each in kept.sessions}
        for each in kept.samplers:
            self._samplers.open(_sampler(each), CALLER_SAMPLERS_MAX)
        saved = {each.model: each.number for each in kept.steps}
        made = {each.model: each for each in kept.models}
        for name in dict.fromkeys([*made, *(each.operation.model for each in kept.operations)]):
            if (of := _session_of(name)) in owners:
                model = _Model(owners[of], of, replay=Replay(saved.get(name)), made=made.get(name))
                model.operations.ended_up_to(saved.get(name, -1))
                self._models[name] = model
        for kept_operation in kept.operations:
            self._recover_operation(kept_operation)

    def _recover_operation(self, kept: KeptOperation) -> None:
        operation, name = kept.operation, kept.operation.model
        if (model := self._models.get(name)) is None:
            return
        model.operations.recover(operation, ended=kept.ended)
        if kept.ended:
            model.replay.ended(operation, failed=kept.failed)
        futures, future = self._callers[model.caller].futures, future_of(name, operation.number)
        if kept.result is not None:
            futures.keep(future, kept.result)
        elif not kept.ended:
            futures.promise(future)

    # --- events

    def handle(self, event: TinkerEvent, *, now: float) -> list[Action]:
        match event:
            case ClientAsked():
                self._wall_at_0 = event.wall_s - now
                return [*self._asked(event, now), *self.advance(now=now)]
            case OperationAsked(request):
                before, self._idle = self._idle, request
                stale = [] if before is None else [Reply(before, 204, {})]
                saved = [action for each in event.saved for action in self._step_saved(each)]
                return [*saved, *stale, *self.advance(now=now)]
            case OperationEnded():
                self._wall_at_0 = event.wall_s - now
                return [*self._ended(event, now), *self.advance(now=now)]
            case SampleEnded():
                return [*self._sample_ended(event, now), *self.advance(now=now)]
            case _:
                assert_never(event)

    def learner_began(self, *, now: float) -> list[Action]:
        """Another learner session has begun, without the models of the one before."""
        actions: list[Action] = [] if self._idle is None else [Reply(self._idle, 204, {})]
        for name, model in list(self._models.items()):
            model.replay.in_memory, model.failed = False, None
            if model.lost is not None and model.operations.running is not None:
                # Nobody waits for it any more.
                actions += self._finish(name, Failed(model.lost, "server"), now)
            model.operations.give_back()
        self._running, self._idle, self._order, self._untidy = None, None, None, True
        self._again.clear()
        if self._publishing is not None:
            # The version may have been accepted.
            self._publishing = None
            self._samplers.unpublished()
        if (scoring := self._scoring) is not None:
            self._scoring = None
            if not scoring.dropped:
                self._samplers.ask(scoring)
        return [*actions, *self.advance(now=now)]

    def request_gone(self, request: RequestId) -> None:
        """The caller of a waiting request hung up, or its long poll timed out."""
        if (future := self._waiting.pop(request, None)) is not None:
            self._waiting_for[future].remove(request)
        if self._idle == request:
            self._idle = None

    def advance(self, *, now: float) -> list[Action]:
        """End what is over, and give the learner its next operation. Call it when a deadline has passed."""
        actions: list[Action] = []
        for name, caller in list(self._callers.items()):
            actions += self._forgotten(caller.futures.forget_told(now=now))
            for session, heard_at in list(caller.sessions.items()):
                if heard_at + SILENT_S <= now:
                    actions += self._end_session(name, session, "its client was silent", now)
        for model in list(self._models):
            while (number := self._models[model].operations.skip_missing(now=now)) is not None:
                actions += self._missed(model, number, now)
        if self._wall_at_0 is not None:
            for path in self._checkpoints.expired(self._wall_at_0 + now):
                actions += self._drop(path)
        self._advanced_at = now
        actions += self._give(now)
        # While another version is published, what is drawn by the present one may come to nothing.
        return actions if self._publishing else [*actions, *self._samplers.begin(now=now)]

    def wake_at(self) -> float | None:
        times = [at for each in self._callers.values() for at in each.sessions.values()]
        gaps = [each.operations.gap_at for each in self._models.values()]
        expires = self._checkpoints.expires_at
        switches = self._samplers.wake_at(self._advanced_at)
        found = [] if switches is None else [switches]
        found += [at + SILENT_S for at in times] + [at for at in gaps if at is not None]
        if expires is not None and self._wall_at_0 is not None:
            found.append(expires - self._wall_at_0)
        return min(found, default=None)

    # --- calls of clients

    def _asked(self, event: ClientAsked, now: float) -> list[Action]:  # noqa: C901 - one line per call
        caller, request = event.caller, event.request
        own = self._callers.setdefault(caller, _Caller())
        match event.call:
            case OpenSession(session):
                if len(own.sessions) >= CALLER_SESSIONS_MAX:
                    return [
                        _refusal(request, 429, f"a token may have {CALLER_SESSIONS_MAX} sessions")
                    ]
                own.sessions[session] = now
                self._figures.opened(session, now=now)
                opened = Persist(SessionOpened(session, caller))
                told = {"type": "create_session", "session_id": session}
                return [opened, Reply(request, 200, told)]
            case KeepSession(session):
                if session not in own.sessions:
                    return [_refusal(request, 410, f"session {session} has ended")]
                own.sessions[session] = now
                return [Reply(request, 200, {"type": "session_heartbeat"})]
            case EndSession(session):
                ended = self._end_session(caller, session, "its client has finished", now)
                return [*ended, Reply(request, 200, {})]
            case Submit(operation):
                return self._submit(event, operation, now)
            case AwaitResult(future):
                return self._await(caller, request, future, now)
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
        caller, request, name = self._callers[event.caller], event.request, operation.model
        session, model = _session_of(name), self._models.get(name)
        if session not in caller.sessions or (model is None and operation.number):
            return [_missing(request, "model", name)]
        caller.sessions[session] = now
        mine = [each for each in self._models.values() if each.caller == event.caller]
        if sum(each.operations.waiting_bytes for each in mine) > CALLER_WAITING_BYTES_MAX:
            return [_refusal(request, 429, f"more than {CALLER_WAITING_BYTES_MAX} bytes wait")]
        if sum(each.operations.waiting for each in mine) >= CALLER_OPERATIONS_MAX:
            return [_refusal(request, 429, f"{CALLER_OPERATIONS_MAX} operations wait")]
        if model is None:
            if len(mine) >= CALLER_MODELS_MAX:
                return [_refusal(request, 429, f"a token may have {CALLER_MODELS_MAX} models")]
            model = self._models[name] = _Model(event.caller, session)
        future, taken = future_of(name, operation.number), []
        stays = replace(operation, body=b"", body_bytes=len(operation.body))
        try:
            new = model.operations.submit(stays, now=now)
        except NumberRefusedError as refused:
            # The future of this number is that of the other call.
            future = FutureId(f"{future}/{operation.digest.hex()[:16]}")
            caller.futures.promise(future)
            if caller.futures.tell(future, now=now) is None:
                caller.futures.keep(future, Failed(str(refused)))
        else:
            forgotten = not new and future not in caller.futures
            caller.futures.promise(future)
            taken = [Persist(OperationTaken(operation))] if new else []
            if forgotten:
                caller.futures.keep(future, Failed("its result is no longer kept", "server"))
        return [*taken, Reply(request, 200, {"request_id": future, "model_id": name})]

    def _await(self, caller: str, request: RequestId, future: FutureId, now: float) -> list[Action]:
        futures = self._callers[caller].futures
        if future not in futures:
            return [_refusal(request, 410, "no such future, or its result is no longer kept")]
        result = futures.tell(future, now=now)
        if result is None:
            self._waiting[request] = future
            self._waiting_for.setdefault(future, []).append(request)
            return []
        return [_told(request, result)]

    def _open_sampler(self, event: ClientAsked, asked: OpenSampler, now: float) -> list[Action]:
        caller = self._callers[event.caller]
        if asked.session not in caller.sessions:
            return [_missing(event.request, "session", asked.session)]
        caller.sessions[asked.session] = now
        folder, base = BASE, asked.base
        if asked.path is not None:
            saved = self._checkpoints.get(event.caller, asked.path)
            if saved is None:
                return [_missing(event.request, "checkpoint", asked.path)]
            folder, base = saved.folder, saved.model.base
        if base not in self._names:
            known = ", ".join(sorted(self._names))
            return [_refusal(event.request, 400, f"base_model: expected one of {known}")]
        opened = self._add_sampler(
            SamplerOpened(asked.sampler, event.caller, asked.session, folder, base, asked.path)
        )
        return [*opened, Reply(event.request, 200, {"sampling_session_id": asked.sampler})]

    def _add_sampler(self, opened: SamplerOpened) -> list[Action]:
        if self._samplers.get(opened.caller, opened.sampler) is not None:
            return []
        over = self._samplers.open(_sampler(opened), CALLER_SAMPLERS_MAX)
        self._untidy = bool(over) or self._untidy
        return [Persist(opened), *(Persist(SamplerOver(each)) for each in over)]

    def _sample(self, event: ClientAsked, asked: SampleAsked, now: float) -> list[Action]:
        caller, request = self._callers[event.caller], event.request
        sampler = self._samplers.get(event.caller, asked.sampler)
        if sampler is None:
            return [_missing(request, "sampler", asked.sampler)]
        caller.sessions[sampler.session] = now
        future = FutureId(f"{sampler.name}/{asked.number}")
        names = [f"{future}/{each}" for each in range(asked.count)]
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
        caller.futures.promise(future)
        if asked.order is not None and fault is None:
            self._samplers.ask(AskedSample(future, sampler, asked.order, now))
        elif caller.futures.tell(future, now=now) is None:
            caller.futures.keep(future, Failed(fault or "it says nothing to draw"))
        return [Reply(request, 200, told | {"request_id": future})]

    def _sample_ended(self, event: SampleEnded, now: float) -> list[Action]:
        sample = self._samplers.drawn(event.future)
        if self._samplers.ended(event.future, again=event.again, now=now) or sample is None:
            return []
        result = event.result
        if isinstance(result, bytes):
            # Two protobuf messages, one after the other, are one message with the fields of both.
            result += sample.scores or b""
            self._figures.sampled(sample, event.tokens)
        return self._keep(sample.sampler.caller, event.future, result, now)

    def _stop_sample(self, caller: str, future: FutureId, why: str, now: float) -> list[Action]:
        """End a sample that its client needs no longer. why: what its future says."""
        drawn = self._samplers.drop(future)
        if self._scoring is not None and self._scoring.future == future:
            self._scoring.dropped = True
        stop: list[Action] = [StopSample(future)] if drawn else []
        return [*stop, *self._keep(caller, future, Failed(why), now)]

    def _end_session(self, caller: str, session: SessionName, why: str, now: float) -> list[Action]:
        if self._callers[caller].sessions.pop(session, None) is None:
            return []
        actions: list[Action] = [Persist(SessionOver(session))]
        self._figures.session_ended(session)
        why = f"the session has ended: {why}"
        samples = self._samplers.end_session(session)
        scoring = self._scoring
        if scoring is not None and scoring.sampler.session == session and not scoring.dropped:
            samples.append(scoring)
        for sample in samples:
            actions += self._stop_sample(caller, sample.future, why, now)
        self._untidy = True
        for name, model in list(self._models.items()):
            if model.session == session:
                model.lost = why
                for number in model.operations.end_all():
                    future = future_of(name, number)
                    actions += self._keep(caller, future, Failed(why, "server"), now)
                if not self._busy(model):
                    self._forget(name)
        return actions

    def _busy(self, model: _Model) -> bool:
        return model.operations.running is not None or model.operations.waiting > 0

    def _forget(self, name: ModelId) -> None:
        del self._models[name]
        self._untidy = True

    def _forgotten(self, futures: Iterable[FutureId]) -> list[Action]:
        """The results of these futures are not needed any more."""
        named = (each.rpartition("/") for each in futures)
        return [
            Persist(ResultForgotten(ModelId(name), int(number)))
            for name, _, number in named
            if name in self._models
        ]

    def _missed(self, name: ModelId, number: int, now: float) -> list[Action]:
        """A number has not come in time. It counts as a part of a gradient that has failed."""
        model = self._models[name]
        nothing = Digest(b"")
        operation = Operation(name, number, "forward_backward", nothing, fault=MISSING, adds=True)
        model.replay.ended(operation, failed=True)
        self._callers[model.caller].futures.promise(future_of(name, number))
        told = self._over(model, operation, Failed(MISSING), needed=True, now=now)
        return [Persist(OperationTaken(operation)), *told]

    def _drop(self, path: str) -> list[Action]:
        self._checkpoints.drop(path)
        self._untidy = True
        return [Persist(CheckpointDropped(path))]

    # --- the learner

    def _give(self, now: float) -> list[Action]:
        """Answer an idle learner, if there is something to do."""
        actions: list[Action] = []
        while self._idle is not None and self._order is None:
            if self._again:
                self._order = self._again.popleft()
            elif self._untidy:
                self._order, self._untidy = self._own_order("keep", self._kept()), False
            elif (folder := self._samplers.wanted(now=now)) is not None:
                newest = self._versions.newest
                published = 0 if newest is None else newest.version
                self._last_version = Version(max(published, self._last_version) + 1)
                self._publishing = (folder, self._last_version)
                said = {"folder": folder, "version": self._last_version}
                self._order = self._own_order("publish", said)
            elif (name := self._next()) is not None and not self._scores_first():
                self._has_scored = False
                actions += self._begin(name, now)
            elif (sample := self._samplers.next_to_score()) is not None:
                self._scoring, self._has_scored = sample, True
                said = {"folder": sample.sampler.folder}
                self._order = self._own_order("score", said, sample.order.scored)
            else:
                break
        if self._idle is not None and self._order is not None:
            actions.append(self._order.given(self._idle))
            self._idle = None
        return actions

    def _own_order(self, kind: str, said: Mapping[str, Any], body: bytes = b"") -> _Order:
        self._own_orders += 1
        return _Order("", self._own_orders, kind, said, body)

    def _kept(self) -> dict[str, Any]:
        """The models and folders that the learner keeps."""
        made = {name: each for name, each in self._models.items() if each.made is not None}
        folders = {*self._checkpoints.folders(), *self._samplers.folders()}
        for name, model in made.items():
            folders |= {state_folder(name, number) for number in model.replay.states()}
            if model.made is not None and model.replay.saved is None:
                folders |= {model.made.folder} - {""}
        return {"folders": sorted(folders), "models": list(made)}

    def _step_saved(self, saved: StepSaved) -> list[Action]:
        model = self._models.get(saved.model)
        if model is None or not model.replay.step_saved(saved.number):
            return []
        self._untidy = True
        return [Persist(saved)]

    def _restore(self, name: ModelId, made: ModelMade) -> None:
        """Let the learner make a model again, as all that has ended left it."""
        replay = self._models[name].replay
        order = _Order(name, 0, *_making(made))
        if replay.saved is not None:
            folder = state_folder(name, replay.saved)
            order = _Order(name, replay.saved, "load", {"folder": folder, "optimizer": True})
        self._again.append(order)
        for each in replay.again():
            said = self._arguments(self._models[name], each)
            self._again.append(_Order(name, each.number, each.kind, said))

    def _restored_part(self, name: ModelId, result: Outcome) -> None:
        """The learner has computed a part of a model again."""
        model = self._models.get(name)
        if model is not None and isinstance(result, Failed):
            model.lost = f"{LOST} ({result.detail})"
        if model is None or isinstance(result, Failed):
            self._again.clear()
        elif not self._again:
            model.replay.in_memory = True

    def _sample_of(self, caller: str, future: FutureId) -> AskedSample | None:
        """What this caller waits for under this name, if it is a sample that has not ended."""
        scoring = self._scoring
        if scoring is not None and scoring.future == future and not scoring.dropped:
            sample: AskedSample | None = scoring
        else:
            sample = self._samplers.sample(future)
        return sample if sample is not None and sample.sampler.caller == caller else None

    def _scores_first(self) -> bool:
        """Prompts and operations take turns."""
        return self._samplers.has_to_score and not self._has_scored

    def _next(self) -> ModelId | None:
        """A model whose next operation can run, of the caller whose last turn was longest ago."""
        ready = [
            (self._callers[model.caller].turn, place, name)
            for place, (name, model) in enumerate(self._models.items())
            if model.operations.ready
        ]
        return min(ready)[2] if ready else None

    def _begin(self, name: ModelId, now: float) -> list[Action]:
        """Run the next operation of a model; one that cannot run ends at once."""
        model = self._models[name]
        if model.made is not None and not model.replay.in_memory and model.lost is None:
            self._restore(name, model.made)
            return []
        # The models of one caller take turns too.
        self._models[name] = self._models.pop(name)
        operation = model.operations.begin()
        self._turn += 1
        self._callers[model.caller].turn = self._turn
        failed = self._fault(model, operation)
        steps = operation.kind == "optim_step"
        drops = steps and (model.replay.spoiled or failed is not None)
        if failed is not None and (not drops or model.lost is not None or model.made is None):
            return self._finish(name, failed, now)
        # A step that cannot run leaves no gradient behind.
        model.failed = failed if failed is not None else Failed(DROPPED) if drops else None
        self._running = name
        number, kind = operation.number, operation.kind
        if drops:
            self._order = _Order(name, number, "discard")
        else:
            self._order = _Order(name, number, kind, self._arguments(model, operation))
        return []

    def _fault(self, model: _Model, operation: Operation) -> Failed | None:
        """Why an operation cannot run; None: it can."""
        said, caller = operation.arguments, model.caller
        if model.lost is not None:
            return Failed(model.lost, "server")
        if operation.fault is not None:
            return Failed(operation.fault)
        if operation.number and model.made is None:
            return Failed("the model was not made")
        if operation.kind == "create" and said["base"] not in self._names:
            known = ", ".join(sorted(self._names))
            return Failed(f"base_model: expected one of {known}; found {said['base']!r}")
        if operation.kind in CREATES and (full := self._checkpoints.full(caller)):
            return Failed(full)
        if operation.adds and self._kept_bytes(caller) > CALLER_KEPT_BYTES_MAX:
            return Failed(
                f"more than {CALLER_KEPT_BYTES_MAX} bytes of this token belong to no step whose state is on the "
                "learner's disk: send optim_step; if you did, its disk is full"
            )
        if operation.kind == "load":
            saved = self._checkpoints.get(caller, said["path"])
            if saved is None:
                return Failed(f"no checkpoint {said['path']}")
            if said["optimizer"] and "/weights/" not in saved.path:
                return Failed(f"{saved.path} has no optimizer state; expected a path of save_state")
        if operation.kind == "save" and said["sampler"] is None:
            refused = self._checkpoints.refusal(caller, said["path"], overwrite=said["overwrite"])
            return None if refused is None else Failed(refused)
        return None

    def _arguments(self, model: _Model, operation: Operation) -> Mapping[str, Any]:
        """What the learner needs of an operation."""
        said = operation.arguments
        if operation.kind == "load":
            saved = self._checkpoints.get(model.caller, said["path"])
            assert saved is not None, "_fault has looked"
            # The checkpoint may be deleted while the learner reads it.
            model.loads = saved
            return {"folder": saved.folder, "optimizer": said["optimizer"]}
        if operation.kind == "save":
            folder = folder_of(said["path"], operation.number)
            return {"folder": folder, "optimizer": "/weights/" in said["path"]}
        if operation.kind == "create":
            return _created(said["rank"], said["seed"], said["layers"])
        if operation.kind == "optim_step":
            return {**said, "folder": state_folder(operation.model, operation.number)}
        return said

    def _ended(self, event: OperationEnded, now: float) -> list[Action]:
        actions: list[Action] = [Reply(event.request, 200, {})]
        order = self._order
        if order is None or (event.model, event.number) != (order.model, order.number):
            return actions  # the report is repeated
        self._order, result = None, event.result
        if not order.model:
            return [*actions, *self._own_order_ended(result, now)]
        if self._running is None:
            self._restored_part(event.model, result)
            return actions
        model = self._models[self._running]
        operation = model.operations.running
        assert operation is not None
        if model.failed is not None:
            result, model.failed = model.failed, None
        elif model.lost is not None and operation.arguments.get("sampler") is not None:
            # Its session has ended, so nobody could use the sampler.
            result = Failed(model.lost, "server")
        elif isinstance(result, dict):
            result, kept = self._succeeded(model, operation, result, event.wall_s)
            actions += kept
        self._running = None
        return [*actions, *self._finish(event.model, result, now)]

    def _own_order_ended(self, result: Outcome, now: float) -> list[Action]:
        """The learner has scored a prompt, published weights, or freed what is not kept."""
        if self._scoring is not None:
            sample, self._scoring = self._scoring, None
            return self._scored(sample, result, now)
        publishing, self._publishing = self._publishing, None
        if publishing is None:
            return []
        if not isinstance(result, Failed):
            self._samplers.published(*publishing, now=now)
            return []
        failed = Failed(f"the weights cannot be published: {result.detail}", "server")
        lost = self._samplers.fail(publishing[0])
        return [
            action
            for sample in lost
            for action in self._keep(sample.sampler.caller, sample.future, failed, now)
        ]

    def _scored(self, sample: AskedSample, result: Outcome, now: float) -> list[Action]:
        caller = sample.sampler.caller
        if sample.future not in self._callers[caller].futures or sample.dropped:
            return []
        if isinstance(result, bytes):
            sample.scores = result
            self._samplers.ask(sample)
            return []
        failed = result if isinstance(result, Failed) else Failed("no scores came", "server")
        return self._keep(caller, sample.future, failed, now)

    def _succeeded(
        self, model: _Model, operation: Operation, found: dict[str, Any], wall_s: float
    ) -> tuple[dict[str, Any], list[Action]]:
        """What the client is told of an operation that has run, and what is kept of it."""
        said, name = operation.arguments, operation.model
        if operation.kind in CREATES:
            told: dict[str, Any] = {"type": "create_model", "model_id": name}
            own = name, model.caller, wall_s
            if (loads := model.loads) is None:
                shape = said["base"], said["rank"], tuple(said["layers"])
                made = ModelMade(*own, *shape, said["metadata"], seed=said["seed"])
            else:
                shape = loads.model.base, loads.model.rank, loads.model.layers
                source = loads.folder, said["optimizer"]
                made = ModelMade(*own, *shape, said["metadata"], 0, *source)
                told = {"type": "load_weights", "model_id": name, "path": said["path"]}
            model.made, model.replay.in_memory = made, True
            self._checkpoints.add_model(made)
            return told, [Persist(made)]
        if operation.kind == "save" and said["sampler"] is not None:
            assert model.made is not None
            folder = folder_of(said["path"], operation.number)
            sampler = SamplerName(said["sampler"])
            opened = self._add_sampler(
                SamplerOpened(sampler, model.caller, model.session, folder, model.made.base, None)
            )
            return {"type": said["type"], "sampling_session_id": sampler}, opened
        if operation.kind == "save":
            assert model.made is not None
            ttl_s = said["ttl_s"]
            saved = CheckpointSaved(
                said["path"],
                model.caller,
                wall_s,
                None if ttl_s is None else wall_s + ttl_s,
                folder_of(said["path"], operation.number),
                int(found["bytes"]),
                model.made,
                said["metadata"],
            )
            self._untidy = self._checkpoints.save(saved) or self._untidy
            return {"type": said["type"], "path": saved.path}, [Persist(saved)]
        told = self._figures.stepped(model.caller, model.session, name, found)
        return {"type": operation.kind, **told}, []

    def _finish(self, name: ModelId, result: Outcome, now: float) -> list[Action]:
        """The running operation of a model has ended."""
        model = self._models[name]
        operation = model.operations.running
        assert operation is not None
        model.operations.end(now=now)
        failed = isinstance(result, Failed)
        dropped = model.replay.ended(operation, failed=failed)
        needed = model.replay.needs(operation, failed=failed)
        actions = self._over(model, operation, result, needed=needed, now=now)
        if dropped:
            actions.append(Persist(GradientDropped(name, dropped.start, operation.number)))
        ended = model.session not in self._callers[model.caller].sessions
        if ended and not self._busy(model):
            self._forget(name)
        return actions

    def _over(
        self, model: _Model, operation: Operation, result: Outcome, *, needed: bool, now: float
    ) -> list[Action]:
        """An operation has ended: keep its result in the ledger too."""
        name, number = operation.model, operation.number
        told = self._keep(model.caller, future_of(name, number), result, now)
        return [Persist(OperationOver(name, number, result, needed)), *told]

    def _keep(self, caller: str, future: FutureId, result: Outcome, now: float) -> list[Action]:
        """Keep a result, and tell the calls that wait for it."""
        futures = self._callers[caller].futures
        forgotten = self._forgotten(futures.keep(future, result))
        waiting = self._waiting_for.pop(future, [])
        for each in waiting:
            del self._waiting[each]
            futures.tell(future, now=now)
        return [*forgotten, *(_told(each, result) for each in waiting)]

    def _kept_bytes(self, caller: str) -> int:
        """Of this caller's bodies that may have to be computed again."""
        return sum(each.replay.bytes for each in self._models.values() if each.caller == caller)

    # --- status

    def status(self, prices: Prices, *, now: float) -> TinkerStatus:
        queues, models, saved = self._samplers.queues(), self._models, self._checkpoints
        served, scoring = self._samplers.served, self._scoring
        if scoring is not None and not scoring.dropped:
            queues[scoring.sampler.session].unscored += 1
        sessions, callers = list[SessionStatus](), list[CallerStatus]()
        for name, caller in self._callers.items():
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
                for session, heard_at in caller.sessions.items()
            ]
            sessions += own
            callers.append(self._figures.caller(name, own, checkpoints.total()))
        return TinkerStatus(
            serves=None if served is None else served[0],
            serves_version=None if served is None else served[1],
            sessions=tuple(sessions),
            callers=tuple(callers),
        )

    def check(self) -> None:
        self._figures.check()
        for model in self._models.values():
            model.operations.check()
            model.replay.check()
        for caller in self._callers.values():
            caller.futures.check()
        self._samplers.check()
        running = [name for name, each in self._models.items() if each.operations.running]
        assert running == ([] if self._running is None else [self._running])


def _making(made: ModelMade) -> tuple[OperationKind, dict[str, Any]]:
    """How the learner makes this model: the kind of the order, and its arguments."""
    if made.folder:
        return "load", {"folder": made.folder, "optimizer": made.optimizer}
    return "create", _created(made.rank, made.seed, made.layers)


def _created(rank: int, seed: int, layers: Iterable[str]) -> dict[str, Any]:
    return {"rank": rank, "seed": seed, **{each: each in layers for each in LAYERS}}


def _sampler(opened: SamplerOpened) -> WeightsSampler:
    return WeightsSampler(
        opened.sampler, opened.caller, opened.session, opened.folder, opened.base, opened.path
    )


def _session_of(model: ModelId) -> SessionName:
    return SessionName(model.partition(":")[0])


def future_of(model: ModelId, number: int) -> FutureId:
    return FutureId(f"{model}/{number}")


def _told(request: RequestId, result: Outcome) -> Reply:
    if isinstance(result, Failed):
        return Reply(request, 200, {"error": result.detail, "category": result.category})
    return Reply(request, 200, result)


def _missing(request: RequestId, what: str, name: str) -> Reply:
    return _refusal(request, 404, f"no {what} {name[:200]}")


def _refusal(request: RequestId, status: int, detail: str) -> Reply:
    return Reply(request, status, {"detail": detail})
