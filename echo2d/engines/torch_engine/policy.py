"""A policy version in an engine's memory: from a snapshot directory onto a device, and its tensors back for checking.

Two ways in. The next version of the same model is *copied*: its tensors are read and compared with the served layout
beforehand, then written into the live model, which cannot fail halfway on bad files. Anything else (the first version,
another architecture, a family that transformers stores under other names than it computes with) is *built* anew by
transformers beside the old model. The next adapter on the same base is copied too: no more than its own tensors.
"""

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from echo2d.engines.adapter import adapter_layout
from echo2d.engines.base import AdapterBase
from echo2d.engines.layout import SnapshotLayout, read_layout, weight_files
from echo2d.engines.torch_engine.lora import attach
from echo2d.errors import EngineFault

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}

_BUILDING = (
    threading.Lock()
)  # transformers changes globals of torch while it loads: engines of a process take turns

transformers_logging.disable_progress_bar()  # a daemon has no terminal


class InferencePolicy:
    """A causal LM on its device, ready for inference.

    `layout` is that of the snapshot whose numbers it holds. adapter: the tensors that are the snapshot's, if it is one.
    """

    def __init__(
        self, model: Any, layout: SnapshotLayout, adapter: Mapping[str, Tensor] | None = None
    ) -> None:
        self.layout = layout
        self.device: torch.device = model.device
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.context_max: int | None = getattr(
            model.config.get_text_config(), "max_position_embeddings", None
        )
        self._model = model
        self._state: Mapping[str, Tensor] = model.state_dict() if adapter is None else adapter
        self._accepts = frozenset(inspect.signature(model.forward).parameters)

    @property
    def copyable(self) -> bool:
        """Whether the snapshot's names are the model's own, so that tensors can be copied in and read back by name."""
        return self.layout.tensors.keys() <= self._state.keys()

    def next_logits(self, tokens: Tensor, lengths: Tensor, cache: DynamicCache) -> Tensor:
        """Append `tokens` [rows, new] to `cache`; the logits [rows, vocab] after the last one.

        lengths [rows]: tokens of each row including the new ones; rows are right-aligned, see `batch.py`.
        """
        columns = cache.get_seq_length() + tokens.shape[1]
        mask = torch.arange(columns, device=self.device) >= (columns - lengths)[:, None]
        options: dict[str, object] = (
            {"logits_to_keep": 1} if "logits_to_keep" in self._accepts else {}
        )
        if "position_ids" in self._accepts:
            options["position_ids"] = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -tokens.shape[1] :]
        output = self._model(
            input_ids=tokens,
            attention_mask=mask.to(torch.int64),
            past_key_values=cache,
            use_cache=True,
            **options,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def adapted(self, layout: SnapshotLayout, tensors: Mapping[str, Tensor]) -> "InferencePolicy":
        """The same model with an adapter beside its weights; this one must not be used again."""
        attach(self._model, adapter_layout(layout), tensors)
        return InferencePolicy(self._model, layout, tensors)

    def copy(self, tensors: Mapping[str, Tensor], layout: SnapshotLayout) -> None:
        """Overwrite every weight of the snapshot. A failure leaves a mixture: the policy must not be used again."""
        for name, tensor in tensors.items():
            self._state[name].copy_(tensor)
        self.layout = layout

    def digests(self) -> dict[str, bytes]:
        """blake3-256 of each tensor in memory, by the snapshot's names, cast back to the snapshot's dtype.

        Equal to the files' digests if the engine computes in the snapshot's precision or a wider one.
        """
        if not self.copyable:
            raise EngineFault(
                "this model family computes with other tensors than its files hold: nothing to compare"
            )
        return {
            name: _digest(self._state[name], spec.dtype)
            for name, spec in self.layout.tensors.items()
        }


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """Everything about a new version that can be read and checked while the old one generates.

    target: the policy that fits `tensors` (in the engine's dtype, in host memory); None: the model has to be built.
    base: of an adapter, whose tensors are there either way.
    """

    snapshot: Path
    layout: SnapshotLayout
    target: InferencePolicy | None
    tensors: Mapping[str, Tensor]
    base: AdapterBase | None = None


def prepare(
    snapshot: Path,
    served: InferencePolicy | None,
    dtype: torch.dtype,
    base: AdapterBase | None = None,
) -> PreparedWeights:
    """Read and check a snapshot; touches no weight. EngineFault if it cannot become the served version."""
    layout = read_layout(snapshot, base)
    if not layout.tensors:
        raise EngineFault("the snapshot holds no safetensors weights")
    if base is not None:
        adapter_layout(layout)
    target = served if served is not None and layout.config == served.layout.config else None
    if target is not None:
        layout.require_tensors_of(target.layout)
        target = target if target.copyable else None
    tensors = {} if target is None and base is None else _read_tensors(snapshot, dtype)
    return PreparedWeights(snapshot, layout, target, tensors, base)


def build(prepared: PreparedWeights, dtype: torch.dtype, device: torch.device) -> InferencePolicy:
    """A new model from the directory, proved able to decode. EngineFault if a weight is missing, unknown or misfit."""
    if prepared.base is None:
        return _built(prepared.snapshot, prepared.layout, dtype, device)
    base = _built(prepared.base.directory, read_layout(prepared.base.directory), dtype, device)
    if base.digests() != prepared.base.tensors:
        raise EngineFault("the base model in memory is not the one that was verified")
    tensors = {name: tensor.to(device) for name, tensor in prepared.tensors.items()}
    return base.adapted(prepared.layout, tensors)


def _built(
    directory: Path, layout: SnapshotLayout, dtype: torch.dtype, device: torch.device
) -> InferencePolicy:
    try:
        with _BUILDING:
            model, info = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        if device.type == "cpu":
            _leave_files(model)
        policy = InferencePolicy(
            model.eval().requires_grad_(requires_grad=False).to(device), layout
        )
        _prove_decoding(policy)
    # transformers raises anything on a directory that it cannot use; the served model is not touched.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise EngineFault(
            f"transformers cannot load the snapshot: {type(error).__name__} {reason}"
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for name in sorted(info[kind], key=str):
            raise EngineFault(f"the snapshot does not fit its config.json: {kind} {name}")
    return policy


def _leave_files(model: Any) -> None:
    """Weights that need no other type may be pages of the files, which a later version is written into."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _prove_decoding(policy: InferencePolicy) -> None:
    """Two tokens, one after the other: shows that every layer keeps its past in an attention cache."""
    cache = DynamicCache()
    token = torch.zeros((1, 1), dtype=torch.int64, device=policy.device)
    for length in (1, 2):
        policy.next_logits(token, torch.tensor([length], device=policy.device), cache)
    if cache.get_seq_length() != 2:
        raise EngineFault("the model does not keep its past in a KV cache")


def _read_tensors(snapshot: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in weight_files(snapshot):
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                tensors |= {name: file.get_tensor(name).to(dtype, copy=True) for name in names}
        except (OSError, SafetensorError) as error:
            raise EngineFault(f"{path.name} cannot be read: {error}") from error
    return tensors


def _digest(tensor: Tensor, dtype: str) -> bytes:
    if dtype not in _DTYPES:
        raise EngineFault(f"tensors of dtype {dtype} cannot be read back")
    flat = tensor.detach().to(_DTYPES[dtype]).reshape(-1).contiguous().cpu()
    return blake3(flat.view(torch.uint8).numpy().data).digest()
