"""The emulator's links have the rates, delays and losses that were set. Times of arrival are the kernel's, so a busy
machine delays the test, but does not change its figures.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from echo2d.errors import OperatorFault
from echo2d.plan.kernel.scenario import MBIT, PeerSpec
from echo2d_lab.bench.lab.netlab import Lab, LinkCounts, why_not
from tests.support.lab import MakeLab

PORT = 5000
PAYLOAD = 1400
ON_WIRE = PAYLOAD + 8 + 20 + 14  # UDP, IP, Ethernet
LARGE = 60_000  # sent as fragments: the sender is not the bottleneck
QUIET_S = 0.5
SO_TIMESTAMPNS, SO_RCVBUFFORCE = 35, 33  # Linux
FAST = PeerSpec(uplink=1000 * MBIT, downlink=1000 * MBIT, latency_s=0.0)
LATE_S = 0.02  # a busy machine


def receiver(lab: Lab, node: int) -> socket.socket:
    with lab.inside(node):
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    made.bind((lab.address(node), PORT))
    made.settimeout(QUIET_S)
    return made


def sender(lab: Lab, node: int) -> socket.socket:
    with lab.inside(node):
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def arrivals(at: socket.socket) -> Iterator[tuple[bytes, float]]:
    """Datagrams and when they came (real time), until nothing comes any more."""
    while True:
        try:
            data, (control, *_), _, _ = at.recvmsg(65536, 64)
        except TimeoutError:
            return
        seconds, nanoseconds = struct.unpack("qq", control[2])
        yield data, seconds + nanoseconds * 1e-9


def flood(
    lab: Lab, packets: int, senders: tuple[int, ...] = (0,), end: int = 1, size: int = PAYLOAD
) -> list[float]:
    """From each sender to `end`, as fast as they can be sent: when those that arrived have come."""
    with ExitStack() as cleanup:
        at = cleanup.enter_context(receiver(lab, end))
        by = [cleanup.enter_context(sender(lab, start)) for start in senders]
        with urgent():
            for _ in range(packets):
                for one in by:
                    one.sendto(bytes(size), (lab.address(end), PORT))
        return [when for _, when in arrivals(at)]


@contextmanager
def urgent() -> Iterator[None]:
    """Before the other processes of a busy machine: a link is only filled by a sender that is faster."""
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def rate_of(lab: Lab, datagrams: int, senders: tuple[int, ...] = (0,)) -> float:
    """Bytes/s on the wire with which large datagrams arrive at node 1, none of them lost; by the median time that four
    take: a busy emulator hands over two at once.
    """
    before = lab.counts().nodes[1].down
    times = flood(lab, datagrams, senders, size=LARGE)
    after = lab.counts().nodes[1].down
    assert len(times) == datagrams * len(senders)
    assert after.dropped == 0
    return (
        (after.link_bytes - before.link_bytes)
        / len(times)
        / median((later - at) / 4 for at, later in zip(times, times[4:], strict=False))
    )


@pytest.mark.parametrize("mbit", [5.0, 100.0, 320.0])
def test_an_uplink_has_the_rate_that_was_set(make_lab: MakeLab, mbit: float) -> None:
    lab = make_lab(replace(FAST, uplink=mbit * MBIT), FAST, queue_s=10.0)
    assert rate_of(lab, 10 + int(mbit)) == pytest.approx(mbit * MBIT, rel=0.05)


def test_a_downlink_has_the_rate_that_was_set_and_changes_live(make_lab: MakeLab) -> None:
    lab = make_lab(FAST, replace(FAST, downlink=40 * MBIT), queue_s=10.0)
    assert rate_of(lab, 50) == pytest.approx(40 * MBIT, rel=0.05)
    lab.set_link(1, replace(FAST, downlink=20 * MBIT))
    assert rate_of(lab, 25) == pytest.approx(20 * MBIT, rel=0.05)


def test_two_senders_share_a_downlink(make_lab: MakeLab) -> None:
    lab = make_lab(FAST, replace(FAST, downlink=40 * MBIT), FAST, queue_s=10.0)
    assert rate_of(lab, 25, senders=(0, 2)) == pytest.approx(40 * MBIT, rel=0.05)


def test_the_emulator_counts_every_packet(make_lab: MakeLab) -> None:
    lab = make_lab(FAST, FAST)
    assert len(flood(lab, 10)) == 10
    zero, one = lab.counts().nodes
    assert zero.up == one.down == LinkCounts(10, 10 * ON_WIRE, 10 * (PAYLOAD + 8), 0)
    assert zero.down == one.up == LinkCounts(0, 0, 0, 0)


def delay_s(lab: Lab, start: int, end: int) -> float:
    """The shortest of some."""
    with receiver(lab, end) as at, sender(lab, start) as by:
        sent = []
        for _ in range(10):
            sent.append(time.time())
            by.sendto(b"x", (lab.address(end), PORT))
            time.sleep(0.005)
        came = [when for _, when in arrivals(at)]
    return min(there - here for here, there in zip(sent, came, strict=True))


def test_each_pair_has_the_delay_that_was_set(make_lab: MakeLab) -> None:
    lab = make_lab(replace(FAST, latency_s=0.03), replace(FAST, latency_s=0.05), FAST)
    assert 0.08 <= delay_s(lab, 0, 1) < 0.08 + LATE_S
    assert 0.03 <= delay_s(lab, 2, 0) < 0.03 + LATE_S
    lab.set_delay(0, 1, 0.2)
    assert 0.2 <= delay_s(lab, 1, 0) < 0.2 + LATE_S
    assert 0.03 <= delay_s(lab, 2, 0) < 0.03 + LATE_S
    lab.set_delay(0, 1, None)
    assert 0.08 <= delay_s(lab, 0, 1) < 0.08 + LATE_S


def test_loss_happens_at_the_receiver(make_lab: MakeLab) -> None:
    lab = make_lab(FAST, replace(FAST, loss=0.1), queue_s=10.0)
    got = len(flood(lab, 5000))
    assert 500 - 5 * 21 < 5000 - got < 500 + 5 * 21  # five times the standard deviation
    assert lab.counts().nodes[1].lost == 5000 - got
    assert len(flood(lab, 100, (1,), 0)) == 100


def test_a_queue_holds_what_fits_its_time_and_drops_the_rest(make_lab: MakeLab) -> None:
    rate, queue_s, packets = 10 * MBIT, 0.05, 300
    lab = make_lab(replace(FAST, uplink=rate), FAST, queue_s=queue_s)
    started_at = time.time()
    times = flood(lab, packets)
    most = queue_s * rate / ON_WIRE
    burst_s = times[-1] - started_at
    assert int(most) <= len(times) <= rate * burst_s / ON_WIRE + 1
    assert lab.counts().nodes[0].up.dropped == packets - len(times)


def test_a_partition_drops_every_packet_until_it_heals(make_lab: MakeLab) -> None:
    lab = make_lab(FAST, FAST, FAST)
    with receiver(lab, 1) as at, sender(lab, 0) as zero, sender(lab, 2) as two:
        lab.cut(0, 1)
        zero.sendto(b"lost", (lab.address(1), PORT))
        two.sendto(b"two", (lab.address(1), PORT))
        assert [data for data, _ in arrivals(at)] == [b"two"]
        lab.cut(0, 1, on=False)
        lab.isolate(2)
        two.sendto(b"lost", (lab.address(1), PORT))
        zero.sendto(b"zero", (lab.address(1), PORT))
        assert [data for data, _ in arrivals(at)] == [b"zero"]
        lab.isolate(2, on=False)
        two.sendto(b"back", (lab.address(1), PORT))
        assert [data for data, _ in arrivals(at)] == [b"back"]


@contextmanager
def sink(lab: Lab, node: int) -> Iterator[tuple[threading.Thread, bytearray]]:
    """Takes in one TCP connection until its end."""
    with lab.inside(node):
        server = socket.create_server((lab.address(node), PORT))
    taken = bytearray()

    def take() -> None:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(1 << 20):
                taken.extend(data)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    with server:
        yield thread, taken


def dial(lab: Lab, start: int, end: int, timeout_s: float = 30.0) -> socket.socket:
    with lab.inside(start):
        return socket.create_connection((lab.address(end), PORT), timeout=timeout_s)


@pytest.mark.parametrize("loss", [0.0, 0.02])
def test_a_tcp_stream_arrives_whole(make_lab: MakeLab, loss: float) -> None:
    """Large frames are cut where a segment is lost, and where a queue is full."""
    spec = PeerSpec(uplink=80 * MBIT, downlink=80 * MBIT, latency_s=0.005, loss=loss)
    lab = make_lab(spec, spec)
    sent = os.urandom(2 << 20)
    with sink(lab, 1) as (thread, taken), dial(lab, 0, 1) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        thread.join(30)
        assert taken == sent
    node = lab.counts().nodes[1]
    assert (node.lost > 0) == (loss > 0)
    assert node.down.payload_bytes >= len(sent)


def test_no_peer_dials_in_behind_nat(make_lab: MakeLab) -> None:
    lab = make_lab(FAST, replace(FAST, reachable=False))
    with sink(lab, 1), pytest.raises(TimeoutError):
        dial(lab, 0, 1, timeout_s=0.5)
    with sink(lab, 0) as (thread, taken), dial(lab, 1, 0) as connection:
        connection.sendall(b"out it goes")
        connection.shutdown(socket.SHUT_WR)
        thread.join(10)
        assert taken == b"out it goes"


HELD = """
import sys, time
from pathlib import Path
from echo2d_lab.bench.lab.netlab import Lab
from echo2d.plan.kernel.scenario import PeerSpec
with Lab([PeerSpec()] * 2, Path(sys.argv[1])) as lab:
    with lab.inside(1):
        program = lab.programs(Path(sys.argv[1])).start("sleeper", "-c", "import time; time.sleep(600)")
    print(program.pid, lab.emulator_pid, flush=True)
    time.sleep(600)
"""


def test_a_killed_laboratory_leaves_nothing_behind(tmp_path: Path) -> None:
    if why_not() is not None:
        pytest.skip(str(why_not()))
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert len(pids) == 2
        holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/ns/net").exists() and is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_laboratory_says_that_it_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "the laboratory needs root: network namespaces"


def test_the_laboratory_says_why_it_cannot_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    reason = why_not()
    assert reason is not None
    assert "needs" in reason
    with pytest.raises(OperatorFault, match="laboratory needs"):
        Lab([PeerSpec()] * 2, tmp_path)
