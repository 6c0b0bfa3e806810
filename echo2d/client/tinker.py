"""The calls of clients of the Tinker API, as a learner that serves them sees them."""

from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from echo2d.errors import PeerFault

# Most bytes of a result: the logprobs of one call.
RESULT_BYTES_MAX = 32 << 20
# Optimizer steps that a learner reports as saved in one call. It has a few at most.
SAVED_STEPS_MAX = 256


@dataclass(frozen=True, slots=True)
class TinkerOperation:
    """A call that the learner runs now."""

    model: str  # SESSION:train:N; empty: no client's
    number: int
    # create, load, forward_backward, optim_step, discard, save, publish, score, score_sample, keep
    kind: str
    arguments: dict[str, Any]
    body: bytes  # of forward_backward, score and score_sample: a protobuf message


@dataclass(frozen=True, slots=True)
class OperationFailed:
    """A call could not be run. The detail is one line for the client."""

    detail: str
    # Whose mistake it was.
    category: Literal["user", "server"] = "user"


# A JSON object, or an encoded protobuf message.
OperationResult = dict[str, Any] | bytes | OperationFailed


def read_operation(data: bytes) -> TinkerOperation:
    """PeerFault: the coordinator's answer is no operation."""
    try:
        return TinkerOperation(**msgpack.unpackb(data))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise PeerFault("the coordinator's answer is not an operation") from error
