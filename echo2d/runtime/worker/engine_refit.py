"""The engines of one worker, and what it takes to change all of them from one version to another.

A refit counts as done when every engine has loaded the snapshot and its memory, where it can be read back, is the
snapshot's. What
stands in the slot is verified first: it may have been written long ago, and a disk may rot (I3). Engines
take turns: the others go on generating, and one copy of the weights at a time is in host memory. If one fails, those
after it are not touched, and the worker serves what all of them hold: the old version, or nothing (I3).
An adapter is loaded beside the base model that it names, which was verified too (`lora_base.py`).
"""

import asyncio
import os
import secrets
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from echo2d.config import WorkerConfig, engine_environment
from echo2d.core.base.ids import version_label
from echo2d.core.worker.events import EngineRefitFailed, EngineRefitted, RefitEngines
from echo2d.engines.base import Engine
from echo2d.engines.fake import FakeEngine
from echo2d.engines.layout import file_tensor_digests
from echo2d.errors import EngineFault, IntegrityFault, OperatorFault, StoreFault
from echo2d.runtime.worker.lora_base import LoraBase
from echo2d.store.slots import SlotStore

if TYPE_CHECKING:
    from echo2d.engines.sglang.process import Launch
    from echo2d.engines.sglang.server import Running


def make_engines(config: WorkerConfig) -> list[Engine]:
    """Not started. OperatorFault: this machine or installation cannot run them."""
    if config.relay_only:
        return []
    pace = config.tokens_per_s_max / config.engines or None
    if config.engine == "fake":
        numbers = range(config.engines)
        return [
            FakeEngine(rng_seed=secrets.randbits(32), tokens_per_s=pace, slots=config.slots)
            for _ in numbers
        ]
    if config.engine == "sglang":
        return list(sglang_engines(config))
    try:
        from echo2d.engines.torch_engine import TorchEngine, devices_of
    except ImportError as error:
        raise OperatorFault("the torch engine needs `pip install echo2d[torch]`") from error
    return [
        TorchEngine(
            device=device,
            dtype=("float32" if device == "cpu" else "bfloat16")
            if config.dtype == "auto"
            else config.dtype,
            slots_max=config.slots,
            rng_seed=secrets.randbits(32),
            tokens_per_s_max=pace,
            threads=threads_each(config),
        )
        for device in devices_of(config.device, config.engines)
    ]


def sglang_engines(config: WorkerConfig) -> Iterator[Engine]:
    """Each with a server of its own."""
    from echo2d.engines.sglang.engine import SglangEngine

    for where in _servers(config):
        yield SglangEngine(where, slots=config.slots, refit_mode=config.refit_mode)


def _servers(config: WorkerConfig) -> "Sequence[Launch] | Sequence[Running]":
    from echo2d.engines.sglang.process import Launch, launches, require_arguments
    from echo2d.engines.sglang.server import Running

    if config.tokens_per_s_max:
        raise OperatorFault(
            "worker.tokens_per_s_max: SGLang has no pace; use --max-running-requests in engine_args"
        )
    if config.engine_python is None:
        urls = [url.strip() for url in config.engine_url.split(",")]
        if len(urls) != config.engines or not all(
            url.startswith(("http://", "https://")) for url in urls
        ):
            raise OperatorFault(
                f"worker.engine_url: expected {config.engines} http:// URLs; found {config.engine_url!r}"
            )
        return [Running(url, *_keys(config.engine_key_file)) for url in urls]
    if not config.engine_python.exists():
        raise OperatorFault(f"worker.engine_python: {config.engine_python} does not exist")
    try:
        arguments = shlex.split(config.engine_args)
    except ValueError as error:
        raise OperatorFault(f"worker.engine_args: {error}") from error
    require_arguments(arguments)
    python, folder = config.engine_python.absolute(), config.state_dir.absolute() / "engines"
    return launches(Launch(python, arguments, folder, engine_environment()), config.engines)


def _keys(file: Path | None) -> list[str]:
    """The API key and the admin key, as far as there are any."""
    if file is None:
        return []
    try:
        return file.read_text().split()[:2]
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorFault(f"worker.engine_key_file: cannot read {file}: {error}") from error


def threads_each(config: WorkerConfig) -> int | None:
    """CPU threads of one engine; None: torch decides, for an engine that has the box for itself."""
    if config.engines == 1:
        return config.threads or None
    return max(1, (config.threads or len(os.sched_getaffinity(0))) // config.engines)


class EngineRefits:
    """One refit at a time; the machine (`worker/versions`) sees to it."""

    def __init__(
        self, engines: Sequence[Engine], slots: SlotStore, base_model: Path | None
    ) -> None:
        self._engines, self._slots, self._base = engines, slots, LoraBase(base_model)

    async def refit(self, order: RefitEngines) -> EngineRefitted | EngineRefitFailed:
        """What became of it; pause_s is the longest time in which an engine generated nothing."""
        try:
            return await self._refit(order, version_label(order.version, order.digest))
        except (EngineFault, IntegrityFault, StoreFault) as fault:
            labels = {engine.label for engine in self._engines}
            label = labels.pop() if len(labels) == 1 else None
            damaged = not isinstance(fault, EngineFault)
            return EngineRefitFailed(
                order.version, order.digest, str(fault), label, damaged=damaged
            )

    async def _refit(self, order: RefitEngines, label: str) -> EngineRefitted:
        snapshot, loop = Path(order.path), asyncio.get_running_loop()
        await asyncio.to_thread(self._slots.require_intact, snapshot, order.digest)
        base = await asyncio.to_thread(self._base.of, snapshot)
        expected = await asyncio.to_thread(file_tensor_digests, snapshot)
        pause_s, memory_ok = 0.0, list[bool | None]()
        for engine in self._engines:
            report = await engine.refit(snapshot, label, base)
            reading_since = loop.time()
            digests = await engine.tensor_digests()
            memory_ok.append(None if digests is None else digests == expected)
            pause_s = max(pause_s, report.pause_s + loop.time() - reading_since)
        return EngineRefitted(order.version, order.digest, pause_s, _all(memory_ok))


def _all(checks: Sequence[bool | None]) -> bool | None:
    """False: one failed; None: one could not be made."""
    return next((each for each in (False, None) if each in checks), True)
