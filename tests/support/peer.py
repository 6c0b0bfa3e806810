"""Seeds and workers in this process, joined to a `CoordinatorDouble`."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.config.worker import WorkerConfig
from echo2d.core.base.ids import Digest, PeerId
from echo2d.core.weights.form import FormFacts
from echo2d.engines.base import Engine
from echo2d.engines.fake import FakeEngine
from echo2d.net.control.client import Identity, enrol
from echo2d.net.security.auth import public_bytes, read_token_file
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.seed.main import Seed
from echo2d.runtime.seed.supervisor import SeedHandover
from echo2d.runtime.worker.main import Worker
from echo2d.runtime.worker.progress import ProgressTeller
from echo2d.store.snapshots import build_manifest
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.snapshots import write_snapshot


class Home(Protocol):
    """A coordinator that a worker may join."""

    @property
    def url(self) -> str: ...

    def token(self, path: Path, name: str) -> Path:
        """Write a worker's token. Blocking."""


@asynccontextmanager
async def a_seed(
    double: CoordinatorDouble, *, uplink_limit: int | None = None
) -> AsyncIterator[Seed]:
    key = Ed25519PrivateKey.generate()
    double.access.admit_own(public_bytes(key), "seed")
    handover = SeedHandover.make(
        double.url,
        key,
        run=double.run,
        link_host="127.0.0.1",
        link_port=0,
        uplink_limit=uplink_limit,
    )
    seed = await asyncio.to_thread(Seed, handover)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(seed.run())
        yield seed
        running.cancel()


async def config_of(double: Home, folder: Path) -> WorkerConfig:
    """The config of a worker with the name and all files of `folder`; its token is made at the first call."""
    path = folder / "worker.token"
    if not await asyncio.to_thread(path.exists):
        await asyncio.to_thread(folder.mkdir)
        await asyncio.to_thread(double.token, path, folder.name)
    return WorkerConfig(
        url=double.url, token_file=path, state_dir=folder / "state", name=folder.name, engine="fake"
    )


@asynccontextmanager
async def a_worker(
    double: Home,
    folder: Path,
    *engines: Engine,
    relay_only: bool = False,
    teller: ProgressTeller | None = None,
    **options: Any,
) -> AsyncIterator[Worker]:
    """A worker that is killed at the end, without a goodbye. Without engines it gets a fake one, unless it is a relay.

    `options`: other keys of its config.
    """
    config = dataclasses.replace(await config_of(double, folder), **options)
    token = await asyncio.to_thread(read_token_file, config.token_file)
    state_dir = await asyncio.to_thread(StateDir, config.state_dir, config.disk_bytes_max)
    identity = Identity.of(config.url, token, await asyncio.to_thread(state_dir.key))
    await enrol(double.url, token, identity, rng=random.Random(1), patience_s=5.0)
    if not engines and not relay_only:
        engines = (FakeEngine(),)
    worker = Worker(config, identity, state_dir, engines, rng=random.Random(1), teller=teller)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(worker.run())
        try:
            yield worker
        finally:
            running.cancel()
            state_dir.close()


async def a_model(
    double: CoordinatorDouble, number: int, weight_bytes: int = 1 << 20, *, folder: str = ""
) -> tuple[Path, Digest]:
    """A snapshot copy in the run directory, and its digest; equal numbers give equal models."""
    path = double.run.path / "versions" / (folder or str(number))
    await asyncio.to_thread(write_snapshot, path, weight_bytes=weight_bytes, rng_seed=number)
    return path, (await asyncio.to_thread(build_manifest, path)).digest


async def spread(
    double: CoordinatorDouble, version: int, *chain: PeerId
) -> tuple[FormFacts, Digest]:
    """Publish a new model along the chain, seed first."""
    return await spread_striped(double, version, chain)


async def spread_striped(
    double: CoordinatorDouble, version: int, *chains: Sequence[PeerId], weight_bytes: int = 1 << 20
) -> tuple[FormFacts, Digest]:
    """Publish a new model over several chains, each from the seed."""
    path, digest = await a_model(double, version, weight_bytes)
    facts = double.facts(version, version + 1)
    double.start_form(facts)
    double.chains(facts.form, chains, plan=version + 1)
    double.send(chains[0][0], double.order(facts, digest, path))
    return facts, digest


async def publish_full(double: CoordinatorDouble, version: int, *chain: PeerId) -> Digest:
    """Publish what is in `versions/<version>` along the chain, seed first."""
    path = double.run.path / "versions" / str(version)
    digest = (await asyncio.to_thread(build_manifest, path)).digest
    facts = double.facts(version, version + 1)
    double.start_form(facts)
    double.chain(facts.form, chain, plan=version + 1)
    double.send(chain[0], double.order(facts, digest, path))
    return digest


async def publish_delta(
    double: CoordinatorDouble, version: int, base: Digest, *chain: PeerId
) -> Digest:
    """The same, as a delta from the version before it, which has the digest `base`."""
    path = double.run.path / "versions" / str(version)
    digest = (await asyncio.to_thread(build_manifest, path)).digest
    facts = dataclasses.replace(double.facts(version, version + 1), kind="delta", base_digest=base)
    double.start_form(facts)
    double.chain(facts.form, chain, plan=version + 1)
    order = double.order(facts, digest, path)
    base_path = f"versions/{version - 1}"
    double.send(chain[0], dataclasses.replace(order, kind="delta", base_path=base_path))
    return digest
