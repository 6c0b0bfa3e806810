"""The models that clients have made, and their checkpoints: names, owners, when they expire.

    tinker://SESSION:train:N/KIND/NAME      on the learner's disk in a folder of an opaque name

A name of a client never becomes a path. A caller sees, loads and deletes its own only; those of others do not exist for
it. Not here: the files (`learner/tinker`).
"""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from blake3 import blake3

from echo2d.core.tinker.events import LAYERS, CheckpointSaved, ModelForgotten, ModelMade
from echo2d.core.tinker.operations import ModelId

SCHEME = "tinker://"
# The kinds, and what the API calls them in lists.
KINDS = {"weights": "training", "sampler_weights": "sampler"}
_PATH = re.compile(rf"{SCHEME}[^/]+/({'|'.join(KINDS)})/[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}")
# Of one caller.
CALLER_CHECKPOINTS_MAX, CALLER_CHECKPOINT_BYTES_MAX = 1000, 256 << 30
# Of its models that have ended, the newest are listed.
CALLER_MODELS_LISTED_MAX = 10_000

_Item = TypeVar("_Item")


def path_of(model: ModelId, kind: str, name: str) -> str:
    return f"{SCHEME}{model}/{kind}/{name}"


def folder_of(path: str, number: int) -> str:
    """Where the learner keeps what operation `number` saves under this path; another save has another folder."""
    return blake3(f"{path}\n{number}".encode()).hexdigest(16)


def state_folder(model: ModelId, number: int) -> str:
    """Where the learner keeps the state of a model after optimizer step `number`."""
    return folder_of(f"{model}/state", number)


class SavedModels:
    """See the module docstring."""

    def __init__(self, models: Iterable[ModelMade], saved: Iterable[CheckpointSaved]) -> None:
        self._models = {each.model: each for each in models}
        self._saved = {each.path: each for each in saved}
        # When the next checkpoint expires, in seconds since 1970.
        self.expires_at: float | None = None
        self._look_for_expiry()

    def add_model(self, made: ModelMade, needed: Collection[ModelId] = ()) -> list[ModelForgotten]:
        """Beyond CALLER_MODELS_LISTED_MAX the caller's oldest one is forgotten that has no checkpoint, and is not among
        the needed ones. Returns those that are.
        """
        self._models[made.model] = made
        mine = [name for name, each in self._models.items() if each.caller == made.caller]
        if (beyond := len(mine) - CALLER_MODELS_LISTED_MAX) <= 0:
            return []
        kept = {made.model, *needed, *(each.model.model for each in self._saved.values())}
        over = [name for name in mine if name not in kept][:beyond]
        for name in over:
            del self._models[name]
        return [*map(ModelForgotten, over)]

    def model(self, caller: str, model: ModelId) -> ModelMade | None:
        found = self._models.get(model)
        return found if found is not None and found.caller == caller else None

    def models(self, caller: str) -> list[ModelMade]:
        """The caller's models; the newest comes first."""
        return [each for each in reversed(self._models.values()) if each.caller == caller]

    def get(self, caller: str, path: str) -> CheckpointSaved | None:
        found = self._saved.get(path)
        return found if found is not None and found.caller == caller else None

    def of(self, caller: str, model: ModelId | None) -> list[CheckpointSaved]:
        """The caller's checkpoints, of one model or of all; the newest comes first."""
        return [
            each
            for each in reversed(self._saved.values())
            if each.caller == caller and model in (None, each.model.model)
        ]

    def folders(self) -> list[str]:
        return [each.folder for each in self._saved.values()]

    def refusal(self, caller: str, path: str, *, overwrite: bool) -> str | None:
        """Why the caller cannot save under this path; None: it can."""
        if not _PATH.fullmatch(path):
            name = path.removeprefix(SCHEME).split("/", 2)[-1][:64]
            return f"path: expected 1 to 128 letters, digits, '.', '_' and '-'; found {name!r}"
        if path in self._saved and not overwrite:
            return f"{path} is there; expected another name, or overwrite"
        mine = self.of(caller, None)
        if path not in self._saved and len(mine) >= CALLER_CHECKPOINTS_MAX:
            return f"a caller may keep {CALLER_CHECKPOINTS_MAX} checkpoints: delete some"
        if (found := sum(each.bytes for each in mine)) >= CALLER_CHECKPOINT_BYTES_MAX:
            most = CALLER_CHECKPOINT_BYTES_MAX
            return f"checkpoints: expected less than {most} bytes of a caller; found {found}: delete some"
        return None

    def save(self, saved: CheckpointSaved) -> bool:
        """Keep a checkpoint. Returns whether it replaces another one."""
        replaces = self._saved.pop(saved.path, None) is not None
        self._saved[saved.path] = saved
        self._look_for_expiry()
        return replaces

    def drop(self, path: str) -> None:
        del self._saved[path]
        self._look_for_expiry()

    def expire(self, path: str, at: float | None) -> CheckpointSaved:
        """Let a checkpoint expire at this time (seconds since 1970); None: never."""
        self._saved[path] = replace(self._saved[path], expires_at=at)
        self._look_for_expiry()
        return self._saved[path]

    def expired(self, wall_s: float) -> list[str]:
        """The paths of the checkpoints whose time has passed."""
        if self.expires_at is None or self.expires_at > wall_s:
            return []
        return [
            path
            for path, each in self._saved.items()
            if each.expires_at is not None and each.expires_at <= wall_s
        ]

    def _look_for_expiry(self) -> None:
        times = [each.expires_at for each in self._saved.values() if each.expires_at is not None]
        self.expires_at = min(times, default=None)


# --- as the API's JSON, but with times in seconds since 1970, and with metadata as text


def model_json(made: ModelMade) -> dict[str, Any]:
    """A training run."""
    return {
        "training_run_id": made.model,
        "base_model": made.base,
        "model_owner": made.caller,
        "is_lora": made.rank > 0,
        "lora_rank": made.rank or None,
        "last_request_time": made.made_at,
        "user_metadata": made.metadata,
    }


def weights_json(made: ModelMade) -> dict[str, Any]:
    layers = {each: not made.rank or each in made.layers for each in LAYERS}
    shape = {"is_lora": made.rank > 0, "lora_rank": made.rank or None}
    return {"base_model": made.base, **shape, **layers}


def checkpoint_json(saved: CheckpointSaved) -> dict[str, Any]:
    kind, name = saved.path.split("/")[-2:]
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": KINDS[kind],
        "time": saved.made_at,
        "tinker_path": saved.path,
        "public": False,
        "size_bytes": saved.bytes,
        "user_metadata": saved.metadata,
        "expires_at": saved.expires_at,
    }


def part(
    name: str, found: list[_Item], offset: int, limit: int, as_json: Callable[[_Item], Any]
) -> dict[str, Any]:
    """A part of a list, under this name, and where it lies."""
    return {
        name: [as_json(each) for each in found[offset : offset + limit]],
        "cursor": {"offset": offset, "limit": limit, "total_count": len(found)},
    }
