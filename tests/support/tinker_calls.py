"""Calls of the Tinker API as the coordinator gives them to a learner, and what the learner answers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from echo2d.client import OperationResult, Session, TinkerOperation
from echo2d.tinker import messages_pb2 as pb

MODEL = "s:train:0"
ADAM: dict[str, Any] = {
    "learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0,
}  # fmt: skip
CREATE: dict[str, Any] = {
    "rank": 4,
    "seed": 1,
    "train_attn": True,
    "train_mlp": True,
    "train_unembed": False,
}

Inputs = Mapping[str, NDArray[Any]]
Row = tuple[Sequence[int], Inputs]


def call(kind: str, model: str = MODEL, *, number: int = 1, **arguments: Any) -> TinkerOperation:
    return TinkerOperation(model, number, kind, arguments, b"")


def forward_backward(
    data: Sequence[Row],
    loss: str = "cross_entropy",
    model: str = MODEL,
    *,
    number: int = 1,
    forward_only: bool = False,
    **config: float,
) -> TinkerOperation:
    message = pb.ForwardBackwardCall(
        model=model,
        number=number,
        loss=loss,
        forward_only=forward_only,
        config={name: pb.Setting(number=value) for name, value in config.items()},
        data=[_datum(tokens, inputs) for tokens, inputs in data],
    )
    return TinkerOperation(model, number, "forward_backward", {}, message.SerializeToString())


def _datum(tokens: Sequence[int], inputs: Inputs) -> pb.TrainingDatum:
    text = pb.Text(tokens=np.array(tokens, dtype="<i4").tobytes())
    tensors = {name: _tensor(np.asarray(values)) for name, values in inputs.items()}
    return pb.TrainingDatum(chunks=[pb.InputChunk(text=text)], inputs=tensors)


def _tensor(values: NDArray[Any]) -> pb.Tensor:
    whole = values.dtype.kind in "iu"
    element = pb.ELEMENT_INT64 if whole else pb.ELEMENT_FLOAT32
    data = values.astype("<i8" if whole else "<f4").tobytes()
    return pb.Tensor(dense=data, element=element, shape=values.shape)


def merged_weights(
    base: Any, layers: Iterable[str], adapter: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights of a base model by name, with an adapter of rank 4 in these layers. Gradients go to the adapter."""
    merged = dict(base.named_parameters())
    for layer in layers:
        a, b = (adapter[f"{layer}.lora_{letter}.weight"] for letter in "AB")
        merged[f"{layer}.weight"] = merged[f"{layer}.weight"].detach() + 32 / 4 * b @ a
    return merged


@dataclass(frozen=True, slots=True)
class Answer:
    """A result of forward_backward."""

    logprobs: list[NDArray[np.float32]]
    metrics: Mapping[str, float]


def answer_of(result: OperationResult) -> Answer:
    assert isinstance(result, bytes), result
    found = pb.ForwardBackwardResult.FromString(result)
    logprobs = []
    for record in found.records:
        ragged = record.fields["logprobs"]
        offsets = np.frombuffer(ragged.offsets, "<i8")
        for start, end in pairwise(offsets):
            values = np.frombuffer(ragged.data[start:end], "<f4")
            logprobs.append(values.reshape(-1, *ragged.other_axes))
    return Answer(logprobs, dict(found.metrics))


@dataclass
class ScriptedOperations:
    """A coordinator that gives these calls, one after the other; then it says that there is none."""

    run_id = "run"
    calls: list[TinkerOperation | None]
    results: list[OperationResult] = field(default_factory=list)
    sessions: list[tuple[int, str, bool]] = field(default_factory=list)
    published: list[tuple[int, list[str]]] = field(default_factory=list)
    saved: list[tuple[str, int]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return not self.calls

    def open_session(
        self, resume_step: int, *, learner: str = "", take_over: bool = False, steps: int = 0
    ) -> Session:
        self.sessions.append((resume_step, learner, take_over))
        return Session(1, "run", 0, 1, 1, 1, 1, resume_step)

    def publish(self, version: int, directory: Path) -> None:
        self.published.append((version, sorted(path.name for path in directory.iterdir())))

    def take_operation(self, saved: Sequence[tuple[str, int]] = ()) -> TinkerOperation | None:
        self.saved += saved
        return self.calls.pop(0)

    def end_operation(self, operation: TinkerOperation, result: OperationResult) -> None:
        self.results.append(result)
