"""Loads a policy version from a snapshot directory onto a device, and reads its tensors back.

A version enters memory in one of three ways:

- The next version of the same model is *copied* into the live model. Its tensors are read and
  compared with the served layout first, so a bad file cannot stop the copy halfway.
- An adapter on the same base is held beside the adapters before it (`adapters.py`), or is there already.
- Anything else is *built* by transformers beside the old model: the first version, another
  architecture, and families whose tensors have other names in the files than in the model.

With int8 the linear layers are quantized each time: in a built model once it is complete, and in a copied
version tensor by tensor. The files and the tensors read from them do not change.
"""

import inspect
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from echo2d.core.base.model_config import context_max
from echo2d.core.protocol.experts import ExpertShape
from echo2d.engines.adapter import adapter_layout
from echo2d.engines.base import AdapterBase, UnsuitedEngine
from echo2d.engines.layout import SnapshotLayout, read_layout, weight_files
from echo2d.engines.torch_engine.adapters import AdapterTable, TorchAdapter
from echo2d.engines.torch_engine.int8 import Int8Layers, quantize
from echo2d.errors import EngineFault
from echo2d.model_experts import ExpertRecorder
from echo2d.model_files import loading_error

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}

# transformers changes torch's globals while it loads, so the engines of a process take turns.
_BUILDING = threading.Lock()

# A daemon has no terminal for progress bars.
transformers_logging.disable_progress_bar()


