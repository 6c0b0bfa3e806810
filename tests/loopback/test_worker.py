"""A seed and workers in a chain, in one process: real links, stores, control link and signatures; fake engines."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.config import WorkerConfig
from echo2d.core.ids import PeerId
from echo2d.core.messages import FormEncoded, RefitDone, SampleFinished, Span, VersionVerified
from echo2d.core.trajectory import unpack_tokens
from echo2d.engines.fake import FakeEngine
from echo2d.net.auth import public_bytes, read_token_file
from echo2d.net.control import Identity, enrol
from echo2d.runtime.seed import Seed
from echo2d.runtime.seed_process import SeedHandover
from echo2d.runtime.state_dir import StateDir
from echo2d.runtime.worker import Worker
from echo2d.store.snapshots import build_manifest
from tests.coordinator_kit import CoordinatorDouble
from tests.snapshot_kit import write_snapshot


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[CoordinatorDouble]:
    async with CoordinatorDouble.serving(tmp_path / "run") as double:
        yield double


@asynccontextmanager
async def a_seed(double: CoordinatorDouble) -> AsyncIterator[Seed]:
    key = Ed25519PrivateKey.generate()
    double.access.admit_seed(public_bytes(key))
    handover = SeedHandover.make(
        double.url, key, run_key=double.run.public_key, run_dir=double.run.path, link_host="127.0.0.1", link_port=0
    )
    seed = Seed(handover)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(seed.run())
        yield seed
        running.cancel()


@asynccontextmanager
async def a_worker(double: CoordinatorDouble, folder: Path, engine: FakeEngine | None = None) -> AsyncIterator[Worker]:
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    path = folder / "worker.token"
    if not await asyncio.to_thread(path.exists):
        await asyncio.to_thread(double.token, path, folder.name)
    config = WorkerConfig(url=double.url, token_file=path, state_dir=folder / "state", name=folder.name, engine="fake")
    state_dir = await asyncio.to_thread(StateDir, config.state_dir)
    token = await asyncio.to_thread(read_token_file, path)
    identity = Identity(await asyncio.to_thread(state_dir.key), bytes.fromhex(token.run_key))
    await enrol(double.url, token, identity.key, rng=random.Random(1), patience_s=5.0)
    worker = Worker(config, identity, state_dir, [engine or FakeEngine()], rng=random.Random(1))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.run())
        try:
            yield worker
        finally:
            running.cancel()
    state_dir.close()


async def spread(double: CoordinatorDouble, model: Path, version: int, chain: list[PeerId]) -> bytes:
    """Publish the directory along the chain, seed first; the snapshot digest."""
    digest = (await asyncio.to_thread(build_manifest, model)).digest
    facts = double.facts(version, version + 1)
    double.start_form(facts)
    double.chain(facts.form, chain, plan=version + 1)
    double.send(chain[0], double.order(facts, digest, model))
    return digest


async def test_a_version_travels_down_the_chain_and_writes_tokens(double: CoordinatorDouble, tmp_path: Path) -> None:
    model = await asyncio.to_thread(write_snapshot, double.run.path / "versions" / "0", weight_bytes=1 << 20)
    async with a_seed(double), a_worker(double, tmp_path / "one"), a_worker(double, tmp_path / "two"):
        names = await double.peers(3)
        chain = [names["seed"], names["one"], names["two"]]
        digest = await spread(double, model, 0, chain)
        for peer in chain[1:]:
            done = await double.until_said(RefitDone, peer)
            assert (done.version, done.digest, done.memory_ok) == (0, digest, True)
            assert double.said(VersionVerified, peer)[0].digest == digest
        double.send(chain[2], double.lease(7))
        await double.until(lambda: len(double.said(SampleFinished, chain[2])) == 2)
        for result in double.said(SampleFinished, chain[2]):
            length = len(unpack_tokens(result.tokens))
            assert result.spans == (Span(0, length, done.version, done.digest),)
        assert double.said(FormEncoded)[0].snapshot == digest
