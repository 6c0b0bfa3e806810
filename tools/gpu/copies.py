"""Time copies between a GPU and its host: the bus, what the learner copies over it, and the loading of a version."""

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from echo2d.learner.model.moments import HostMoments
from echo2d.learner.saving.host_copy import host_copy
from tools.gpu.rows import GB, GIB, Row, device, on_gpu, seconds

VERSION_BYTES = 16.4 * GB  # an 8B model in bfloat16
NO_BUS = "there is no bus without a GPU"


def copies(*, small: bool) -> Iterator[Row]:
    """Section A: copies of the learner beside what the bus allows."""
    size = (16 << 20) if small else (2 << 30)
    there = torch.zeros(size, dtype=torch.uint8, device=device())
    host = torch.zeros(size, dtype=torch.uint8)
    down = 0.0
    if on_gpu():
        pinned = host.pin_memory()
        up = size / seconds(lambda: there.copy_(pinned, non_blocking=True)) / GB
        down = size / seconds(lambda: pinned.copy_(there, non_blocking=True)) / GB
        yield _rates("from host to GPU", up, size / seconds(lambda: there.copy_(host)) / GB)
        yield _rates("from GPU to host", down, size / seconds(lambda: host.copy_(there)) / GB)
    else:
        yield Row("from host to GPU, and back", skipped=NO_BUS)
    weights = there.view(torch.bfloat16)
    rate = size / seconds(lambda: host_copy(weights, torch.bfloat16)) / GB
    figures = {"GB/s": rate, "s for 16.4 GB": VERSION_BYTES / GB / rate}
    yield Row("the copy of a version for publishing (`host_copy`)", figures)
    for pinned_stage in (True, False) if on_gpu() else (False,):
        options = StagingOptions(
            use_pinned_memory=pinned_stage,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=pinned_stage,
        )
        stager = DefaultStager(options)
        rate = size / seconds(partial(stager.stage, {"weight": there})) / GB
        memory = "pinned memory, as the learner's" if pinned_stage else "ordinary memory"
        yield Row(f"the copy of a checkpoint, into {memory}", {"GB/s": rate})
    for gib in (1 / 64,) if small else (1, 2, 4):
        yield _moments(int(gib * GIB), down)


def _rates(what: str, pinned: float, pageable: float) -> Row:
    return Row(what, {"pinned, GB/s": pinned, "pageable, GB/s": pageable})


def _moments(size: int, down: float) -> Row:
    """One step of AdamW with moments of `size` bytes, on the device and on the host. down: GB/s of the bus; 0: none."""

    def made() -> tuple[list[Tensor], torch.optim.AdamW]:
        # Eight weights of float32, whose moments are twice as large as they are.
        weights = [torch.zeros(size // 64, device=device(), requires_grad=True) for _ in range(8)]
        return weights, torch.optim.AdamW(weights, lr=1e-6, fused=on_gpu())

    def slopes(weights: Sequence[Tensor]) -> None:
        for weight in weights:
            weight.grad = torch.ones_like(weight)

    weights, optimizer = made()
    on_device = seconds(optimizer.step, before=lambda: slopes(weights))
    weights, optimizer = made()
    moments = HostMoments(optimizer)
    on_host = seconds(moments.step, before=lambda: slopes(weights))
    figures = {"s / step": on_host, "s / step, moments on the device": on_device}
    if down:
        figures["both ways over the pinned bus, s"] = 2 * size / down / GB
    return Row(f"moments on the host, {size / GIB:.3g} GiB", figures)


def loading(*, small: bool) -> Iterator[Row]:
    """Section F: the files of a version to the GPU, tensor by tensor into weights that are there, as an engine does."""
    # A quarter of an 8B model, and two layers of the experts of 30B-A3B. The files stay in the page cache.
    parts = {
        "matrices of 8B": ((12_288, 4096), 40),
        "experts of 30B-A3B": ((768, 2048), 3 * 128 * 2),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (shape, count) in parts.items():
            if small:
                shape, count = (shape[0] // 16, shape[1] // 16), count // 8
            path = Path(folder) / "weights.safetensors"
            save_file(
                {f"w{n}": torch.zeros(shape, dtype=torch.bfloat16) for n in range(count)}, path
            )
            yield from _loaded(f"{count} {name}", path, torch.Size(shape).numel() * 2)


def _loaded(what: str, path: Path, each: int) -> Iterator[Row]:
    with safe_open(path, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    there = {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device())
        for name, shape in shapes.items()
    }
    size = each * len(there)

    def plain() -> None:
        for name, weight in _weights(path):
            there[name].copy_(weight)

    loader = "SGLang's iterator" if find_spec("sglang") else "safetensors"
    yield _load(f"{what}, by {loader}", size, seconds(plain, rounds=2))
    if not on_gpu():
        yield Row(f"{what}, through pinned memory", skipped=NO_BUS)
        return
    stages = [torch.empty(each // 2, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)]
    free = [torch.cuda.Event() for _ in stages]  # type: ignore[no-untyped-call]

    def staged() -> None:
        for turn, (name, weight) in enumerate(_weights(path)):
            free[turn % 2].synchronize()
            stages[turn % 2].copy_(weight.flatten())
            there[name].view(-1).copy_(stages[turn % 2], non_blocking=True)
            free[turn % 2].record()

    yield _load(f"{what}, through two pinned buffers", size, seconds(staged, rounds=2))
    pinned = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device=device())
    floor = seconds(lambda: target.copy_(pinned, non_blocking=True)) / len(pinned) * size
    yield _load(f"{what}, the pinned bus alone", size, floor)


def _load(what: str, size: int, taken: float) -> Row:
    figures = {"GB/s": size / taken / GB, "s for 16.4 GB": VERSION_BYTES / size * taken}
    return Row(what, figures)


def _weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    if find_spec("sglang"):
        module: Any = import_module("sglang.srt.model_loader.weight_utils")
        yield from module.safetensors_weights_iterator([str(path)])
        return
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)