class InferencePolicy:
    """A causal LM on its device, ready for inference.

    layout: the layout of the whole model whose numbers it holds. context: most tokens of prompt and answer together,
    by config.json. adapters: those beside that model, if it is the base of any. int8: the layers that hold weights in
    int8, by the names of these weights. experts: the recorder that the model has already, if any.
    """

    def __init__(
        self,
        model: Any,
        layout: SnapshotLayout,
        adapters: AdapterTable | None = None,
        *,
        context: int | None,
        int8: Int8Layers | None = None,
        experts: ExpertRecorder | None = None,
    ) -> None:
        self._layout = layout
        self.device: torch.device = model.device
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.context_max = context
        self._model = model
        self._int8 = int8 or {}
        self._experts = experts or ExpertRecorder(model)
        self.adapters = adapters
        self._weights: Mapping[str, Tensor] = {} if adapters else model.state_dict()
        self._accepts = frozenset(inspect.signature(model.forward).parameters)

    @property
    def layout(self) -> SnapshotLayout:
        """That of the snapshot which is served."""
        return self._layout if self.adapters is None else self.adapters.served.layout

    @property
    def _state(self) -> Mapping[str, Tensor]:
        """The tensors that a version replaces."""
        return self._weights if self.adapters is None else self.adapters.served.tensors

    @property
    def copyable(self) -> bool:
        """Whether the snapshot's tensors have the model's names, so that they can be copied by name."""
        return self.layout.tensors.keys() <= self._state.keys()

    def has_base(self, base: AdapterBase) -> bool:
        """Whether its adapters belong to this base."""
        return self.adapters is not None and self.layout.config["base"] == base.digest

    @property
    def expert_shape(self) -> ExpertShape | None:
        """What the experts of a token may be; None: a dense model."""
        return self._experts.shape

    def next_logits(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: DynamicCache,
        adapters: Sequence[str] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Append `tokens` [rows, new] to `cache`; return the next token's logits [rows, vocab], and the experts
        [rows, layers, chosen] that were chosen on the way to them (None: a dense model).

        lengths [rows]: each row's tokens, the new ones included. Rows are right-aligned, see
        `batch.py`. adapters [rows]: the label of each row's adapter; empty: the newest.
        """
        logits = self._append(tokens, lengths, cache, adapters, 1)
        experts = self._experts.take(len(tokens))
        return logits[:, -1], None if experts is None else experts[:, -1].clone()

    def more_logits(self, tokens: Tensor, cache: DynamicCache, adapter: str, last: int) -> Tensor:
        """Append `tokens` [1, new] to `cache`; return the logits [last, vocab] at the last of them. adapter: its
        label.
        """
        lengths = torch.tensor([cache.get_seq_length() + tokens.shape[1]], device=self.device)
        logits = self._append(tokens, lengths, cache, (adapter,), last)
        self._experts.take(1)
        return logits[0, -last:]

    def _append(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: DynamicCache,
        adapters: Sequence[str],
        last: int,
    ) -> Tensor:
        """Append `tokens` to `cache` as `next_logits` does; return the logits [rows, at least last, vocab]."""
        if self.adapters is not None:
            self.adapters.use(adapters or (self.adapters.newest,))
        columns = cache.get_seq_length() + tokens.shape[1]
        mask = torch.arange(columns, device=self.device) >= (columns - lengths)[:, None]
        # The logits of all positions of a prefill could take gigabytes. Not every model family can
        # leave them out.
        options: dict[str, object] = (
            {"logits_to_keep": last} if "logits_to_keep" in self._accepts else {}
        )
        # Without `position_ids`, some families would count the padding as positions.
        if "position_ids" in self._accepts:
            options["position_ids"] = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -tokens.shape[1] :]
        output = self._model(
            input_ids=tokens,
            attention_mask=mask.to(torch.int64),
            past_key_values=cache,
            use_cache=True,
            **options,
        )
        logits: Tensor = output.logits
        return logits

    def logits(self, tokens: Tensor, last: int, adapter: str = "") -> Tensor:
        """Return the logits [rows, last, vocab] at the last tokens of whole sequences [rows, columns],
        without padding. adapter: its label; empty: the newest.
        """
        if self.adapters is not None:
            self.adapters.use((adapter or self.adapters.newest,))
        options = {"logits_to_keep": last} if "logits_to_keep" in self._accepts else {}
        output = self._model(input_ids=tokens, use_cache=False, **options)
        logits: Tensor = output.logits[:, -last:]
        return logits

    def experts(self, rows: int, last: int) -> Tensor | None:
        """The experts [rows, last, layers, chosen] on the way to what `logits` returned; None: a dense model."""
        experts = self._experts.take(rows)
        return None if experts is None else experts[:, -last:]

    def adapted(self, adapter: TorchAdapter, label: str) -> "InferencePolicy":
        """Return a policy of the same model with an adapter; this one must not be used again."""
        table = AdapterTable(self._model, adapter, label)
        return InferencePolicy(
            self._model, self._layout, table, context=self.context_max, experts=self._experts
        )

    def in_int8(self) -> "InferencePolicy":
        """Return a policy of the same model in int8; this one must not be used again.

        EngineFault: the model has no linear layers, or too wide ones.
        """
        layers = quantize(self._model)
        return InferencePolicy(
            self._model, self._layout, context=self.context_max, int8=layers, experts=self._experts
        )

    def copy(self, tensors: Mapping[str, Tensor], layout: SnapshotLayout) -> None:
        """Overwrite every tensor that the snapshot holds.

        A failure leaves a mixture of two versions: the policy must not be used again.
        """
        for name, tensor in tensors.items():
            for layer in self._int8.get(name, ()):
                layer.load(tensor)
            # An embedding that shared its weight with an int8 layer has its own copy here.
            if self._state[name].dtype != torch.int8:
                self._state[name].copy_(tensor)
        self._layout = layout

    def digests(self) -> dict[str, bytes] | None:
        """Return blake3-256 of each tensor in memory, by the snapshot's names and in its dtype.

        They equal the files' digests if the engine computes in the snapshot's precision or a wider
        one. None: transformers cannot map the model's weights back to the files' tensors, or weights
        are in int8.
        """
        if self._int8:
            return None
        expected = self.layout.tensors
        try:
            found = {
                name: _digest(tensor, expected[name].dtype)
                for name, tensor in self._by_file_name()
                if name in expected
            }
        except (ValueError, KeyError, NotImplementedError):
            return None
        return found if found.keys() == expected.keys() else None

    def _by_file_name(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors under their names in the files.

        Experts that transformers has joined are separated one weight at a time, because that copies them.
        """
        for name, tensor in self._state.items():
            if self.copyable:
                yield name, tensor
            else:
                yield from revert_weight_conversion(self._model, {name: tensor}).items()


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """What can be read and checked of a new version while the old one generates."""

    snapshot: Path
    layout: SnapshotLayout
    target: InferencePolicy | None  # copy `tensors` into it; None: the model has to be built
    # In the engine's dtype. They are in host memory, but for an adapter that is held. Empty for a whole model that has
    # to be built.
    tensors: Mapping[str, Tensor]
    base: AdapterBase | None = None  # base of an adapter

    def on(self, device: torch.device) -> TorchAdapter:
        """The adapter in the memory of this device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return TorchAdapter(self.layout, adapter_layout(self.layout), tensors)


def prepare(
    snapshot: Path,
    served: InferencePolicy | None,
    dtype: torch.dtype,
    base: AdapterBase | None = None,
    label: str = "",
) -> PreparedWeights:
    """Read and check a snapshot; change no weight. An adapter that the policy holds under `label` is not read.

    EngineFault: it cannot be served.
    """
    if base is not None:
        target = served if served is not None and served.has_base(base) else None
        adapters = None if target is None else target.adapters
        if adapters is not None and (held := adapters.by_label.get(label)) is not None:
            return PreparedWeights(snapshot, held.layout, target, held.tensors, base)
        layout = read_layout(snapshot, base)
        adapter_layout(layout)
        return PreparedWeights(snapshot, layout, target, _read_tensors(snapshot, dtype), base)
    layout = read_layout(snapshot)
    if not layout.tensors:
        raise EngineFault("the snapshot holds no safetensors weights")
    target = served if served is not None and served.adapters is None else None
    if target is None or layout.config != target.layout.config:
        return PreparedWeights(snapshot, layout, None, {})
    layout.require_tensors_of(target.layout)
    if not target.copyable:
        return PreparedWeights(snapshot, layout, None, {})
    return PreparedWeights(snapshot, layout, target, _read_tensors(snapshot, dtype))


def build(
    prepared: PreparedWeights,
    dtype: torch.dtype,
    device: torch.device,
    *,
    label: str = "",
    int8: bool = False,
) -> InferencePolicy:
    """Build a new model from the directory and prove that it decodes.

    label: of an adapter. int8: linear layers compute in it. EngineFault: a weight is missing, unknown or of a wrong
    shape, the model cannot decode, or an adapter's base is not the one that was verified.
    """
    if prepared.base is None:
        whole = _built(prepared.snapshot, prepared.layout, dtype, device)
        return whole.in_int8() if int8 else whole
    base = _built(prepared.base.directory, read_layout(prepared.base.directory), dtype, device)
    found = base.digests()
    if found is None:
        raise EngineFault(
            f"the base model {prepared.base.directory} cannot be compared with its files, which have other "
            "names for its tensors"
        )
    if found != prepared.base.tensors:
        raise EngineFault(
            f"the base model {prepared.base.directory} in memory is not the one that was verified"
        )
    return (base.in_int8() if int8 else base).adapted(prepared.on(device), label)


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
        _require_numbers(model, directory)
        if device.type == "cpu":
            _leave_files(model)
        policy = InferencePolicy(
            model.eval().requires_grad_(requires_grad=False).to(device),
            layout,
            context=context_max(layout.config),
        )
        _prove_decoding(policy)
    except EngineFault:
        raise
    # transformers may raise any exception on a directory that it cannot use. The served model is not
    # touched, so each one is a fault of this refit only.
    except Exception as error:
        lacks_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        raise (UnsuitedEngine if lacks_memory else EngineFault)(
            f"transformers cannot load the snapshot: {type(error).__name__} {loading_error(error)}"
        ) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for name in sorted(info[kind], key=str):
            raise EngineFault(f"the snapshot does not fit its config.json: {kind} {name}")
    return policy


def _require_numbers(model: Any, directory: Path) -> None:
    """EngineFault: a weight holds NaN or infinity."""
    for name, weight in model.named_parameters():
        # The minimum and the maximum are NaN if any number is; computing them takes no memory.
        if weight.numel() and not all(map(math.isfinite, weight.detach().aminmax())):
            named = (file for file in weight_files(directory) if name in _names_in(file))
            raise EngineFault(
                f"{name} in {next(named, directory)} holds NaN or infinity: download it again, or take another "
                "checkpoint"
            )


def _names_in(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def _leave_files(model: Any) -> None:
    """Copy all weights into this process's own memory.

    transformers may map them from the files, and a later version overwrites the weights.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _prove_decoding(policy: InferencePolicy) -> None:
    """Decode two tokens, one after the other. EngineFault: the model does not use a KV cache."""
    cache, kept = DynamicCache(), 0
    token = torch.zeros((1, 1), dtype=torch.int64, device=policy.device)
    # A layer without attention has no place in the cache, and each model raises its own error for that.
    with suppress(IndexError, AttributeError, TypeError, ValueError, KeyError):
        for length in (1, 2):
            policy.next_logits(token, torch.tensor([length], device=policy.device), cache)
        kept = cache.get_seq_length()
    if kept != 2:
        raise UnsuitedEngine(
            "the torch engine serves only models that keep their past in a KV cache, with attention in every "
            "layer; use SGLang, which serves other models too (--engine sglang)"
        )


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
    # NumPy has no bfloat16, so the hash takes the bytes of any dtype.
    flat = tensor.detach().to(_DTYPES[dtype]).reshape(-1).contiguous().cpu()
    return blake3(flat.view(torch.uint8).numpy().data).digest()
