"""For each tensor in a model's files: which weight, or which part of a weight, it is.

transformers keeps the experts of a layer in one weight [experts, out, in], and their gate and up projections in
one matrix; the files of such a model have a tensor for each expert and projection. So a tensor in a file is a
whole weight, or one expert's matrix, or some rows of this matrix. The names are found by transformers' own rules for
loading. If a rule changes a tensor in any other way, the model is refused, and the error names the tensor.
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, equal

from echo2d.client import OperatorFault, weight_files

_ROWS = 4096  # rows that are compared at a time
# Buffers in old files that a model computes itself.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
# Advice, by a part of a tensor's name.
_ADVICE = {
    "_orig_mod.": "it was saved after torch.compile: save model._orig_mod",
    "_fsdp_wrapped_module.": "it was saved from inside FSDP: save its full state dict",
    "base_model.model.": "it is an adapter's: merge it into its base model",
    "lora_": "it is an adapter's: merge it into its base model",
    "v_head": "it is a value head of PPO: save the model without it",
    "score.": "it is the head of a reward model: take a model that writes text",
    ".weight_scale": "the model is quantized; convert it to bfloat16 before training",
    "qweight": "the model is quantized; convert it to bfloat16 before training",
    "module.": "it was saved from inside a wrapper: save model.module",
}

log = logging.getLogger("echo2d.learner")


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A whole weight, or the matrix of one expert, or some rows of that matrix."""

    weight: str
    expert: int | None = None  # None: the whole weight
    # Rows [first, end) of the expert's matrix; None: to its end.
    first: int = 0
    end: int | None = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor in a file, for a weight of this shape."""
        if self.expert is None:
            return whole
        _, rows, *others = whole
        return ((rows if self.end is None else self.end) - self.first, *others)

    def of(self, local: Tensor, start: int) -> Tensor | None:
        """The view of this part in a shard whose first row is row `start` of the weight; None: another shard has it."""
        if self.expert is None:
            return local
        if not start <= self.expert < start + len(local):
            return None
        return local[self.expert - start, self.first : self.end]


Layout = dict[str, dict[str, WeightPart]]  # file -> tensor in it -> the weight or part that it is


def tensor_shapes(directory: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of the tensors in each safetensors file that is read.

    OperatorFault: there are no such files, one cannot be read, or two of them have the same tensor.
    """
    files = weight_files(directory)
    if not files.read:
        raise OperatorFault(f"learner.model: {directory} has no safetensors files")
    if not files.named:
        raise OperatorFault(
            f"learner.model: {directory} has neither model.safetensors nor its index, and transformers reads no other "
            f"file; found {files.read[0].name}"
        )
    if files.unread:
        log.warning("%s in %s", files.unread, directory)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    seen: dict[str, str] = {}
    for path in files.read:
        try:
            with safe_open(path, framework="pt") as file:
                shapes[path.name] = {
                    name: tuple(file.get_slice(name).get_shape())
                    for name in file.keys()  # noqa: SIM118
                }
        except (SafetensorError, OSError) as error:
            line = " ".join(str(error).split())
            raise OperatorFault(f"learner.model: cannot read {path}: {line}") from error
        for name in shapes[path.name]:
            if (other := seen.setdefault(name, path.name)) != path.name:
                raise OperatorFault(
                    f"learner.model: {name} is in {other} and in {path.name} of {directory}; save the model again"
                )
    return shapes


def layout_of(model: Any, directory: Path) -> Layout:
    """The layout of a directory of this model, without tensors that the model's class ignores. The model's weights may
    be on the meta device.

    OperatorFault: a tensor is not a weight of the model or has another shape, two tensors are one weight and differ,
    or a weight is missing.
    """
    weights = model.state_dict(keep_vars=True)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    files, names = tensor_shapes(directory), _Names(model, shapes)
    found: Layout = {}
    unknown, ignored = [], []
    for file, tensors in files.items():
        found[file] = {}
        for tensor, shape in tensors.items():
            if (part := names.part(tensor, shape)) is not None:
                found[file][tensor] = part
            elif names.ignores(tensor):
                ignored.append(tensor)
            else:
                unknown.append(tensor)
    if unknown:
        raise OperatorFault(
            f"learner.model: {len(unknown)} tensors are not weights of the model, "
            f"e.g. {min(unknown)}{_advice(min(unknown))}"
        )
    if ignored:
        log.info(
            "%d tensors are left out, as %s does, e.g. %s",
            len(ignored),
            type(model).__name__,
            min(ignored),
        )
    found = {file: parts for file, parts in found.items() if parts}
    _check_shapes(files, found, shapes)
    _check_whole(files, found, weights, directory)
    _check_once(found, weights, directory)
    return found


