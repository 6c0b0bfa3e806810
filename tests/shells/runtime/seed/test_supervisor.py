"""The seed as a real child process."""

import asyncio
import io
import json
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.errors import OperatorFault
from echo2d.net import backoff
from echo2d.net.security.auth import peer_id_of, public_bytes
from echo2d.runtime.process import child as child_process
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.runtime.seed import supervisor
from echo2d.runtime.seed.supervisor import SeedHandover, supervise_seed

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


@pytest.fixture
def handover(tmp_path: Path) -> SeedHandover:
    return SeedHandover.make(
        "http://127.0.0.1:1", KEY, run=RunDirectory(tmp_path), link_host="127.0.0.1", link_port=0
    )


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[IO[str]]:
    """What the seeds say, a line each. Opened for both ways, so that no seed waits for us and no line is lost."""
    os.mkfifo(tmp_path / "seen")
    with os.fdopen(os.open(tmp_path / "seen", os.O_RDWR), encoding="utf-8") as lines:
        yield lines


async def next_seen(seen: IO[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(await asyncio.to_thread(seen.readline))
    return found


async def test_the_supervisor_hands_over_to_its_seed_and_restarts_and_ends_it(
    handover: SeedHandover, tmp_path: Path, seen: IO[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SEED_MODULE", "tests.support.seed_stub")
    monkeypatch.setattr(backoff, "BACKOFF_S_MIN", 0.01)
    async with asyncio.TaskGroup() as tasks:
        supervising = tasks.create_task(supervise_seed(handover, rng=random.Random(1)))
        first = await next_seen(seen)
        assert first["peer"] == peer_id_of(public_bytes(KEY))
        assert handover.private_key not in str(first["argv"])
        (tmp_path / "stay").touch()
        assert await next_seen(seen) == first
        supervising.cancel()


def test_a_seed_started_by_hand_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_PR_SET_PDEATHSIG", -1)
    for line in (b"", b"{}", b"[]", b"what"):
        with pytest.raises(OperatorFault, match="not by hand"):
            SeedHandover.receive(io.BytesIO(line))


def test_a_seed_whose_parent_has_gone_ends(
    handover: SeedHandover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_PR_SET_PDEATHSIG", -1)
    orphan = replace(handover, parent_pid=os.getpid())
    with pytest.raises(OperatorFault, match="coordinator has ended"):
        SeedHandover.receive(io.BytesIO(json.dumps(asdict(orphan)).encode()))
    child = replace(handover, parent_pid=os.getppid())
    assert SeedHandover.receive(io.BytesIO(json.dumps(asdict(child)).encode())) == child
