"""The rivals of `echo2d bench broadcast`, on loopback and with few bytes."""

import hashlib
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from echo2d.demo.processes import Program, Programs
from echo2d.errors import Fault, OperatorFault
from echo2d_lab.bench.broadcast.baselines import (
    LIBTORRENT,
    RIVALS,
    Rival,
    RivalPrograms,
    RivalRound,
    check_rivals,
)
from echo2d_lab.bench.broadcast.rivals.http_tree import (
    PART_BYTES,
    HttpTree,
    Source,
    part_range,
    relay_numbers,
)
from echo2d_lab.bench.broadcast.rivals.node import RivalNode, RivalOffer
from echo2d_lab.bench.lab.cpu import CpuShares
from echo2d_lab.bench.lab.netlab import CACHE

PEERS = 4
VERSION_BYTES = 12 * PART_BYTES + 5  # 13 parts over HTTP, the last of five bytes
LIMIT_S = 60.0
# Each node has a loopback address of its own, and each process that runs tests has other ones. aria2c listens on all.
ADDRESSES = [
    f"127.{1 + os.getpid() // 250 % 200}.{os.getpid() % 250}.{number}"
    for number in range(1, PEERS + 2)
]
PORT = 10_000 + 16 * os.getpid() % 20_000
IDLE = CpuShares(0.0, 0.0, 0.0)


@contextmanager
def programs_of(rival: str, directory: Path) -> Iterator[RivalPrograms]:
    def start(_: int, name: str, python: str, arguments: Sequence[str]) -> None:
        log = directory / "logs" / f"{name}.log"
        programs._running.append(Program(name, [python, *arguments], log))

    with (
        Programs(directory / "logs") as programs,
        RivalPrograms(
            rival,
            ADDRESSES,
            [1e7] * len(ADDRESSES),
            directory / "files",
            port=PORT,
            start=start,
            check=programs.check,
        ) as found,
    ):
        yield found


def why_not(rival: str) -> str | None:
    """The two that are not Python of ours are measured where they are installed."""
    if rival == "aria2" and shutil.which("aria2c") is None:
        return "there is no aria2c"
    if rival.startswith("libtorrent") and not (CACHE / LIBTORRENT.replace("==", "-")).exists():
        return "no measurement has installed libtorrent"
    return None


@pytest.mark.parametrize("rival", RIVALS)
def test_the_programs_of_a_rival_spread_one_version_after_another(
    tmp_path: Path, rival: str
) -> None:
    if (reason := why_not(rival)) is not None:
        pytest.skip(reason)
    chance = np.random.default_rng(0)
    with programs_of(rival, tmp_path) as programs:
        for version in range(3):
            content = chance.bytes(VERSION_BYTES)
            offer = programs.prepare(content)
            assert (offer.version, offer.warm) == (version, version > 0)
            assert 0 < programs.fetch(offer, LIMIT_S) < LIMIT_S
            found = (tmp_path / "files").glob("*/v*")
            files = [file for file in found if not file.suffix]  # aria2c has notes beside its own
            assert [file.name for file in files] == [f"v{version}"] * (PEERS + 1)
            assert all(file.read_bytes() == content for file in files)


def test_wrong_bytes_of_a_rival_are_noticed(tmp_path: Path) -> None:
    with programs_of("star", tmp_path) as programs:
        offer = programs.prepare(bytes(VERSION_BYTES))
        next((tmp_path / "files").glob("*/v0")).write_bytes(b"\x01" * VERSION_BYTES)
        with pytest.raises(Fault, match="star has delivered other bytes"):
            programs.fetch(offer, LIMIT_S)


def test_a_rivals_program_that_ends_early_is_named(tmp_path: Path) -> None:
    with (
        socket.create_server((ADDRESSES[0], PORT)),
        pytest.raises(Fault, match=r"star-0 ended with 1; .*\n(.*\n)*.*in use"),
        programs_of("star", tmp_path),
    ):
        pass


