"""The training service of the Tinker API as one machine.

    client: session -> model -> operations 0, 1, 2, ... --in their order--> learner --> result --> client
                                  one model after another, callers in turn

Every operation has a future, whose name follows from its model and number, and every fault of an operation is told in
that future: a client that is refused in another way may never send its next number. A session ends when its client says
so or is silent for SILENT_S; its models go with it, its checkpoints stay. The models live in the memory of the learner:
when another learner session begins, they are lost, and clients go on from a checkpoint. After models or checkpoints
have gone, the learner is told which ones to keep, and frees the others. For samples it publishes the weights that
workers are to serve next.
Not here: HTTP (`net/tinker`), what an operation computes (the learner).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, assert_never

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.codec import pack
from echo2d.core.base.ids import RequestId, Version
from echo2d.core.cluster.events import Persist, Reply
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.tinker.checkpoints import (
    SavedModels,
    checkpoint_json,
    folder_of,
    model_json,
    part,
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
    KeepSession,
    ListCheckpoints,
    ListModels,
    ModelMade,
    OpenSampler,
    OpenSession,
    OperationAsked,
    OperationEnded,
    SampleAsked,
    SampleEnded,
    SamplerName,
    SessionName,
    ShowCheckpoint,
    ShowModel,
    ShowSampler,
    StopSample,
    Submit,
    TinkerAction,
    TinkerEvent,
    TinkerRecord,
)
from echo2d.core.tinker.futures import Failed, FutureId, Futures, Outcome
from echo2d.core.tinker.operations import (
    DROPPED,
    MISSING,
    ModelId,
    NumberRefusedError,
    Operation,
    Operations,
)
from echo2d.core.tinker.samplers import BASE, AskedSample, Samplers, WeightsSampler

# A session ends after this long without a call. A client's heartbeat may starve while its own code computes.
SILENT_S = 900.0
# The next limits are for one caller.
CALLER_SESSIONS_MAX = 64
CALLER_MODELS_MAX = 16
CALLER_OPERATIONS_MAX = 8192
CALLER_WAITING_BYTES_MAX = 256 << 20
CALLER_SAMPLES_MAX = 4096
# Beyond this many samplers the oldest one ends.
CALLER_SAMPLERS_MAX = 256
# A sampler remembers this many numbers of calls.
SAMPLER_NUMBERS_MAX = 8192

CREATES: Final = frozenset({"create", "load"})
LOST = "the learner began again, and this model was in its memory: make a model from the last checkpoint"

Action = Persist[TinkerRecord] | Reply | TinkerAction


@dataclass(slots=True)
class _Model:
    caller: str
    session: SessionName
    operations: Operations = field(default_factory=Operations)
    # None until it is made, or if making it failed.
    made: ModelMade | None = None
    # The model of the checkpoint from which it is made.
    loads: ModelMade | None = None
    # Why none of its operations can run.
    lost: str | None = None
    # How the running operation ends, although the learner drops the gradient for it.
    failed: Failed | None = None


@dataclass(slots=True)
class _Caller:
    futures: Futures = field(default_factory=Futures)
    sessions: dict[SessionName, float] = field(default_factory=dict)  # when each was heard last
    turn: int = 0  # the number of the last turn that it had


class TinkerService:
    """See the module docstring. `now` is monotonic seconds. names: the names of the base model in the API."""

    def __init__(
        self,
        names: Sequence[str],
        versions: PublishedVersions,
        models: Sequence[ModelMade] = (),
        checkpoints: Sequence[CheckpointSaved] = (),
    ) -> None:
        self._names, self._versions = frozenset(names), versions
        self._samplers = Samplers()
        # The folder and version that the learner publishes now, and the last version that it was told to publish.
        self._publishing: tuple[str, Version] | None = None
        self._last_version = Version(0)
        # The sample whose prompt the learner scores now, and whether it has scored one since the last operation.
        self._scoring: AskedSample | None = None
        self._has_scored = False
        self._checkpoints = SavedModels(models, checkpoints)
        self._callers: dict[str, _Caller] = {}
        self._models: dict[ModelId, _Model] = {}
        self._turn = 0
        # Whether the learner may have models or checkpoints that are to be kept no longer.
        self._untidy = True
        # What the learner does now; it is told again if it missed the answer. None: nothing.
        self._order: bytes | None = None
        # The model of that operation; None: it is no client's.
        self._running: ModelId | None = None
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

    # --- events

    def handle(self, event: TinkerEvent, *, now: float) -> list[Action]:
        match event:
            case ClientAsked():
                self._wall_at_0 = event.wall_s - now
                return [*self._asked(event, now), *self.advance(now=now)]
            case OperationAsked(request):
                before, self._idle = self._idle, request
                stale = [] if before is None else [Reply(before, 204, {})]
                return [*stale, *self.advance(now=now)]
            case OperationEnded():
                self._wall_at_0 = event.wall_s - now
                return [*self._ended(event, now), *self.advance(now=now)]
            case SampleEnded():
                return [*self._sample_ended(event, now), *self.advance(now=now)]
            case _:
                assert_never(event)

    def learner_began(self, *, now: float) -> list[Action]:
        """Another learner session has begun, without the models of the one before."""
        actions: list[Action] = []
        for name, model in list(self._models.items()):
            running = model.operations.running
            if running is not None and running.kind in CREATES:
                model.operations.give_back()
            elif running is not None:
                actions += self._finish(name, Failed(LOST, "server"), now)
            if model.made is not None:
                model.lost = LOST
        if self._idle is not None:
            actions.append(Reply(self._idle, 204, {}))
        self._running, self._idle, self._order, self._untidy = None, None, None, True
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
            caller.futures.forget_told(now=now)
            for session, heard_at in list(caller.sessions.items()):
                if heard_at + SILENT_S <= now:
                    actions += self._end_session(name, session, "its client was silent", now)
        for model in list(self._models):
            while (number := self._models[model].operations.skip_missing(now=now)) is not None:
                future = future_of(model, number)
                of = self._models[model].caller
                self._callers[of].futures.promise(future)
                actions += self._keep(of, future, Failed(MISSING), now)
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
                return [Reply(request, 200, {"type": "create_session", "session_id": session})]
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
                return [self._open_sampler(event, event.call, now)]
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
        session = SessionName(name.partition(":")[0])
        model = self._models.get(name)
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
        future = future_of(name, operation.number)
        try:
            new = model.operations.submit(operation, now=now)
        except NumberRefusedError as refused:
            # The future of this number is that of the other call.
            future = FutureId(f"{future}/{operation.digest.hex()[:16]}")
            caller.futures.promise(future)
            if caller.futures.tell(future, now=now) is None:
                caller.futures.keep(future, Failed(str(refused)))
        else:
            forgotten = not new and future not in caller.futures
            caller.futures.promise(future)
            if forgotten:
                caller.futures.keep(future, Failed("its result is no longer kept", "server"))
        return [Reply(request, 200, {"request_id": future, "model_id": name})]

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

    def _open_sampler(self, event: ClientAsked, asked: OpenSampler, now: float) -> Reply:
        caller = self._callers[event.caller]
        if asked.session not in caller.sessions:
            return _missing(event.request, "session", asked.session)
        caller.sessions[asked.session] = now
        folder, base = BASE, asked.base
        if asked.path is not None:
            saved = self._checkpoints.get(event.caller, asked.path)
            if saved is None:
                return _missing(event.request, "checkpoint", asked.path)
            folder, base = saved.folder, saved.model.base
        if base not in self._names:
            known = ", ".join(sorted(self._names))
            return _refusal(event.request, 400, f"base_model: expected one of {known}")
        self._add_sampler(
            WeightsSampler(asked.sampler, event.caller, asked.session, folder, base, asked.path)
        )
        return Reply(event.request, 200, {"sampling_session_id": asked.sampler})

    def _add_sampler(self, sampler: WeightsSampler) -> None:
        if self._samplers.get(sampler.caller, sampler.name) is None:
            self._untidy = self._samplers.open(sampler, CALLER_SAMPLERS_MAX) or self._untidy

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
        return self._keep(sample.sampler.caller, event.future, result, now)

    def _stop_sample(self, caller: str, future: FutureId, why: str, now: float) -> list[Action]:
        """End a sample that its client needs no longer. why: what its future says."""
        drawn = self._samplers.drop(future)
        if self._scoring is not None and self._scoring.future == future:
            self._scoring.dropped = True
        stop: list[Action] = [StopSample(future)] if drawn else []
        return [*stop, *self._keep(caller, future, Failed(why), now)]

    def _end_session(self, caller: str, session: SessionName, why: str, now: float) -> list[Action]:
        actions: list[Action] = []
        if self._callers[caller].sessions.pop(session, None) is None:
            return actions
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

    def _drop(self, path: str) -> list[Action]:
        self._checkpoints.drop(path)
        self._untidy = True
        return [Persist(CheckpointDropped(path))]

    # --- the learner

    def _give(self, now: float) -> list[Action]:
        """Answer an idle learner, if there is something to do."""
        actions: list[Action] = []
        while self._idle is not None and self._order is None:
            if self._untidy:
                models = [name for name, each in self._models.items() if each.made is not None]
                folders = sorted({*self._checkpoints.folders(), *self._samplers.folders()})
                kept = {"folders": folders, "models": models}
                self._order, self._untidy = self._own_order("keep", kept), False
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
                said = {"folder": sample.sampler.folder, "last": sample.order.scored_last}
                self._order = self._own_order("score", said, sample.order.scored)
            else:
                break
        if self._idle is not None and self._order is not None:
            actions.append(Reply(self._idle, 200, self._order))
            self._idle = None
        return actions

    def _own_order(self, kind: str, said: Mapping[str, Any], body: bytes = b"") -> bytes:
        self._own_orders += 1
        return _order("", self._own_orders, kind, said, body)

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
        # The models of one caller take turns too.
        self._models[name] = self._models.pop(name)
        operation = model.operations.begin()
        self._turn += 1
        self._callers[model.caller].turn = self._turn
        failed = self._fault(model, operation)
        drops = model.operations.drops or (failed is not None and operation.kind == "optim_step")
        if failed is not None and (not drops or model.lost is not None or model.made is None):
            return self._finish(name, failed, now)
        # A step that cannot run leaves no gradient behind.
        model.failed = failed if failed is not None else Failed(DROPPED) if drops else None
        self._running = name
        number, kind = operation.number, operation.kind
        if drops:
            self._order = _order(name, number, "discard", {})
        else:
            arguments = self._arguments(model, operation)
            self._order = _order(name, number, kind, arguments, operation.body)
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
            model.loads = saved.model
            return {"folder": saved.folder, "optimizer": said["optimizer"]}
        if operation.kind == "save":
            folder = folder_of(said["path"], operation.number)
            return {"folder": folder, "optimizer": "/weights/" in said["path"]}
        if operation.kind == "create":
            layers = {each: each in said["layers"] for each in LAYERS}
            return {"rank": said["rank"], "seed": said["seed"], **layers}
        return said

    def _ended(self, event: OperationEnded, now: float) -> list[Action]:
        actions: list[Action] = [Reply(event.request, 200, {})]
        if self._order is None or event.model != (self._running or ""):
            return actions  # the report is repeated
        if self._running is None and event.number != self._own_orders:
            return actions
        if self._running is None:
            self._order = None
            return [*actions, *self._own_order_ended(event.result, now)]
        model = self._models[self._running]
        operation = model.operations.running
        assert operation is not None
        if operation.number != event.number:
            return actions
        result = event.result
        if model.failed is not None:
            result, model.failed = model.failed, None
        elif model.lost is not None and operation.arguments.get("sampler") is not None:
            # Its session has ended, so nobody could use the sampler.
            result = Failed(model.lost, "server")
        elif isinstance(result, dict):
            result, kept = self._succeeded(model, operation, result, event.wall_s)
            actions += kept
        self._running, self._order = None, None
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
            if model.loads is None:
                base, rank, layers = said["base"], said["rank"], tuple(said["layers"])
            else:
                base, rank, layers = model.loads.base, model.loads.rank, model.loads.layers
                told = {"type": "load_weights", "model_id": name, "path": said["path"]}
            model.made = ModelMade(name, model.caller, wall_s, base, rank, layers, said["metadata"])
            self._checkpoints.add_model(model.made)
            return told, [Persist(model.made)]
        if operation.kind == "save" and said["sampler"] is not None:
            assert model.made is not None
            folder = folder_of(said["path"], operation.number)
            sampler = SamplerName(said["sampler"])
            base = model.made.base
            self._add_sampler(
                WeightsSampler(sampler, model.caller, model.session, folder, base, None)
            )
            return {"type": said["type"], "sampling_session_id": sampler}, []
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
        return {"type": operation.kind, **found}, []

    def _finish(self, name: ModelId, result: Outcome, now: float) -> list[Action]:
        """The running operation of a model has ended."""
        model = self._models[name]
        operation = model.operations.running
        assert operation is not None
        model.operations.end(failed=isinstance(result, Failed), now=now)
        actions = self._keep(model.caller, future_of(name, operation.number), result, now)
        ended = model.session not in self._callers[model.caller].sessions
        if ended and not self._busy(model):
            self._forget(name)
        return actions

    def _keep(self, caller: str, future: FutureId, result: Outcome, now: float) -> list[Action]:
        """Keep a result, and tell the calls that wait for it."""
        futures = self._callers[caller].futures
        futures.keep(future, result)
        waiting = self._waiting_for.pop(future, [])
        for each in waiting:
            del self._waiting[each]
            futures.tell(future, now=now)
        return [_told(each, result) for each in waiting]

    def check(self) -> None:
        for model in self._models.values():
            model.operations.check()
        for caller in self._callers.values():
            caller.futures.check()
        self._samplers.check()
        running = [name for name, each in self._models.items() if each.operations.running]
        assert running == ([] if self._running is None else [self._running])


def _order(
    model: str, number: int, kind: str, arguments: Mapping[str, Any], body: bytes = b""
) -> bytes:
    """An order to the learner, as `client.tinker` reads it."""
    return pack(
        {"model": model, "number": number, "kind": kind, "arguments": arguments, "body": body}
    )


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
