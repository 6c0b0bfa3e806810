"""Predict what a run needs before anything is loaded: `echo2d learn --config run.toml --plan`.

    memory       of a rank's tensors at rest and at the peak of a train step (`footprint`)
    longest row  found by doubling or halving the tokens until one row fits and the next does not
    auto         learner.recompute and learner.moments: the cheapest with which the longest answer fits
    checkpoint   the shortest train step with which a checkpoint in each step is cheap enough: training waits
                 for its copy, and its write must end before the next one

A learner on GPUs plans too, before it loads its model. Footprints are kept in learner.out_dir/plans, so the next start
takes no time. A plan for GPUs does not need a GPU: `--gpu-gib 80 --ranks 8`.
"""

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from blake3 import blake3
from transformers import AutoConfig

from echo2d.client import OperatorFault
from echo2d.core.base.model_config import expert_numbers
from echo2d.core.protocol.columns import ANSWER_BYTES_MAX, TOKEN_BYTES
from echo2d.core.protocol.experts import EXPERTS
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.footprint import Footprint, footprint
from echo2d.this_build import THIS_BUILD

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
    # The values of these two keys, if they are auto.
    recompute: str
    moments_in: str
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
    checkpoints: int  # of all ranks, on disk: those that are kept, and the one that is written
    save_s: float  # until a checkpoint of all ranks is on the disk
    # If train steps take at least this long, a checkpoint in each of them costs at most CHECKPOINT_SHARE of it.
    least_step_s: float
    expert_bytes: int  # of the column of experts, for each token; 0: the model is dense

    @property
    def peak(self) -> int:
        return max(self.computing, self.stepping)

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory * PLANNED_SHARE


@dataclass(frozen=True, slots=True)
class Fitted:
    """A config without `auto`, and what its rows need."""

    config: LearnerConfig
    row: Footprint  # of the longest row that the config asks for
    longest: int  # tokens of the longest row that fits

    def fits(self, device: PlannedDevice) -> bool:
        return self.row.peak <= device.planned

    def check(self, device: PlannedDevice) -> None:
        """OperatorFault: the row does not fit."""
        if not self.fits(device):
            raise OperatorFault(
                f"learner.micro_batch_tokens, learner.row_tokens_max: rows of {self.row.tokens} tokens need "
                f"{self.row.peak / GIB:.1f} GiB of {device.planned / GIB:.1f} at the peak of a step; the longest row "
                f"that fits has {self.longest} (see --plan). The memory is not planned if recompute, moments and "
                "row_tokens_max are all set"
            )


def plan(
    config: LearnerConfig, ranks: int, device: PlannedDevice, answer_tokens: int
) -> MemoryPlan:
    """Plan for `ranks` ranks. answer_tokens: as in `fitted`. OperatorFault: the model cannot be loaded."""
    found = fitted(config, ranks, device, answer_tokens)
    row, config = found.row, found.config
    # The trained weights in float32 with AdamW's two moments.
    state = 3 * row.trained
    copy_s, work_s, write_s = _seconds(config.out_dir, state, state * ranks)
    # Training on a CPU also waits for the core on which the checkpoint is written.
    lost_s = copy_s if device.on_gpu else copy_s + work_s
    return MemoryPlan(
        ranks=ranks,
        on_gpu=device.on_gpu,
        memory=device.memory,
        recompute=config.recompute,
        moments_in=config.moments,
        weights=row.weights,
        resting=row.resting,
        computing=row.computing,
        stepping=row.stepping,
        row_tokens=row.tokens,
        longest=found.longest,
        version_copy=row.trained // 2,
        checkpoint_copy=state,
        moments=row.moments,
        checkpoints=state * ranks * (config.checkpoints_kept + 1),
        save_s=copy_s + write_s,
        least_step_s=max(lost_s / CHECKPOINT_SHARE, write_s),
        expert_bytes=_expert_bytes(config.model),
    )


def fitted(config: LearnerConfig, ranks: int, device: PlannedDevice, answer_tokens: int) -> Fitted:
    """`fit`, or its result from learner.out_dir/plans if the same software was asked the same before."""
    models = [(each / "config.json").read_bytes() for each in models_of(config)]
    software = THIS_BUILD.name, torch.__version__, transformers.__version__
    question = repr((asdict(config), models, software, ranks, device, answer_tokens))
    file = config.out_dir / "plans" / f"{blake3(question.encode()).hexdigest()[:32]}.json"
    # A damaged file is replaced.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(file.read_text())
        chosen = replace(config, **kept["chosen"])
        return Fitted(chosen, Footprint(**kept["row"]), kept["longest"])
    found = fit(config, ranks, device, answer_tokens)
    auto = {name: getattr(found.config, name) for name in ("recompute", "moments", "dtype")}
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {"chosen": auto, "row": asdict(found.row), "longest": found.longest}
    file.write_text(json.dumps(kept))
    return found


