"""The models that clients train now."""

from echo2d.core.base.canonical import digest_of
from echo2d.core.tinker.client_models import ClientModel, ClientModels, session_of
from echo2d.core.tinker.events import (
    KeptClients,
    KeptOperation,
    ModelMade,
    SessionName,
    SessionOpened,
    StepSaved,
)
from echo2d.core.tinker.futures import FutureId
from echo2d.core.tinker.operations import ModelId, Operation
from echo2d.core.tinker.results import Results

MODEL = ModelId("s1:train:0")


def kept(number: int, result: bytes | None, *, ended: bool = True) -> KeptOperation:
    digest = digest_of(b"%d" % number)
    operation = Operation(MODEL, number, "forward_backward", digest, body_bytes=10, adds=True)
    return KeptOperation(operation, result, ended=ended, failed=False)


def test_models_of_open_sessions_go_on_from_the_ledger() -> None:
    made = ModelMade(MODEL, "ann", 1.0, "org/base", 8, ("train_mlp",), "{}")
    old = ModelMade(ModelId("s0:train:0"), "ann", 1.0, "org/base", 8, ("train_mlp",), "{}")
    models, results = ClientModels(), Results()
    models.recover(
        KeptClients(
            models=(old, made),
            sessions=(SessionOpened(SessionName("s1"), "ann"),),
            operations=(kept(5, b"five"), kept(6, None), kept(7, None, ended=False)),
            steps=(StepSaved(MODEL, 4),),
        ),
        results,
    )
    assert list(models) == [MODEL], "the other session has ended"
    model = models[MODEL]
    assert (model.caller, model.made, model.replay.saved) == ("ann", made, 4)
    assert not model.replay.in_memory
    assert [each.number for each in model.replay.again()] == [5, 6]
    assert model.operations.begin().number == 7
    futures = results.of("ann")
    assert futures.tell(FutureId(f"{MODEL}/5"), now=0.0) == b"five"
    assert FutureId(f"{MODEL}/6") not in futures, "its client has had it"
    assert FutureId(f"{MODEL}/7") in futures
    models.check()
    results.check()


def test_models_are_found_by_caller_and_by_session() -> None:
    models = ClientModels()
    for session, caller in (("s1", "ann"), ("s2", "ann"), ("s3", "bob")):
        model = ModelId(f"{session}:train:0")
        models[model] = ClientModel(caller, session_of(model))
    assert len(models.of("ann")) == 2
    assert [name for name, _ in models.in_session(SessionName("s3"))] == ["s3:train:0"]
    assert list(models.gaps()) == []
    assert models.kept_bytes("ann") == 0
