"""The engines of one worker, and what it takes to change all of them from one version to another.

A refit counts as done when every engine has loaded the snapshot and its memory, where it can be read back, is the
snapshot's. What
stands in the slot is verified first: it may have been written long ago, and a disk may rot (I3). Engines
take turns: the others go on generating, and one copy of the weights at a time is in host memory. If one fails, those
after it are not touched, and the worker serves what all of them hold: the old version, or nothing (I3).
"""

import asyncio
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from echo2d.config import WorkerConfig
from echo2d.core.ids import version_label
from echo2d.core.worker_io import EngineRefitFailed, EngineRefitted, RefitEngines
from echo2d.engines.base import Engine
from echo2d.engines.fake import FakeEngine
from echo2d.engines.layout import file_tensor_digests
from echo2d.errors import EngineFault, IntegrityFault, OperatorFault, StoreFault
from echo2d.store.slots import SlotStore


def make_engines(config: WorkerConfig) -> list[Engine]:
    """Not started. OperatorFault: this machine or installation cannot run them."""
    if config.relay_only:
        return []
    pace = config.tokens_per_s_max / config.engines or None
    if config.engine == "fake":
        numbers = range(config.engines)
        return [FakeEngine(rng_seed=secrets.randbits(32), tokens_per_s=pace, slots=config.slots) for _ in numbers]
    try:
        from echo2d.engines.torch_engine import TorchEngine, devices_of
    except ImportError as error:
        raise OperatorFault("the torch engine needs `pip install echo2d[torch]`") from error
    return [
        TorchEngine(
            device=device,
            dtype=("float32" if device == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype,
            slots_max=config.slots,
            rng_seed=secrets.randbits(32),
            tokens_per_s_max=pace,
            threads=threads_each(config),
        )
        for device in devices_of(config.device, config.engines)
    ]


def threads_each(config: WorkerConfig) -> int | None:
    """CPU threads of one engine; None: torch decides, for an engine that has the box for itself."""
    if config.engines == 1:
        return config.threads or None
    return max(1, (config.threads or len(os.sched_getaffinity(0))) // config.engines)


class Refits:
    """One refit at a time; the machine (`worker_versions`) sees to it."""

    def __init__(self, engines: Sequence[Engine], slots: SlotStore) -> None:
        self._engines, self._slots = engines, slots

    async def refit(self, order: RefitEngines) -> EngineRefitted | EngineRefitFailed:
        """What became of it; pause_s is the longest time in which an engine generated nothing."""
        try:
            return await self._refit(order, version_label(order.version, order.digest))
        except (EngineFault, IntegrityFault, StoreFault) as fault:
            labels = {engine.label for engine in self._engines}
            label = labels.pop() if len(labels) == 1 else None
            damaged = not isinstance(fault, EngineFault)
            return EngineRefitFailed(order.version, order.digest, str(fault), label, damaged=damaged)

    async def _refit(self, order: RefitEngines, label: str) -> EngineRefitted:
        snapshot, loop = Path(order.path), asyncio.get_running_loop()
        await asyncio.to_thread(self._slots.require_intact, snapshot, order.digest)
        expected = await asyncio.to_thread(file_tensor_digests, snapshot)
        pause_s, memory_ok = 0.0, list[bool | None]()
        for engine in self._engines:
            report = await engine.refit(snapshot, label)
            reading_since = loop.time()
            digests = await engine.tensor_digests()
            memory_ok.append(None if digests is None else digests == expected)
            pause_s = max(pause_s, report.pause_s + loop.time() - reading_since)
        return EngineRefitted(order.version, order.digest, pause_s, _all(memory_ok))


def _all(checks: Sequence[bool | None]) -> bool | None:
    """False: one failed; None: one could not be made."""
    return next((each for each in (False, None) if each in checks), True)