def fit(
    config: LearnerConfig,
    ranks: int,
    device: PlannedDevice,
    answer_tokens: int,
    *,
    prompt_tokens: int = 2048,
) -> Fitted:
    """Replace `auto` by the cheapest values of learner.recompute, then of learner.moments, with which the longest
    answer fits into a row. If it fits with none of them, take those that allow the longest rows.

    answer_tokens: the most that the run's tasks allow; 0: not known. prompt_tokens: room for its prompt.
    Other processes plan, because a plan imagines its ranks, and this process may have real ones.
    """
    wanted = config.row_tokens_max or min(read_max(config), answer_tokens + prompt_tokens)
    ways = [config.explicit(cuda=device.on_gpu)]
    if device.on_gpu and config.recompute == "auto":
        ways = [replace(ways[0], recompute="none"), *ways, replace(ways[0], recompute="all")]
    choices = [ways]
    if device.on_gpu and config.moments == "auto":
        choices.append([replace(each, moments="host") for each in ways])
    alone = multiprocessing.get_context("spawn")
    found: list[Fitted] = []
    with ProcessPoolExecutor(min(len(ways), os.cpu_count() or 1), mp_context=alone) as planners:
        for some in choices:
            found += planners.map(functools.partial(_fit, ranks, device), some)
            for each in found:
                if each.fits(device) and each.longest >= wanted:
                    return each
    return max(found, key=lambda each: each.longest)


def _fit(ranks: int, device: PlannedDevice, config: LearnerConfig) -> Fitted:
    logging.disable()  # Each row that is tried would log the same about the model.
    tokens = max(
        TOKENS_MIN, config.micro_batch_tokens * config.context_parallel, config.row_tokens_max
    )
    peak_of = functools.partial(footprint, config, ranks, on_gpu=device.on_gpu)
    row = peak_of(tokens)
    return Fitted(config, row, longest_row(peak_of, row, device.planned, read_max(config)))


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


def fitted_on_gpu(
    config: LearnerConfig, ranks: int, memory: int, answer_tokens: int
) -> LearnerConfig:
    """The config for GPUs with `memory` bytes, without `auto`; row_tokens_max is the longest row that fits.

    answer_tokens: as in `fitted`. OperatorFault: rows of micro_batch_tokens, or of row_tokens_max, do not fit.
    """
    device = PlannedDevice(on_gpu=True, memory=memory)
    found = fitted(config, ranks, device, answer_tokens)
    found.check(device)
    return replace(found.config, row_tokens_max=config.row_tokens_max or found.longest)


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
        f"{config.model}, recompute = {found.recompute}, moments = {found.moments_in}",
        f"GiB per {device}, on {found.ranks} ranks:",
        f"  {found.memory / GIB:8.2f}  memory, of which {PLANNED_SHARE:.0%} are planned",
        f"  {found.weights / GIB:8.2f}  weights in float32",
        f"  {found.resting / GIB:8.2f}  between two steps, with AdamW's state",
        f"  {found.computing / GIB:8.2f}  at the peak of both passes, rows of {found.row_tokens:,} tokens",
        f"  {found.stepping / GIB:8.2f}  at the peak of AdamW's step",
        *([] if found.fits else ["THESE ROWS DO NOT FIT"]),
        f"the longest prompt with its answer that fits: {found.longest:,} tokens",
        "GiB of host memory per rank:",
        f"  {found.moments / GIB:8.2f}  AdamW's moments",
        f"  {found.checkpoint_copy / GIB:8.2f}  copy of the newest checkpoint",
        f"  {found.version_copy / GIB:8.2f}  copy of a version, while it is written",
        f"GiB of disk for {config.checkpoints_kept} checkpoints and the one that is written:",
        f"  {found.checkpoints / GIB:8.2f}",
        f"a checkpoint is on the disk after {found.save_s:.1f} s; learner.stop_within_s is {config.stop_within_s:g}",
        f"checkpoint_every = 1 costs at most {CHECKPOINT_SHARE:.0%} of steps of {found.least_step_s:.1f} s and more",
        *_expert_lines(found.expert_bytes),
    ]


def as_json(found: MemoryPlan, cautions: Sequence[str] = ()) -> str:
    """The plan as JSON. cautions: warnings about the run's other tables."""
    return json.dumps(
        {**asdict(found), "peak": found.peak, "fits": found.fits, "cautions": list(cautions)}
    )


def models_of(config: LearnerConfig) -> list[Path]:
    """The directories of the policy and of its teacher."""
    return [config.model, *([config.teacher] if config.teacher else [])]


def read_max(config: LearnerConfig) -> int:
    """The most tokens that the model, and its teacher, can read."""
    known = [AutoConfig.from_pretrained(each).get_text_config() for each in models_of(config)]
    most = [getattr(each, "max_position_embeddings", 0) or _TOKENS_MAX for each in known]
    return min(_TOKENS_MAX, *most)


def _expert_lines(each: int) -> list[str]:
    if not each:
        return []
    tokens = ANSWER_BYTES_MAX // (TOKEN_BYTES + each)
    what = f'with policy.columns = ["{EXPERTS}"] workers send {each} bytes more for each token'
    return [f"{what}, in answers of up to {tokens:,} tokens"]


def _expert_bytes(model: Path) -> int:
    numbers = expert_numbers(json.loads((model / "config.json").read_text()))
    return 0 if numbers is None else numbers.token_bytes


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
