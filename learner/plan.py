"""Predict what a run needs before anything is loaded: `echo2d learn --config run.toml --plan`.

    memory       of a rank's tensors at rest and at the peak of a train step (`footprint`)
    longest row  found by doubling or halving the tokens until one row fits and the next does not
    checkpoint   the shortest train step with which a checkpoint in each step is cheap enough: training waits
                 for its copy, and its write must end before the next one

The configuration is not changed. A plan for GPUs does not need a GPU: `--gpu-gib 80 --ranks 8`.
"""

import functools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from blake3 import blake3
from transformers import AutoConfig

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.footprint import Footprint, footprint

GIB = 2**30
# The share of a GPU's memory that tensors may take. Kernels, NCCL and gaps between tensors need the rest.
PLANNED_SHARE = 0.9
# Training may wait for the copies of checkpoints for this share of a step.
CHECKPOINT_SHARE = 0.03
_PROBE_BYTES = 256 << 20
# The longest row is searched between these two numbers of tokens. A model may read fewer than _TOKENS_MAX.
TOKENS_MIN, _TOKENS_MAX = 256, 1 << 20


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """The device of each rank."""

    on_gpu: bool
    memory: int  # bytes for one rank

    @property
    def planned(self) -> int:
        return int(self.memory * PLANNED_SHARE)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes and seconds of one rank."""

    ranks: int
    on_gpu: bool
    memory: int
    weights: int
    resting: int
    # The most in a forward and backward pass with rows of `row_tokens` tokens, and in AdamW's step.
    computing: int
    stepping: int
    row_tokens: int
    # Tokens of the longest prompt with its answer that fits and that the model can read; 0: none fits.
    longest: int
    # In host memory, while training goes on.
    version_copy: int
    checkpoint_copy: int
    moments: int  # of AdamW, with learner.moments = "host"
    # If train steps take at least this long, a checkpoint in each of them costs at most CHECKPOINT_SHARE of it.
    least_step_s: float

    @property
    def peak(self) -> int:
        return max(self.computing, self.stepping)

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory * PLANNED_SHARE


def plan(config: LearnerConfig, ranks: int, device: PlannedDevice) -> MemoryPlan:
    """Plan for `ranks` ranks. OperatorFault: the model cannot be loaded."""
    tokens = max(TOKENS_MIN, config.micro_batch_tokens * config.context_parallel)
    peak_of = functools.partial(footprint, config, ranks, on_gpu=device.on_gpu)
    whole = peak_of(tokens)
    # The weights in float32 with AdamW's two moments.
    state = whole.resting + whole.moments
    copy_s, work_s, write_s = _seconds(config.out_dir, state, state * ranks)
    # Training on a CPU also waits for the core on which the checkpoint is written.
    lost_s = copy_s if device.on_gpu else copy_s + work_s
    return MemoryPlan(
        ranks=ranks,
        on_gpu=device.on_gpu,
        memory=device.memory,
        weights=whole.weights,
        resting=whole.resting,
        computing=whole.computing,
        stepping=whole.stepping,
        row_tokens=tokens,
        longest=longest_row(peak_of, whole, device.planned, read_max(config)),
        version_copy=whole.weights // 2,
        checkpoint_copy=state,
        moments=whole.moments,
        least_step_s=max(lost_s / CHECKPOINT_SHARE, write_s),
    )


def longest_row(
    peak_of: Callable[[int], Footprint], first: Footprint, memory: int, tokens_max: int
) -> int:
    """The tokens of the longest row whose peak fits into `memory`, at most tokens_max; 0: not even TOKENS_MIN fit.

    The peak as a function of the tokens never becomes less steep. So between two rows it is nowhere above the straight
    line through their peaks.
    """
    short = long = first
    while long.peak <= memory and long.tokens < tokens_max:
        short, long = long, peak_of(min(2 * long.tokens, tokens_max))
    while short.peak > memory and short.tokens > TOKENS_MIN:
        short, long = peak_of(max(short.tokens // 2, TOKENS_MIN)), short
    if short.peak > memory:
        return 0
    if long.peak > memory:
        each = (long.peak - short.peak) / (long.tokens - short.tokens)
        return min(tokens_max, short.tokens + int((memory - short.peak) / each))
    return min(tokens_max, long.tokens)


def longest_row_on_gpu(config: LearnerConfig, ranks: int, memory: int) -> int:
    """`MemoryPlan.longest` for GPUs with `memory` bytes. Another process plans it, because a plan imagines its ranks,
    and the ranks of this process are real.

    OperatorFault: rows of learner.micro_batch_tokens do not fit.
    """
    alone = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=alone) as planner:
        device = PlannedDevice(on_gpu=True, memory=memory)
        found = planner.submit(plan, config, ranks, device).result()
    if not found.fits:
        raise OperatorFault(
            f"learner.micro_batch_tokens: rows of {found.row_tokens} tokens need "
            f"{found.peak / GIB:.1f} GiB of {device.planned / GIB:.1f} at the peak of a step; the longest row that "
            f"fits has {found.longest} (see --plan). With learner.row_tokens_max the memory is not planned"
        )
    return found.longest


def device_for(config: LearnerConfig, ranks: int, gpu_gib: float) -> PlannedDevice:
    """The device with this much memory; 0: the one that a run on this machine would use."""
    if gpu_gib:
        return PlannedDevice(on_gpu=True, memory=int(gpu_gib * GIB))
    if config.device != "cpu" and torch.cuda.is_available():
        return PlannedDevice(on_gpu=True, memory=torch.cuda.get_device_properties(0).total_memory)
    pages, size = (os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_PAGE_SIZE"))
    return PlannedDevice(on_gpu=False, memory=pages * size // ranks)


def lines(found: MemoryPlan, config: LearnerConfig) -> list[str]:
    device = "GPU" if found.on_gpu else "rank (host memory)"
    return [
        f"{config.model} on {found.ranks} ranks, GiB per {device}:",
        f"  {found.memory / GIB:8.2f}  memory, of which {PLANNED_SHARE:.0%} are planned",
        f"  {found.weights / GIB:8.2f}  weights in float32",
        f"  {found.resting / GIB:8.2f}  between two steps, with AdamW's state",
        f"  {found.computing / GIB:8.2f}  at the peak of both passes, rows of {found.row_tokens:,} tokens",
        f"  {found.stepping / GIB:8.2f}  at the peak of AdamW's step",
        *([] if found.fits else ["THESE ROWS DO NOT FIT"]),
        f"the longest prompt with its answer that fits: {found.longest:,} tokens",
        *(
            [f"  {found.moments / GIB:8.2f}  AdamW's moments in host memory, always"]
            if found.moments
            else []
        ),
        "GiB of host memory per rank, while a version or a checkpoint is written:",
        f"  {found.version_copy / GIB:8.2f}  copy of the version",
        f"  {found.checkpoint_copy / GIB:8.2f}  copy of the checkpoint, which stays",
        f"checkpoint_every = 1 costs at most {CHECKPOINT_SHARE:.0%} of steps of {found.least_step_s:.1f} s and more",
    ]


def as_json(found: MemoryPlan, cautions: Sequence[str] = ()) -> str:
    """The plan as JSON. cautions: warnings about the run's other tables."""
    return json.dumps(
        {**asdict(found), "peak": found.peak, "fits": found.fits, "cautions": list(cautions)}
    )


