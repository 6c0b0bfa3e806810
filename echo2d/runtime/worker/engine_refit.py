"""Creates the engines of one worker and refits all of them to another version.

A refit is done when every engine has loaded the snapshot. Engines that can read their memory back
also report whether it matches the snapshot. The slot is verified before the first engine loads it,
because it may have been written long ago, and disks decay (I3).

Engines are refitted one after the other: the others keep generating, and host memory has one copy
of the weights at a time. If an engine fails, the refit stops there. The worker then serves the
version that all engines hold, or nothing if they differ (I3).
An adapter is loaded together with the base model that it names, verified by `lora_base.py`. Engines may go on holding
adapters of earlier versions; a version counts as held only if every engine holds it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echo2d.config.worker import WorkerConfig
from echo2d.core.base.ids import version_label
from echo2d.core.worker.events import EngineRefitFailed, EngineRefitted, RefitEngines
from echo2d.engines.base import Engine, EngineOptions
from echo2d.engines.layout import file_tensor_digests
from echo2d.errors import EngineFault, IntegrityFault, OperatorFault, StoreFault
from echo2d.extras import install_command
from echo2d.process_environment import engine_environment
from echo2d.registry import ENGINES, installed, load
from echo2d.runtime.worker.lora_base import LoraBase
from echo2d.runtime.worker.stop_strings import ServedTexts
from echo2d.store.slots.slot_store import SlotStore
from echo2d.texts.files import read_text_files


def make_engines(config: WorkerConfig) -> list[Engine]:
    """The configured engines, not yet started; a relay-only peer has none.

    OperatorFault: the Python package that this engine needs is not installed.
    """
    if config.relay_only:
        return []
    try:
        make = load(ENGINES[config.engine])
    except (ImportError, AttributeError) as error:
        foreign, again = config.engine in installed("engines"), "install its distribution again"
        advice = again if foreign else install_command(config.engine)
        raise OperatorFault(
            f"the {config.engine} engine misses a package ({error}): {advice}"
        ) from error
    return list(make(engine_options(config)))


def engine_options(config: WorkerConfig) -> EngineOptions:
    return EngineOptions(
        count=config.engines,
        slots=config.slots,
        tokens_per_s_max=config.tokens_per_s_max,
        threads=config.threads,
        device=config.device,
        dtype=config.dtype,
        folder=config.state_dir.absolute() / "engines",
        environment=engine_environment(),
        python=config.engine_python,
        arguments=config.engine_args,
        url=config.engine_url,
        key_file=config.engine_key_file,
        refit_mode=config.refit_mode,
        quantized_as=config.quantized_as,
    )


class EngineRefits:
    """Runs one refit at a time; `core/worker/versions.py` never asks for two at once."""

    def __init__(
        self,
        engines: Sequence[Engine],
        slots: SlotStore,
        base_model: Path | None,
        texts: ServedTexts,
    ) -> None:
        self._texts = texts
        self._engines, self._slots, self._base = engines, slots, LoraBase(base_model)

    async def refit(self, order: RefitEngines) -> EngineRefitted | EngineRefitFailed:
        """Refit all engines; returns the outcome. pause_s and recompute_s are those of the slowest engine."""
        try:
            return await self._refit(order, version_label(order.version, order.digest))
        except (EngineFault, IntegrityFault, StoreFault) as fault:
            # Engines before the failed one may hold the new version, and those after it the old version.
            labels = {engine.label for engine in self._engines}
            label = labels.pop() if len(labels) == 1 else None
            damaged = not isinstance(fault, EngineFault)
            return EngineRefitFailed(
                order.version,
                order.digest,
                str(fault),
                label,
                damaged=damaged,
                held=self._held(),
            )

    async def _refit(self, order: RefitEngines, label: str) -> EngineRefitted:
        snapshot, loop = Path(order.path), asyncio.get_running_loop()
        await asyncio.to_thread(self._slots.require_intact, snapshot, order.digest)
        base = await asyncio.to_thread(self._base.of, snapshot)
        if base is not None:
            base = replace(
                base,
                staleness_max=order.staleness_max,
                kept=frozenset(order.kept),
                held_max=order.most,
            )
        files = await asyncio.to_thread(
            read_text_files, snapshot if base is None else base.directory
        )
        pause_s, memory_ok, tokens = 0.0, list[bool | None](), 0
        recomputes_s: list[float | None] = []
        rooms = list[int]()
        # Hash the files only if an engine gives digests (SGLang gives none): hashing a large model takes seconds.
        expected: dict[str, bytes] | None = None
        for engine in self._engines:
            report = await engine.refit(snapshot, label, base)
            # An engine does not generate while its memory is read: the pause includes that.
            reading_since = loop.time()
            digests = await engine.tensor_digests()
            pause_s = max(pause_s, report.pause_s + loop.time() - reading_since)
            if digests is not None and expected is None:
                expected = await asyncio.to_thread(file_tensor_digests, snapshot)
            memory_ok.append(None if digests is None else digests == expected)
            tokens += report.recomputed_tokens
            recomputes_s.append(report.recompute_s)
            rooms += [] if report.held_max is None else [report.held_max]
        self._texts.serve(files)
        known_s = [each for each in recomputes_s if each is not None]
        recompute_s = max(known_s, default=0.0) if len(known_s) == len(recomputes_s) else None
        return EngineRefitted(
            order.version,
            order.digest,
            pause_s,
            _all(memory_ok),
            tokens,
            recompute_s,
            self._held(),
            min(rooms, default=None),
        )

    def _held(self) -> tuple[str, ...]:
        """The labels that every engine holds."""
        first, *others = (frozenset(engine.held) for engine in self._engines)
        return tuple(sorted(first.intersection(*others)))


def _all(checks: Sequence[bool | None]) -> bool | None:
    """False if one check failed; otherwise None if one engine could not be checked."""
    return next((each for each in (False, None) if each in checks), True)
