"""What the learner does next for the clients of the Tinker API, and what follows from what it has done.

    a model is made again --> others are freed --> weights are published --> samples to score and operations, in turns

Callers take turns, and so do the models of one caller. A model that is not in the learner's memory as all that has
ended left it is made again before its next operation, and before a new model is made: from the last step whose state is
on the learner's disk, and the operations since (`replay`). After models, steps or checkpoints have gone, the learner is
told which ones to keep, and frees the others.
Not here: calls of clients (`service`), what an operation computes (the learner).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from echo2d.core.base.codec import pack
from echo2d.core.base.ids import Digest, RequestId, Version
from echo2d.core.cluster.events import Persist, Reply, Send
from echo2d.core.cluster.versions import PublishedVersions
from echo2d.core.tinker.checkpoints import SavedModels, folder_of, state_folder
from echo2d.core.tinker.client_models import ClientModel, ClientModels
from echo2d.core.tinker.draw_queue import AskedSample
from echo2d.core.tinker.events import (
    LAYERS,
    CheckpointSaved,
    GiveOperation,
    GradientDropped,
    ModelMade,
    OperationEnded,
    OperationTaken,
    SamplerName,
    SamplerOpened,
    StepSaved,
    TinkerAction,
    TinkerRecord,
)
from echo2d.core.tinker.figures import Figures
from echo2d.core.tinker.futures import Failed, Outcome
from echo2d.core.tinker.operations import DROPPED, MISSING, ModelId, Operation, OperationKind
from echo2d.core.tinker.results import Results, future_of
from echo2d.core.tinker.samplers import Samplers

# Bodies of one caller that the ledger keeps to compute them again.
CALLER_KEPT_BYTES_MAX = 4 << 30

CREATES: Final = frozenset({"create", "load"})
# The learner frees the states of older steps this often.
KEEP_EVERY_S = 10.0
# A model that the learner failed to make again this often is lost.
RESTORES_MAX = 3
LOST = "the learner began again, and cannot compute this model again: make a model from the last checkpoint"

Action = Persist[TinkerRecord] | Reply | Send | TinkerAction


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


class LearnerWork:
    """See the module docstring. `now` is monotonic seconds. names: the names of the base model in the API.

    staleness_max: how many optimizer steps older than the model sampled tokens may be; None: any. hold: has workers
    hold these versions beside the next one, and no others.
    """

    def __init__(
        self,
        names: Iterable[str],
        versions: PublishedVersions,
        *,
        staleness_max: int | None,
        hold: Callable[[Sequence[Version]], Sequence[Send]],
        models: ClientModels,
        results: Results,
        checkpoints: SavedModels,
        samplers: Samplers,
        figures: Figures,
    ) -> None:
        self._names, self._versions = frozenset(names), versions
        self._staleness_max, self._hold = staleness_max, hold
        self._models, self._results, self._checkpoints = models, results, checkpoints
        self._samplers, self._figures = samplers, figures
        # The folder and version that the learner publishes now, and the last version that it was told to publish.
        self._publishing: tuple[str, Version] | None = None
        self._last_version = Version(0)
        # The sample that the learner scores now, and whether it has scored one since the last operation.
        self._scoring: AskedSample | None = None
        self._has_scored = False
        # Whether the learner may have models or checkpoints that are to be kept no longer, and states of older steps.
        self.untidy = True
        self._old_states, self._kept_at = False, -math.inf
        # What the learner does now; it is told again if it missed the answer. None: nothing.
        self._order: _Order | None = None
        # The model of the operation that runs; None: the order is no client's.
        self._running: ModelId | None = None
        # What the learner has still to compute of the model that it makes again.
        self._again: deque[_Order] = deque()
        # The learner's call for the next operation.
        self._idle: RequestId | None = None
        # The number of the learner's orders that no client has numbered.
        self._own_orders = 0
        # When each caller had its last turn, in turns.
        self._turns: dict[str, int] = {}
        self._turn = 0

    @property
    def scoring(self) -> AskedSample | None:
        """The sample that the learner scores, if its client still needs it."""
        return None if self._scoring is None or self._scoring.dropped else self._scoring

    # --- calls of the learner

    def asked(self, request: RequestId, saved: Iterable[StepSaved]) -> list[Action]:
        """The learner is idle."""
        before, self._idle = self._idle, request
        stale = [] if before is None else [Reply(before, 204, {})]
        return [*(action for each in saved for action in self._step_saved(each)), *stale]

    def request_gone(self, request: RequestId) -> None:
        if self._idle == request:
            self._idle = None

    def began(self, *, now: float) -> list[Action]:
        """Another learner session has begun, without the models of the one before."""
        actions: list[Action] = [] if self._idle is None else [Reply(self._idle, 204, {})]
        for name, model in list(self._models.items()):
            model.replay.in_memory, model.failed = False, None
            if model.lost is not None and model.operations.running is not None:
                # Nobody waits for it any more.
                actions += self._finish(name, Failed(model.lost, "server"), now)
            model.operations.give_back()
        self._running, self._idle, self._order, self.untidy = None, None, None, True
        self._again.clear()
        if self._publishing is not None:
            # The version may have been accepted, but nothing is drawn from it.
            self._publishing = None
        if (scoring := self._scoring) is not None:
            self._scoring = None
            if not scoring.dropped:
                self._samplers.ask(scoring)
        return actions

    def ended(self, event: OperationEnded, *, now: float) -> list[Action]:
        actions: list[Action] = [Reply(event.request, 200, {})]
        order = self._order
        if order is None or (event.model, event.number) != (order.model, order.number):
            return actions  # the report is repeated
        return [*actions, *self._over(order, event.result, event.wall_s, now)]

    def lost(self, model: ModelId, number: int, *, now: float) -> list[Action]:
        """The learner cannot get the order that it was given."""
        order = self._order
        if order is None or (model, number) != (order.model, order.number):
            return []
        return self._over(order, Failed("its session has ended", "server"), 0.0, now)

    def _over(self, order: _Order, result: Outcome, wall_s: float, now: float) -> list[Action]:
        """The learner has done what it was told."""
        self._order = None
        if not order.model:
            return self._own_order_ended(result, now)
        if self._running is None:
            self._restored_part(ModelId(order.model), result)
            return []
        actions: list[Action] = []
        model = self._models[self._running]
        operation = model.operations.running
        assert operation is not None
        if model.failed is not None:
            result, model.failed = model.failed, None
        elif model.lost is not None and operation.arguments.get("sampler") is not None:
            # Its session has ended, so nobody could use the sampler.
            result = Failed(model.lost, "server")
        elif isinstance(result, dict):
            result, kept = self._succeeded(model, operation, result, wall_s)
            actions += kept
        self._running = None
        return [*actions, *self._finish(operation.model, result, now)]

    # --- models

    def add_sampler(self, opened: SamplerOpened) -> list[Action]:
        """Open a sampler, whose name is not in use."""
        over = self._samplers.open(opened)
        moved = self._samplers.follow(opened) if opened.follows else []
        self.untidy = bool(over or moved) or self.untidy
        return [Persist(opened), *map(Persist, moved), *map(Persist, over)]

    def missed(self, name: ModelId, number: int, now: float) -> list[Action]:
        """A number has not come in time. It counts as a part of a gradient that has failed."""
        model = self._models[name]
        nothing = Digest(b"")
        operation = Operation(name, number, "forward_backward", nothing, fault=MISSING, adds=True)
        self._results.of(model.caller).promise(future_of(name, number))
        return [
            Persist(OperationTaken(operation)),
            *self._count(model, operation, Failed(MISSING), now),
        ]

    def forget(self, name: ModelId) -> None:
        if self._again and self._again[0].model == name:
            self._again.clear()
        del self._models[name]
        self.untidy = True

    # --- orders

    def give(self, *, now: float) -> list[Action]:
        """Answer an idle learner, if there is something to do."""
        actions: list[Action] = []
        while self._idle is not None and self._order is None:
            if self._again:
                self._order = self._again.popleft()
            elif self.untidy or (self._old_states and now >= self._kept_at + KEEP_EVERY_S):
                self._order = self._own_order("keep", self._kept())
                self.untidy, self._old_states, self._kept_at = False, False, now
            elif (folder := self._samplers.held.wanted(now=now)) is not None:
                actions += self._hold(self._samplers.held.make_room(folder))
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
                self._order = self._own_order(*_scoring(sample))
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
        models = [name for name, model in made.items() if model.lost is None]
        return {"folders": sorted(folders), "models": models}

    def _step_saved(self, saved: StepSaved) -> list[Action]:
        model = self._models.get(saved.model)
        if model is None or not model.replay.step_saved(saved.number):
            return []
        self._old_states = True
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
            # It was not too stale when it was computed first.
            adds = each.kind == "forward_backward"
            said = {} if adds else self._arguments(self._models[name], each)
            self._again.append(_Order(name, each.number, each.kind, said))

    def _restored_part(self, name: ModelId, result: Outcome) -> None:
        """The learner has computed a part of a model again."""
        model = self._models.get(name)
        if model is not None and isinstance(result, Failed):
            model.restores += 1
            if result.category == "user" or model.restores == RESTORES_MAX:
                model.lost, self.untidy = f"{LOST} ({result.detail})", True
        if model is None or isinstance(result, Failed):
            self._again.clear()
        elif not self._again:
            model.replay.in_memory, model.restores = True, 0

    def _scores_first(self) -> bool:
        """Samples to score and operations take turns."""
        return self._samplers.has_to_score and not self._has_scored

    def _next(self) -> ModelId | None:
        """A model whose next operation can run, of the caller whose last turn was longest ago."""
        ready = [
            (self._turns.get(model.caller, 0), place, name)
            for place, (name, model) in enumerate(self._models.items())
            if model.operations.ready
        ]
        return min(ready)[2] if ready else None

    def _begin(self, name: ModelId, now: float) -> list[Action]:
        """Run the next operation of a model, or first make a model again; an operation that cannot run ends at once."""
        model = self._models[name]
        absent = self._models.absent()
        if absent and (name in absent or model.made is None):
            # A new model must not take the memory of one that is still to be made again.
            again = name if name in absent else next(iter(absent))
            self._restore(again, absent[again])
            return []
        # The models of one caller take turns too.
        self._models[name] = self._models.pop(name)
        operation = model.operations.begin()
        self._turn += 1
        self._turns[model.caller] = self._turn
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

    def _fault(self, model: ClientModel, operation: Operation) -> Failed | None:
        """Why an operation cannot run; None: it can."""
        said, caller = operation.arguments, model.caller
        if model.lost is not None:
            return Failed(model.lost, "server")
        if operation.fault is not None:
            return Failed(operation.fault)
        if operation.number and model.made is None:
            return Failed("the model was not made")
        if operation.kind in CREATES:
            return self._making_fault(caller, operation)
        learns = operation.adds or operation.kind == "optim_step"
        if learns and self._models.kept_bytes(caller) > CALLER_KEPT_BYTES_MAX:
            return Failed(
                f"more than {CALLER_KEPT_BYTES_MAX} bytes of this token belong to no step whose state is on the "
                "learner's disk: send optim_step; if you did, its disk is full"
            )
        if operation.kind == "save" and said["sampler"] is not None:
            sampler = SamplerName(said["sampler"])
            taken = self._samplers.get(caller, sampler) is not None
            return Failed(f"sampler {sampler} is open already") if taken else None
        if operation.kind == "save":
            refused = self._checkpoints.refusal(caller, said["path"], overwrite=said["overwrite"])
            return None if refused is None else Failed(refused)
        return None

    def _making_fault(self, caller: str, operation: Operation) -> Failed | None:
        """Why a model cannot be made; None: it can."""
        said = operation.arguments
        if operation.kind == "create" and said["base"] not in self._names:
            known = ", ".join(sorted(self._names))
            return Failed(f"base_model: expected one of {known}; found {said['base']!r}")
        rank = said.get("rank")
        if operation.kind == "load":
            saved = self._checkpoints.get(caller, said["path"])
            if saved is None:
                return Failed(f"no checkpoint {said['path']}")
            if said["optimizer"] and "/weights/" not in saved.path:
                return Failed(f"{saved.path} has no optimizer state; expected a path of save_state")
            rank = saved.model.rank
        ranks = {each.made.rank for each in self._models.values() if each.made and not each.lost}
        if rank == 0 and 0 in ranks:
            why = "another one is there until its session ends"
            return Failed(f"one model of full weights at a time: {why}")
        return None

    def _arguments(self, model: ClientModel, operation: Operation) -> Mapping[str, Any]:
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
        if operation.kind == "forward_backward":
            return {"staleness_max": self._staleness_max}
        return {**said, "folder": state_folder(operation.model, operation.number)}

    # --- what the learner has done

    def _own_order_ended(self, result: Outcome, now: float) -> list[Action]:
        """The learner has scored a sample, published weights, or freed what is not kept."""
        if self._scoring is not None:
            sample, self._scoring = self._scoring, None
            return self._scored(sample, result, now)
        publishing, self._publishing = self._publishing, None
        if publishing is None:
            return []
        if not isinstance(result, Failed):
            self._samplers.held.published(*publishing, now=now)
            return []
        failed = Failed(f"the weights cannot be published: {result.detail}", "server")
        lost = self._samplers.fail(publishing[0])
        return [
            action
            for sample in lost
            for action in self._results.keep(sample.sampler.caller, sample.future, failed, now=now)
        ]

    def _scored(self, sample: AskedSample, result: Outcome, now: float) -> list[Action]:
        caller = sample.sampler.caller
        if sample.future not in self._results.of(caller) or sample.dropped:
            return []
        if isinstance(result, bytes) and sample.drawn is None:
            sample.scores = result
            self._samplers.ask(sample)
            return []
        if isinstance(result, bytes):
            told: Outcome = sample.answer(result)
        else:
            told = result if isinstance(result, Failed) else Failed("no scores came", "server")
        return [*self._results.keep(caller, sample.future, told, now=now)]

    def _succeeded(
        self, model: ClientModel, operation: Operation, found: dict[str, Any], wall_s: float
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
            forgotten = self._checkpoints.add_model(made, self._models.keys())
            return told, [Persist(made), *map(Persist, forgotten)]
        if operation.kind == "save" and said["sampler"] is not None:
            assert model.made is not None
            folder = folder_of(said["path"], operation.number)
            sampler = SamplerName(said["sampler"])
            opened = SamplerOpened(
                sampler,
                model.caller,
                model.session,
                folder,
                model.made.base,
                path=None,
                model=name,
                steps=int(found["steps"]),
                follows=said["follows"],
                whole=model.made.rank == 0,
            )
            told = {"type": said["type"], "sampling_session_id": sampler}
            return told, self.add_sampler(opened)
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
            self.untidy = self._checkpoints.save(saved) or self.untidy
            return {"type": said["type"], "path": saved.path}, [Persist(saved)]
        told = self._figures.stepped(model.caller, model.session, name, found)
        return {"type": operation.kind, **told}, []

    def _finish(self, name: ModelId, result: Outcome, now: float) -> list[Action]:
        """The running operation of a model has ended."""
        model = self._models[name]
        operation = model.operations.running
        assert operation is not None
        model.operations.end(now=now)
        actions = self._count(model, operation, result, now)
        if model.over and not model.busy:
            self.forget(name)
        return actions

    def _count(
        self, model: ClientModel, operation: Operation, result: Outcome, now: float
    ) -> list[Action]:
        """Keep the result of an operation, and what follows from it for those before it."""
        name, number = operation.model, operation.number
        ended = model.replay.ended(operation, failed=isinstance(result, Failed))
        over = self._results.over(model.caller, name, number, result, needed=ended.needed, now=now)
        dropped = [] if ended.dropped is None else [GradientDropped(name, *ended.dropped)]
        return [*over, *map(Persist, dropped)]

    def check(self) -> None:
        running = [name for name, each in self._models.items() if each.operations.running]
        assert running == ([] if self._running is None else [self._running])


def _scoring(sample: AskedSample) -> tuple[str, dict[str, Any], bytes]:
    """How the learner scores the prompt of this sample or, once they are drawn, its sequences."""
    order = sample.order
    if sample.drawn is None:
        return "score", {"folder": sample.sampler.folder}, order.scored
    said = {
        "folder": sample.drawn_with,
        "prompt": order.prompt,
        "top_tokens": order.top_tokens,
        "temperature": order.sampling.temperature,
    }
    return "score_sample", said, sample.drawn


def _making(made: ModelMade) -> tuple[OperationKind, dict[str, Any]]:
    """How the learner makes this model: the kind of the order, and its arguments."""
    if made.folder:
        return "load", {"folder": made.folder, "optimizer": made.optimizer}
    return "create", _created(made.rank, made.seed, made.layers)


def _created(rank: int, seed: int, layers: Iterable[str]) -> dict[str, Any]:
    return {"rank": rank, "seed": seed, **{each: each in layers for each in LAYERS}}
