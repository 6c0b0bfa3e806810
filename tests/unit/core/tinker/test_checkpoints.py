"""The models and checkpoints of clients."""

from dataclasses import replace

import pytest

from echo2d.core.tinker import checkpoints as module
from echo2d.core.tinker.checkpoints import SavedModels, folder_of, path_of
from echo2d.core.tinker.events import CheckpointSaved, ModelForgotten, ModelMade
from echo2d.core.tinker.operations import ModelId

MODEL = ModelId("s:train:0")
MADE = ModelMade(MODEL, "ann", 1.0, "org/base", 8, ("train_attn",), "{}")
ONE = CheckpointSaved(path_of(MODEL, "weights", "one"), "ann", 2.0, None, "f1", 10, MADE, "{}")


def test_a_folder_is_opaque_and_that_of_one_save() -> None:
    assert folder_of(ONE.path, 1) != folder_of(ONE.path, 2)
    assert len(bytes.fromhex(folder_of(ONE.path, 1))) == 16


def test_the_next_expiry_is_that_of_the_checkpoint_that_expires_first() -> None:
    saved = SavedModels([MADE], [ONE])
    for name, at in (("late", 9.0), ("soon", 5.0)):
        saved.save(replace(ONE, path=path_of(MODEL, "weights", name), expires_at=at))
    assert saved.expires_at == 5.0
    assert saved.expired(4.9) == []
    assert saved.expired(9.0) == [path_of(MODEL, "weights", each) for each in ("late", "soon")]
    saved.drop(path_of(MODEL, "weights", "soon"))
    assert saved.expires_at == 9.0
    saved.expire(path_of(MODEL, "weights", "late"), None)
    assert saved.expired(1e12) == []


def test_the_checkpoints_of_a_caller_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALLER_CHECKPOINTS_MAX", 1)
    saved = SavedModels([MADE], [ONE])
    two = path_of(MODEL, "weights", "two")
    assert saved.refusal("ann", two, overwrite=False) == (
        "a caller may keep 1 checkpoints: delete some"
    )
    assert saved.refusal("ann", ONE.path, overwrite=True) is None
    assert saved.refusal("bob", two, overwrite=False) is None


def test_the_oldest_models_that_nobody_needs_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CALLER_MODELS_LISTED_MAX", 2)
    saved = SavedModels([MADE], [ONE])
    second, third, fourth = (
        replace(MADE, model=ModelId(f"s:train:{number}")) for number in (7, 8, 9)
    )
    assert saved.add_model(replace(second, model=ModelId("t:train:0"), caller="bob")) == []
    assert saved.add_model(second) == []
    assert saved.add_model(third, {second.model}) == [], "one has a checkpoint, and one is needed"
    assert saved.add_model(fourth) == [ModelForgotten(second.model), ModelForgotten(third.model)]
    assert [each.model for each in saved.models("ann")] == [fourth.model, MADE.model]


def test_the_bytes_of_a_callers_checkpoints_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALLER_CHECKPOINT_BYTES_MAX", 10)
    saved = SavedModels([MADE], [ONE])
    two = path_of(MODEL, "weights", "two")
    assert "expected less than 10 bytes of a caller; found 10" in str(
        saved.refusal("ann", two, overwrite=False)
    )
    assert saved.refusal("bob", two, overwrite=False) is None