def read_max(config: LearnerConfig) -> int:
    """The most tokens that the model can read."""
    known = AutoConfig.from_pretrained(config.model).get_text_config()
    return min(_TOKENS_MAX, getattr(known, "max_position_embeddings", 0) or _TOKENS_MAX)


def _seconds(directory: Path, copied: int, written: int) -> tuple[float, float, float]:
    """Three numbers of seconds: to copy `copied` bytes; of a core's work to write and digest `copied` bytes; until
    `written` bytes are on the disk. Measured with a copy and a synced file of _PROBE_BYTES.
    """
    source, copy = (torch.ones(_PROBE_BYTES, dtype=torch.uint8) for _ in range(2))
    begun = time.monotonic()
    # The copy reuses memory, as a learner's does.
    copy.copy_(source)
    copy_s = time.monotonic() - begun
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / ".plan-probe"
    begun, worked = time.monotonic(), time.thread_time()
    try:
        with probe.open("wb") as file:
            file.write(copy.numpy().data)
            os.fsync(file.fileno())
        blake3().update_mmap(probe)
    finally:
        probe.unlink(missing_ok=True)
    write_s, work_s = time.monotonic() - begun, time.thread_time() - worked
    return (
        copy_s * copied / _PROBE_BYTES,
        work_s * copied / _PROBE_BYTES,
        write_s * written / _PROBE_BYTES,
    )