def _advice(tensor: str) -> str:
    """What to do about a tensor of this name; empty: not known."""
    for mark, advice in _ADVICE.items():
        if mark in tensor:
            return f"; {advice}"
    return ""


class _Names:
    """transformers' rules for the names of one model's tensors."""

    def __init__(self, model: Any, weights: Mapping[str, tuple[int, ...]]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self._weights = weights
        self._prefix = model.base_model_prefix
        patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), *_COMPUTED}  # noqa: SLF001 - there is no other way
        self._ignored = [re.compile(pattern) for pattern in patterns]
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def ignores(self, tensor: str) -> bool:
        """Whether transformers ignores it without a warning: another head, a vision tower, a computed buffer."""
        return any(pattern.search(tensor) for pattern in self._ignored)

    def part(self, tensor: str, shape: tuple[int, ...]) -> WeightPart | None:
        """The weight or part that a tensor of this name and shape is; None: it is not of the model."""
        from transformers.core_model_loading import rename_source_key

        if tensor in self._weights:
            return WeightPart(tensor)
        name, pattern = rename_source_key(
            tensor, self._renamings, self._converters, self._prefix, dict(self._weights)
        )
        if name not in self._weights:
            return None
        if pattern is None:
            return WeightPart(name)
        (rule,) = [rule for rule in self._converters if pattern in rule.source_patterns]
        steps = [(type(step).__name__, getattr(step, "dim", None)) for step in rule.operations]
        number = re.search(r"\.(\d+)\.", tensor[tensor.find("experts") :])
        if number is None or steps not in (
            [("MergeModulelist", 0)],
            [("MergeModulelist", 0), ("Concatenate", 1)],
        ):
            raise OperatorFault(
                f"learner.model: the model keeps {tensor} in a form that is not supported: "
                f"{' and '.join(s for s, _ in steps)}"
            )
        if len(steps) == 1:
            return WeightPart(name, int(number[1]))
        first = rule.source_patterns.index(pattern) * shape[0]
        return WeightPart(name, int(number[1]), first, first + shape[0])


def _check_shapes(
    files: Mapping[str, Mapping[str, tuple[int, ...]]],
    layout: Layout,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """OperatorFault: a tensor does not have the shape of its part."""
    for file, parts in layout.items():
        for tensor, part in parts.items():
            expected, found = part.shape(shapes[part.weight]), files[file][tensor]
            if expected != found:
                raise OperatorFault(
                    f"learner.model: {tensor} has the shape {list(found)}; "
                    f"the model's is {list(expected)}"
                )


def _check_whole(
    files: Mapping[str, Mapping[str, tuple[int, ...]]],
    layout: Layout,
    weights: Mapping[str, Tensor],
    directory: Path,
) -> None:
    """OperatorFault: the files do not have all numbers of a weight. A tied weight may have any of its names."""
    there: dict[int, int] = {}
    for file, parts in layout.items():
        for tensor, part in parts.items():
            key = id(weights[part.weight])
            there[key] = there.get(key, 0) + math.prod(files[file][tensor])
    missing = [
        name for name, weight in weights.items() if there.get(id(weight), 0) < weight.numel()
    ]
    if missing:
        # The error names at most three weights.
        named = ", ".join(sorted(missing)[:3])
        raise OperatorFault(f"learner.model: {directory} lacks the weights {named}")


def _check_once(layout: Layout, weights: Mapping[str, Tensor], directory: Path) -> None:
    """OperatorFault: two tensors of the files are one tied weight, and they differ."""
    sources: dict[tuple[Any, ...], tuple[str, str]] = {}
    for file, parts in layout.items():
        for tensor, part in parts.items():
            key = id(weights[part.weight]), part.expert, part.first, part.end
            other, name = sources.setdefault(key, (file, tensor))
            if name != tensor and not _equal(directory / other, name, directory / file, tensor):
                raise OperatorFault(
                    f"learner.model: {name} and {tensor} of {directory} differ, and config.json says that they are one "
                    'weight; set "tie_word_embeddings": false in it, or leave out the one that is not meant'
                )


def _equal(path: Path, tensor: str, other_path: Path, other: str) -> bool:
    """Whether two tensors have the same numbers. Only _ROWS rows of each are in memory at a time."""
    with safe_open(path, framework="pt") as file, safe_open(other_path, framework="pt") as others:
        one, two = file.get_slice(tensor), others.get_slice(other)
        rows = one.get_shape()[0]
        return all(
            equal(one[first : first + _ROWS], two[first : first + _ROWS])
            for first in range(0, rows, _ROWS)
        )
