"""The auditor process: scores answers that workers wrote, one prefill each.

It is a child process of the coordinator (`python -m echo2d.runtime.audit.main`) and a peer with a
control link only. It reads the coordinator's own copies of versions, and keeps one model in memory,
which it refits as orders name other versions.

    ScoreAnswers -> the version's copy is verified and loaded, unless it is in memory -> scored -> AnswersScored

Not here: which answers are audited, and what their scores cause (`core/audit`).
"""

import asyncio
import logging
import random
import secrets
import sys
from pathlib import Path

from echo2d.core.base.ids import version_label
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    AnswersScored,
    Heartbeat,
    Hello,
    ScoreAnswers,
    ScoringFailed,
    ToPeer,
    Welcome,
)
from echo2d.engines.base import EngineOptions, ScoringEngine
from echo2d.errors import EngineFault, IntegrityFault, OperatorFault, StoreFault
from echo2d.extras import install_command
from echo2d.net.control.client import ControlLink
from echo2d.registry import ENGINES, load
from echo2d.runtime.audit.scoring import score_order
from echo2d.runtime.audit.supervisor import AuditHandover
from echo2d.runtime.process.child import child_main
from echo2d.runtime.process.lifecycle import collect_rarely
from echo2d.runtime.worker.lora_base import LoraBase
from echo2d.store.snapshots import build_manifest, scan_snapshot

# Memory for the model, its activations and the file being read, as a multiple of the model's size.
MEMORY_MARGIN = 1.3

log = logging.getLogger("echo2d.audit")


class Auditor:
    """One run of the auditor."""

    def __init__(self, handover: AuditHandover, engine: ScoringEngine) -> None:
        self._engine, self._run_dir = engine, Path(handover.run_dir)
        self._identity = handover.identity()
        self._boot_id = secrets.token_hex(8)
        rng = random.Random(secrets.randbits(64))
        self._control = ControlLink(handover.url, self._identity, self, rng=rng)
        base_model = Path(handover.base_model) if handover.base_model else None
        self._base, self._dtype = LoraBase(base_model), handover.dtype
        # One order at a time; a new one comes only after the answer, or in another session.
        self._orders: asyncio.Queue[ScoreAnswers] = asyncio.Queue()

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._engine.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._control.run())
                tasks.create_task(self._score_all())
        finally:
            await self._engine.close()

    async def _score_all(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                self._control.send(await self._score(order))
            except (EngineFault, IntegrityFault, StoreFault, OperatorFault) as fault:
                log.warning("not scored version=%d reason=%s", order.version, fault)
                self._control.send(ScoringFailed(order.order, str(fault)))

    async def _score(self, order: ScoreAnswers) -> AnswersScored:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await self._load(order)
        return await score_order(self._engine, order, loading_s=loop.time() - begun)

    async def _load(self, order: ScoreAnswers) -> None:
        label, path = version_label(order.version, order.digest), self._run_dir / order.path
        if self._engine.label == label:
            return
        # The copy is verified first: damaged files must not convict an honest worker.
        manifest = await asyncio.to_thread(build_manifest, path)
        if manifest.digest != order.digest:
            raise IntegrityFault(f"the bytes of {path} differ from those that were published")
        if self._engine.label is None:
            await asyncio.to_thread(require_room, self._engine, path)
        base = await asyncio.to_thread(self._base.of, path)
        await self._engine.refit(path, label, base)
        log.info("loaded version=%d", order.version)

    # --- called by the control link

    def hello(self) -> Hello:
        return Hello(
            OURS, self._identity.run_id, "auditor", "auditor", self._boot_id, 0, None, None, (), (), ()
        )  # fmt: skip

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(0)

    async def connected(self, welcome: Welcome) -> None:
        log.info("connected epoch=%d", welcome.epoch)

    async def disconnected(self, reason: str) -> None:
        log.info("disconnected reason=%s", reason)
        while not self._orders.empty():
            self._orders.get_nowait()

    async def received(self, message: ToPeer) -> None:
        if isinstance(message, ScoreAnswers):
            self._orders.put_nowait(message)


def require_room(engine: ScoringEngine, model: Path) -> None:
    """OperatorFault: the model in this directory does not fit into the device's memory."""
    size = sum(file.size for file in scan_snapshot(model) if file.path.endswith(".safetensors"))
    free = engine.free_bytes()
    if size * MEMORY_MARGIN > free:
        raise OperatorFault(
            f"audit.device: the model has {size / 1e9:.1f} GB, and the device has {free / 1e9:.1f} "
            "GB of free memory; choose another device"
        )


def make_engine(handover: AuditHandover) -> ScoringEngine:
    """OperatorFault: the device cannot be used, or has no room for the run's base model."""
    options = EngineOptions(
        count=1,
        slots=1,
        threads=handover.threads,
        device=handover.device,
        dtype=handover.dtype,
        folder=Path(handover.run_dir),
    )
    try:
        (engine,) = load(ENGINES["torch"])(options)
        assert isinstance(engine, ScoringEngine)
    except ImportError as error:
        raise OperatorFault(f"the audit needs torch: {install_command('torch')}") from error
    if handover.base_model:
        require_room(engine, Path(handover.base_model))
    return engine


async def run_auditor(handover: AuditHandover) -> None:
    """Serve until the coordinator ends this process."""
    engine = await asyncio.to_thread(make_engine, handover)
    collect_rarely()
    await Auditor(handover, engine).run()


if __name__ == "__main__":
    sys.exit(child_main(AuditHandover, run_auditor))
