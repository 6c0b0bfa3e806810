"""The public Python API of a run, for any trainer.

    with Coordinator(url, token_file=path) as coordinator:
        session = coordinator.open_session(resume_step=0)
        coordinator.publish(0, directory)
        for step in range(1, 101):
            batch = coordinator.take_batch(step)
            ...                                             # train
            coordinator.commit(batch, t_train_s=seconds)
            coordinator.publish(step, directory)

To the trainer, a restart of the coordinator is only a pause: every call is retried with growing
waits until the coordinator has been unreachable for `timeout_s`. `AsyncCoordinator` is the same for
asyncio.

A call raises Fenced when a newer learner has taken the run, NotResumable when the run cannot
continue at the requested step, PromptsOver when there will be no more batches, OperatorFault for a
wrong credential or URL, PeerFault when the coordinator refuses (with its code and reason), and
IntegrityFault when a batch's bytes do not have its digest.

A trajectory may have *given* tokens, such as the result of a tool: no version wrote them, so they are
context and must not count in the loss. `Trajectory.written` is the mask of all others:

    loss = -(advantage * logprobs)[torch.from_numpy(trajectory.written)].sum()

A published directory may hold a LoRA adapter as PEFT writes it, without its README.md. Call
`pin_base` on it first, which records the base model that the adapter belongs to.
"""

from echo2d.adapters import base_digest, base_pin, pin_base
from echo2d.client.async_coordinator import AsyncCoordinator, Evaluation, Published, Session
from echo2d.client.batches import Batch, Group, Span, Trajectory, read_batch, whole_batch
from echo2d.client.coordinator import Coordinator
from echo2d.client.faults import (
    Fenced,
    NotResumable,
    PromptsOver,
    TokenRefused,
    Unanswered,
    Unreachable,
)
from echo2d.client.tinker import OperationFailed, OperationResult, TinkerOperation
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import Attachment, StepFigures, TrajectoryScore
from echo2d.core.weights.manifest import BASE_PIN
from echo2d.errors import IntegrityFault, OperatorFault, PeerFault, StoreFault
from echo2d.model_files import WeightFiles, loading_error, require_model, weight_files
from echo2d.store.snapshots import build_manifest

__all__ = [
    "BASE_PIN", "AsyncCoordinator", "Attachment", "Batch", "Coordinator", "Evaluation", "Fenced",
    "Group", "IntegrityFault", "NotResumable", "OperationFailed", "OperationResult", "OperatorFault",
    "PeerFault", "PromptsOver", "Published", "Sampling", "Session", "Span", "StepFigures", "StoreFault",
    "TinkerOperation", "TokenRefused", "Trajectory", "TrajectoryScore", "Unanswered", "Unreachable",
    "WeightFiles", "base_digest", "base_pin", "build_manifest", "loading_error", "pin_base",
    "read_batch", "require_model", "weight_files", "whole_batch",
]  # fmt: skip
