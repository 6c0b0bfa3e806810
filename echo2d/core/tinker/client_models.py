"""The models that clients train now, each with its operations and what the learner would have to compute again.

    asked for --> made --> operations, in their order --> its session ends

A model that the learner has lost, or whose session has ended, has a reason why none of its operations can run. It is
forgotten when none waits.
Not here: which model is next (`learner_work`), models of sessions that have ended (`checkpoints`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from echo2d.core.tinker.events import CheckpointSaved, KeptClients, ModelMade, SessionName
from echo2d.core.tinker.futures import Failed
from echo2d.core.tinker.operations import ModelId, Operations
from echo2d.core.tinker.replay import ModelReplay
from echo2d.core.tinker.results import Results, future_of


@dataclass(slots=True)
class ClientModel:
    """caller: the token of its client."""

    caller: str
    session: SessionName
    operations: Operations = field(default_factory=Operations)
    replay: ModelReplay = field(default_factory=ModelReplay)
    # None until it is made, or if making it failed.
    made: ModelMade | None = None
    # The checkpoint from which it is made.
    loads: CheckpointSaved | None = None
    # Why none of its operations can run.
    lost: str | None = None
    # Whether its session has ended.
    over: bool = False
    # How often the learner has failed to make it again.
    restores: int = 0
    # How the running operation ends, although the learner drops the gradient for it.
    failed: Failed | None = None

    @property
    def busy(self) -> bool:
        return bool(self.operations.waiting) or self.operations.running is not None


class ClientModels(dict[ModelId, ClientModel]):
    """By their ids; the one that ran last comes last."""

    def of(self, caller: str) -> list[ClientModel]:
        return [each for each in self.values() if each.caller == caller]

    def in_session(self, session: SessionName) -> list[tuple[ModelId, ClientModel]]:
        return [(name, each) for name, each in self.items() if each.session == session]

    def absent(self) -> dict[ModelId, ModelMade]:
        """Those that the learner has still to make again."""
        return {
            name: each.made
            for name, each in self.items()
            if each.made is not None and each.lost is None and not each.replay.in_memory
        }

    def kept_bytes(self, caller: str) -> int:
        """Of this caller's bodies that may have to be computed again."""
        return sum(each.replay.bytes for each in self.of(caller))

    def gaps(self) -> Iterator[float]:
        """When missing numbers fail."""
        return (at for each in self.values() if (at := each.operations.gap_at) is not None)

    def recover(self, kept: KeptClients, results: Results) -> None:
        """Take what the ledger has of the sessions that are open."""
        owners = {each.session: each.caller for each in kept.sessions}
        saved = {each.model: each.number for each in kept.steps}
        made = {each.model: each for each in kept.models}
        for name in dict.fromkeys([*made, *(each.operation.model for each in kept.operations)]):
            if (of := session_of(name)) in owners:
                replay = ModelReplay(saved.get(name))
                self[name] = ClientModel(owners[of], of, replay=replay, made=made.get(name))
                self[name].operations.ended_up_to(saved.get(name, -1))
        for each in kept.operations:
            operation = each.operation
            if (model := self.get(operation.model)) is None:
                continue
            model.operations.recover(operation, ended=each.ended)
            if each.ended and each.needed:
                model.replay.ended(operation, failed=each.failed)
            futures = results.of(model.caller)
            future = future_of(operation.model, operation.number)
            if each.result is not None:
                futures.keep(future, each.result)
            elif not each.ended:
                futures.promise(future)

    def check(self) -> None:
        for each in self.values():
            each.operations.check()
            each.replay.check()


def session_of(model: ModelId) -> SessionName:
    return SessionName(model.partition(":")[0])
