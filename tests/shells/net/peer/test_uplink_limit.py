"""All links of a peer together: the owner's limit, and the rate of the uplink, on a clock of the test."""

import asyncio
from collections.abc import Callable

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.uplink_pace import BURST_S, DRAIN, HEADERS, LOOK_S
from echo2d.net.peer.tcp_info import TcpInfo
from echo2d.net.peer.uplink_limit import IN_FLIGHT_MIN, UplinkLimit

A, B = PeerId("a"), PeerId("b")
MB = 1_000_000
TRIP_S = 0.04
FRAME = 64 << 10


class Clock:
    """The time of the running loop, which goes on only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)

    async def go_on(self, seconds: float) -> None:
        """Time passes, and what was due is done."""
        self.now += seconds
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def info(sent: float, again: float, trip_s: float, in_flight: int = 100) -> TcpInfo:
    return TcpInfo(round(sent), round(again), round(sent - again), in_flight, trip_s, TRIP_S)


class Links:
    """Two links over one uplink: what the kernel says of them, and a limit over both."""

    def __init__(self, clock: Clock, most: float | None) -> None:
        self.clock, self.infos = clock, [info(0, 0, TRIP_S)]
        self.allowed: list[PeerId] = []
        self.limit = UplinkLimit(most, lambda: self.infos, self.allowed.append)

    async def send(self, seconds: float, make: Callable[[float], list[TcpInfo]]) -> None:
        """make: what the kernel says after so many seconds of this."""
        for look in range(1, round(seconds / LOOK_S) + 1):
            await self.clock.go_on(1.01 * LOOK_S)
            self.infos = make(look * 1.01 * LOOK_S)
            self.limit.sent(0)

    async def rate(self) -> float:
        """Bytes/s on the line that frames may take from now on."""
        await self.clock.go_on(100.0)
        assert self.limit.may_send(A)
        began, sent = self.clock.now, 0
        while self.clock.now < began + 10.0:
            while self.limit.may_send(A):
                self.limit.sent(FRAME)
                sent += FRAME
            await self.clock.go_on(0.01)
        return HEADERS * sent / 10.0


def one_lossy(seconds: float) -> list[TcpInfo]:
    """10 MB/s, a tenth of it sent again, and a queue on the way."""
    return [info(10 * MB * seconds, MB * seconds, 2 * TRIP_S)]


async def test_no_link_waits_without_a_limit(clock: Clock) -> None:
    links = Links(clock, None)
    for _ in range(100):
        links.limit.sent(FRAME)
        assert links.limit.may_send(A)


async def test_all_links_together_keep_the_owners_limit(clock: Clock) -> None:
    assert await Links(clock, 2 * MB).rate() == pytest.approx(2 * MB, rel=0.05)


async def test_waiting_links_are_allowed_in_turn_as_soon_as_there_is_room(clock: Clock) -> None:
    links = Links(clock, MB)
    links.limit.sent(2 * FRAME)
    assert not links.limit.may_send(B)
    assert not links.limit.may_send(A)
    await clock.go_on(HEADERS * 2 * FRAME / MB - 2 * BURST_S)
    assert links.allowed == []
    await clock.go_on(2 * BURST_S)
    assert links.allowed == [B, A]


async def test_an_uplink_with_losses_is_limited_to_its_acknowledged_rate(clock: Clock) -> None:
    links = Links(clock, None)
    await links.send(0.5, one_lossy)
    assert await links.rate() == pytest.approx(HEADERS * 9 * MB, rel=0.05)


async def test_the_owners_limit_is_kept_whatever_the_uplink_carries(clock: Clock) -> None:
    links = Links(clock, 2 * MB)
    await links.send(0.5, one_lossy)
    assert await links.rate() == pytest.approx(2 * MB, rel=0.05)


async def test_an_owners_limit_above_the_uplinks_rate_does_not_overfill_it(
    clock: Clock,
) -> None:
    links = Links(clock, 100 * MB)
    await links.send(0.5, one_lossy)
    assert await links.rate() == pytest.approx(HEADERS * 9 * MB, rel=0.05)


async def test_a_queue_on_one_link_alone_is_not_a_queue_of_the_uplink(clock: Clock) -> None:
    links = Links(clock, None)
    await links.send(0.5, lambda s: [*one_lossy(s), info(MB * s, 0, TRIP_S)])
    assert links.limit.may_send(A)
    assert links.limit._pace.bytes_per_s is None


async def test_a_link_with_little_in_flight_says_nothing_of_the_queue(clock: Clock) -> None:
    links = Links(clock, None)
    await links.send(
        0.5, lambda s: [*one_lossy(s), info(1000 * s, 0, TRIP_S, in_flight=IN_FLIGHT_MIN - 1)]
    )
    assert links.limit._pace.bytes_per_s == pytest.approx(DRAIN * 9 * MB, rel=0.05)


async def test_no_limit_is_found_without_links(clock: Clock) -> None:
    links = Links(clock, None)
    await links.send(0.5, lambda _: [])
    assert links.limit._pace.bytes_per_s is None