def test_the_fastest_peers_are_relays_and_their_number_is_the_quickest() -> None:
    """Two relays with equal uplinks take 2 copies of the origin and send 3 each; three take 3, and end together."""
    assert relay_numbers([1.0] * 9) == (1, 2, 3)
    assert relay_numbers([4.0, *[1.0] * 8]) == (1, 2, 3, 4)
    assert relay_numbers([1.0, 1.0, 9.0, 1.0, 0.0]) == (2,)
    assert relay_numbers([1.0, 0.0, 0.0]) == (1,)


def test_the_parts_of_a_version_cover_it() -> None:
    assert [part_range(part, 2 * PART_BYTES + 1) for part in range(3)] == [
        (0, PART_BYTES),
        (PART_BYTES, 2 * PART_BYTES),
        (2 * PART_BYTES, 2 * PART_BYTES + 1),
    ]


def test_a_relay_is_drawn_by_its_rate_and_less_when_it_fails() -> None:
    fast, slow, new = Source("fast"), Source("slow"), Source("new")
    fast.note(20.0)
    slow.note(10.0)
    assert [each.weight(20.0) for each in (fast, slow, new)] == [20.0, 10.0, 20.0]
    fast.note(30.0)
    assert fast.weight(20.0) == pytest.approx(23.0)
    slow.note(None)
    assert slow.weight(20.0) == pytest.approx(7.0)
    slow.heal()
    assert slow.weight(20.0) == pytest.approx(7.1)


class FirstThenSecond:
    """Draws the first relay four times, and then the second, instead of by chance."""

    def __init__(self) -> None:
        self.drawn: list[Source] = []

    def choices(self, sources: Sequence[Source], _: Sequence[float]) -> list[Source]:
        self.drawn.append(sources[min(len(self.drawn) // 4, 1)])
        return self.drawn[-1:]


@pytest.mark.may_block
def test_a_spoiled_part_comes_from_another_relay(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(VERSION_BYTES)
    offer = RivalOffer(0, VERSION_BYTES, hashlib.sha256(content).hexdigest(), warm=False)
    uplinks = (9.0, 1.0, 1.0, 0.0)
    assert relay_numbers(uplinks) == (1, 2)
    with ExitStack() as cleanup:
        trees = []
        for number in range(len(uplinks)):
            addresses = tuple(ADDRESSES[: len(uplinks)])
            node = RivalNode(number, addresses, uplinks, PORT, str(tmp_path), "", "relay-tree")
            node.folder.mkdir()
            trees.append(HttpTree(node))
            cleanup.callback(trees[-1].close)
        origin, spoiled, relay, client = trees
        (tmp_path / ADDRESSES[0] / "v0").write_bytes(content)
        for tree in (origin, spoiled, relay, client):
            tree.prepare(offer)
        spoiled.fetch(offer)
        relay.fetch(offer)
        (tmp_path / ADDRESSES[1] / "v0").write_bytes(bytes(VERSION_BYTES))
        client._random = draws = FirstThenSecond()  # type: ignore[assignment]
        client.fetch(offer)
    assert (tmp_path / ADDRESSES[3] / "v0").read_bytes() == content
    assert [source.address for source in draws.drawn] == [ADDRESSES[1]] * 4 + [ADDRESSES[2]] * 13


def test_warm_rounds_are_compared_with_warm_ones_and_cold_with_cold_ones() -> None:
    rounds = [
        RivalRound("cold", 30.0, 3.0, IDLE),
        *(RivalRound("warm", seconds, 2.0, IDLE) for seconds in (14.0, 18.0, 16.0)),
    ]
    found = Rival.of(rounds, bound_s=4.0, cold_bound_s=5.0, ours_s=8.0, ours_cold_s=10.0)
    assert (found.median_s, found.min_s, found.max_s, found.cold_s) == (16.0, 14.0, 18.0, 30.0)
    assert (found.ratio, found.over_ours) == (4.0, 2.0)
    assert (found.ratio_cold, found.over_ours_cold) == (6.0, 3.0)
    assert found.seed_copies == 2.0
    assert [each.kind for each in found.rounds] == ["cold", "warm", "warm", "warm"]


@pytest.mark.parametrize("names", [("rsync",), ("star", "star"), ("libtorrent:fast",), ("star:x",)])
def test_a_rival_that_cannot_be_measured_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(OperatorFault, match="--against: expected some of star, libtorrent"):
        check_rivals(names)
