"""Load a model without ever having all of it in one process.

empty_model   makes the modules, whose weights have a shape and no memory
(Ranks.shard) leaves each rank its shards of them, still without memory
fill          gives the shards memory; each rank reads its slices of the files
"""

import contextlib
import json
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from echo2d.client import OperatorFault, loading_error, require_model
from echo2d.core.base.model_config import context_max
from echo2d.learner.ranks.ranks import own_shard
from echo2d.learner.saving.layout import Layout, WeightPart, layout_of
from echo2d.learner.saving.shards import VersionTensors, first_row, in_portions


def empty_model(directory: Path, *, on_meta: bool = True) -> Any:
    """A causal language model of transformers, with float32 weights on the meta device. on_meta: False: the weights
    are where torch makes them by default.

    OperatorFault: the directory lacks a file, a file is damaged, or transformers cannot make such a model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        require_model(directory)
    except OperatorFault as fault:
        raise OperatorFault(f"learner.model: {fault}") from fault
    if not (directory / "tokenizer.json").is_file():
        raise OperatorFault(f"learner.model: {directory} has no tokenizer.json")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with _weights_on_meta() if on_meta else contextlib.nullcontext():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise OperatorFault(
            f"learner.model: cannot load {directory}: {loading_error(error)}"
        ) from error
    return model


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Inside the block a fault of learner.model is one of learner.`key`, which names another model."""
    try:
        yield
    except OperatorFault as fault:
        raise OperatorFault(str(fault).replace("learner.model:", f"learner.{key}:")) from fault


def check_teacher(model: Path, teacher: Path) -> int:
    """The most tokens that the teacher can read, if the policy can read more; otherwise 0.

    OperatorFault: the teacher is no model, or its tokenizer gives another id to a token of the policy.
    """
    own, its = (_token_ids(key, each) for key, each in (("model", model), ("teacher", teacher)))
    if differs := own.items() ^ its.items():
        token, _ = min(differs, key=lambda each: (each[1], each[0]))
        raise OperatorFault(
            f"learner.teacher: expected the tokenizer of {model}, in which {token!r} is token {own.get(token)}; "
            f"found {its.get(token)} in {teacher}"
        )
    configs = (json.loads((each / "config.json").read_bytes()) for each in (model, teacher))
    most, read = (context_max(each) or math.inf for each in configs)
    return int(read) if read < most else 0


def _token_ids(key: str, directory: Path) -> dict[str, int]:
    """The id of each token, by tokenizer.json."""
    try:
        require_model(directory)
        found = json.loads((directory / "tokenizer.json").read_bytes())
    except (OperatorFault, OSError) as fault:
        raise OperatorFault(f"learner.{key}: {fault}") from fault
    tokens = (found.get("model") or {}).get("vocab") or {}
    if isinstance(tokens, list):  # Unigram's: a token and its score
        tokens = {token: place for place, (token, _) in enumerate(tokens)}
    return tokens | {each["content"]: each["id"] for each in found.get("added_tokens") or ()}


def fill(model: Any, directory: Path, layout: Layout, device: torch.device) -> Any:
    """Give the model's weights memory on the device, and read this rank's shards of them from the files.

    OperatorFault: a weight holds NaN or infinity.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    # A plain module gives each name its own memory, even if weights are tied; FSDP2 does not.
    model.tie_weights()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    read_weights(model.state_dict(keep_vars=True), directory, layout)
    return model


def read_weights(weights: Mapping[str, Tensor], directory: Path, layout: Layout) -> None:
    """Read this rank's shards of the weights from the files, in place. OperatorFault: as in `fill`."""
    for file, parts in layout.items():
        # A portion has at most 64 MB in the published dtype, or one tensor.
        tensors = VersionTensors(weights, parts)
        for some in in_portions({name: tensors.size(name) for name in parts}, 64 << 20):
            # The file is reopened for each portion, because pages stay in memory until it is closed.
            with torch.no_grad(), safe_open(directory / file, framework="pt") as found:
                for tensor in some:
                    weight = weights[parts[tensor].weight]
                    if not _read(found.get_slice(tensor), parts[tensor], weight):
                        raise OperatorFault(
                            f"learner.model: {tensor} in {directory / file} holds NaN or infinity: download it "
                            "again, or take another checkpoint"
                        )


def load_model(directory: Path) -> Any:
    """The whole model in float32 on the CPU, without dropout. OperatorFault: the directory lacks a file or a weight."""
    model = empty_model(directory).eval()
    return fill(model, directory, layout_of(model, directory), torch.device("cpu"))


def _read(tensor: Any, part: WeightPart, weight: Tensor) -> bool:
    """Copy this rank's part of the weight, and return whether all of it is finite; buffers may be infinite.

    tensor: a slice of safetensors, of which only this part is read.
    """
    local = own_shard(weight)
    start = first_row(weight)
    if (target := part.of(local, start)) is None or not target.numel():
        return True
    if part.expert is None and target.ndim:
        target.copy_(tensor[start : start + len(local)])
    else:
        target.copy_(tensor[:] if target.ndim else tensor[...])
    # The minimum and the maximum are NaN if any number is; computing them takes no memory.
    return not isinstance(weight, nn.Parameter) or all(map(math.isfinite, target.aminmax()))


@contextlib.contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Inside the block, parameters that this thread registers lose their memory at once; buffers keep it."""
    here = threading.get_ident()

    def without_memory(_: nn.Module, __: str, weight: nn.Parameter | None) -> nn.Parameter | None:
        if weight is None or weight.is_meta or threading.get_ident() != here:
            return None
        return nn.Parameter(weight.to("meta"), requires_grad=weight.requires_grad)

    # torch's types say that a hook returns nothing, but what it returns replaces the parameter.
    handle = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
