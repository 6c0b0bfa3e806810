"""A laboratory of real sockets: each peer of a scenario has a network namespace of its own, with the scenario's link.

    with Lab(scenario.peers, directory) as lab:          # needs root, /dev/net/tun and a C compiler
        programs = lab.programs(directory / "logs")
        with lab.inside(0):                              # this thread's sockets, and processes it starts, are there
            programs.start("coordinator", "-m", "echo2d", ...)
        lab.set_link(3, replace(scenario.peers[3], uplink=5 * MBIT))
        lab.isolate(3)

Node i is peers[i], at `address(i)`. Links are made by `link_emulator.c`, a process between the TUN devices of all
nodes: rate and queue of both directions of an access link, loss on the way in, delay per pair, partitions. A peer that
is not reachable takes no TCP connection from others, as behind NAT.

Nothing has to be cleaned up: namespaces have no name and disappear with the last process in them; the emulator ends
when its stdin is closed, and programs end with their parent, however that ends. Not here: what runs in the laboratory
(`broadcast/run`), and any decision.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Self

from echo2d.demo.processes import Program, Programs
from echo2d.errors import Fault, OperatorFault
from echo2d.plan.kernel.scenario import PeerSpec

NODES_MAX = 256  # size of the emulator's tables; one machine can run about 64 Python daemons
QUEUE_S = 0.05  # a queue in front of an access link holds this many seconds of traffic
NETWORK = IPv4Address("10.77.0.1")  # the address of node 0; all nodes are in one /16
SOURCE = Path(__file__).with_name("link_emulator.c")
CACHE = Path.home() / ".cache" / "echo2d"
TUN = Path("/dev/net/tun")
STOP_S = 2.0

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFTXQLEN = 0x8914, 0x8916, 0x891C, 0x8943
IFF_UP, IFF_RUNNING = 0x1, 0x40
# A long queue between kernel and emulator, so that only the emulated queues drop packets.
TUN_PACKETS_MAX = 10_000
HERE = Path("/proc/thread-self/ns/net")
# TCP hands over this much at once: 64 KiB >> (round trip in us >> this), and at least 1 ms at its rate. The kernel's 9
# makes bursts of only two segments on slow links. That is three times as many packets, and two cores could emulate less
# than half of them.
BURSTS, BURST_RTT_LOG = Path("/proc/sys/net/ipv4/tcp_tso_rtt_log"), 15


def why_not() -> str | None:
    """Why this machine cannot have a laboratory, in one line; None: it can."""
    if not sys.platform.startswith("linux"):
        return "the laboratory needs Linux: network namespaces"
    if os.geteuid() != 0:
        return "the laboratory needs root: network namespaces"
    if not TUN.exists():
        return f"the laboratory needs {TUN}, which is not there"
    if shutil.which("cc") is None:
        return "the laboratory needs a C compiler, cc, for its link emulator"
    try:
        with _namespace() as node:
            os.close(_tun_device(node))
    except OSError as error:
        return f"the laboratory needs network namespaces with TUN devices: {error.strerror}"
    return None


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """The traffic of one direction of an access link. link_bytes: with Ethernet, IP and TCP headers.

    payload_bytes: without headers. dropped: packets for which the queue had no room.
    """

    packets: int
    link_bytes: int
    payload_bytes: int
    dropped: int


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """lost: packets to this node that were lost at random."""

    up: LinkCounts
    down: LinkCounts
    lost: int


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """Counts since the start. late_s_max: the most by which a packet was late since the last count, because the
    machine was busy.

    realtime: whether the emulator has priority over ordinary processes.
    """

    nodes: tuple[NodeCounts, ...]
    late_s_max: float
    cpu_s: float
    realtime: bool


class Lab:
    """See the module docstring."""

    def __init__(
        self, peers: Sequence[PeerSpec], directory: Path, *, queue_s: float = QUEUE_S
    ) -> None:
        reason = why_not()
        if reason is not None:
            raise OperatorFault(reason)
        if len(peers) > NODES_MAX:
            raise OperatorFault(f"a laboratory has at most {NODES_MAX} peers; found {len(peers)}")
        self._specs = list(peers)
        self._directory = directory
        self._queue_s = queue_s
        self._cleanup = ExitStack()
        self._namespaces: list[int] = []

    def __enter__(self) -> Self:
        self._program = build_emulator()
        with ExitStack() as cleanup:
            devices = [self._make_node(cleanup) for _ in self._specs]
            self._start_emulator(cleanup, devices)
            for node, spec in enumerate(self._specs):
                self.set_link(node, spec)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    # --- nodes

    @staticmethod
    def address(node: int) -> str:
        return str(NETWORK + node)

    @contextmanager
    def inside(self, node: int) -> Iterator[None]:
        """Move this thread into the node's network, with the sockets that it makes and the threads and processes that
        it starts. Do not use it across awaits.
        """
        with _entered(self._namespaces[node]):
            yield

    def programs(self, logs: Path) -> "LabPrograms":
        """Programs that end with this process. The main thread must start them, `inside` a node."""
        return LabPrograms(logs, [str(self._program), "exec", str(os.getpid())])

    @property
    def emulator_pid(self) -> int:
        return self._emulator.pid

    # --- links, changed while they are used

    def set_link(self, node: int, spec: PeerSpec) -> None:
        """Change the node's access link from now on."""
        self._specs[node] = spec
        numbers = (spec.uplink, spec.downlink, self._queue_s, spec.loss, spec.latency_s)
        self._order("node", node, *numbers, int(not spec.reachable))

    def set_delay(self, one: int, other: int, seconds: float | None) -> None:
        """Set the one-way delay between two nodes, in both directions; None: the sum of their latencies again."""
        for pair in ((one, other), (other, one)):
            self._order("delay", *pair, -1 if seconds is None else seconds)

    def cut(self, one: int, other: int, *, on: bool = True) -> None:
        """Silently drop everything between two nodes, or end that."""
        for pair in ((one, other), (other, one)):
            self._order("cut", *pair, int(on))

    def isolate(self, node: int, *, on: bool = True) -> None:
        """Partition the node from all others, or end that."""
        for other in range(len(self._specs)):
            if other != node:
                self.cut(node, other, on=on)

    def counts(self) -> TrafficCounts:
        answer = json.loads(self._ask("stats"))
        return TrafficCounts(
            nodes=tuple(
                NodeCounts(_link(one["up"]), _link(one["down"]), one["lost"])
                for one in answer["nodes"]
            ),
            late_s_max=answer["late_s_max"],
            cpu_s=answer["cpu_s"],
            realtime=answer["realtime"],
        )

    # --- inside

    def _make_node(self, cleanup: ExitStack) -> int:
        """Make a node: a new namespace with a TUN device and its address."""
        node = cleanup.enter_context(_namespace())
        device = _tun_device(node)
        cleanup.callback(os.close, device)
        with _entered(node), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            _configure(control, "tun0", self.address(len(self._namespaces)))
            _interface(control, SIOCSIFFLAGS, "lo", struct.pack("H", IFF_UP | IFF_RUNNING))
        self._namespaces.append(node)
        return device

    def _start_emulator(self, cleanup: ExitStack, devices: list[int]) -> None:
        log = cleanup.enter_context((self._directory / "link_emulator.log").open("ab"))
        self._emulator = subprocess.Popen(
            [self._program, "emulate", *map(str, devices)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            pass_fds=devices,
            start_new_session=True,
        )
        cleanup.callback(_end, self._emulator)

    def _order(self, *words: object) -> None:
        answer = self._ask(" ".join(map(str, words)))
        assert answer == "ok", answer

    def _ask(self, line: str) -> str:
        assert self._emulator.stdin is not None
        assert self._emulator.stdout is not None
        try:
            self._emulator.stdin.write(line.encode() + b"\n")
            self._emulator.stdin.flush()
            answer = self._emulator.stdout.readline()
        except OSError:
            answer = b""
        if not answer:
            raise Fault(f"the link emulator has ended; see {self._directory / 'link_emulator.log'}")
        return answer.decode().rstrip("\n")


class LabPrograms(Programs):
    """Programs of a laboratory."""

    def __init__(self, logs: Path, prefix: Sequence[str]) -> None:
        super().__init__(logs)
        self._prefix = prefix

    def start(self, name: str, *arguments: str, python: str | None = None) -> Program:
        program = Program(
            name, [*self._prefix, python or sys.executable, *arguments], self._logs / f"{name}.log"
        )
        self._running.append(program)
        return program

    def kill(self, program: Program) -> None:
        """Kill the program and its child processes with SIGKILL; `stop` no longer waits for it."""
        self._running.remove(program)
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait(STOP_S)

    def kill_all(self) -> None:
        for program in list(self._running):
            self.kill(program)


def build_emulator() -> Path:
    """The emulator's program; it is compiled unless the same source was compiled before."""
    source = SOURCE.read_bytes()
    program = CACHE / f"link_emulator-{hashlib.blake2b(source, digest_size=8).hexdigest()}"
    if program.exists():
        return program
    CACHE.mkdir(parents=True, exist_ok=True)
    spare = program.with_name(f"{program.name}.{os.getpid()}")
    done = subprocess.run(
        ["cc", "-O2", "-o", spare, SOURCE], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise OperatorFault(f"cc cannot compile {SOURCE}: {done.stderr.strip().splitlines()[:1]}")
    spare.rename(program)
    return program


def _end(emulator: "subprocess.Popen[bytes]") -> None:
    assert emulator.stdin is not None
    assert emulator.stdout is not None
    with suppress(OSError):
        emulator.stdin.close()
    try:
        emulator.wait(STOP_S)
    except subprocess.TimeoutExpired:
        emulator.kill()
        emulator.wait()
    emulator.stdout.close()


def _link(facts: dict[str, Any]) -> LinkCounts:
    return LinkCounts(facts["packets"], facts["bytes"], facts["payload"], facts["dropped"])


# --- namespaces and devices ----------------------------------------


@contextmanager
def _namespace() -> Iterator[int]:
    """A new network namespace, as a file; it exists while a process is in it or holds the file open."""
    before = os.open(HERE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("unshare", CLONE_NEWNET)
        made = os.open(HERE, os.O_RDONLY | os.O_CLOEXEC)
        _call("setns", before, CLONE_NEWNET)
    finally:
        os.close(before)
    try:
        yield made
    finally:
        os.close(made)


@contextmanager
def _entered(namespace: int) -> Iterator[None]:
    before = os.open(HERE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", namespace, CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", before, CLONE_NEWNET)
    finally:
        os.close(before)


def _call(name: str, *arguments: int) -> None:
    function: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _tun_device(namespace: int) -> int:
    """Open tun0 of the namespace, with TCP in frames of up to 64 KiB."""
    with _entered(namespace):
        with suppress(FileNotFoundError):  # older kernels do not have it
            BURSTS.write_text(f"{BURST_RTT_LOG}\n")
        device = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(
                device,
                TUNSETIFF,
                struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR),
            )
            fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
        except OSError:
            os.close(device)
            raise
    return device


def _configure(control: socket.socket, name: str, address: str) -> None:
    _interface(control, SIOCSIFTXQLEN, name, struct.pack("i", TUN_PACKETS_MAX))
    _interface(control, SIOCSIFADDR, name, _address(address))
    _interface(control, SIOCSIFNETMASK, name, _address("255.255.0.0"))
    _interface(control, SIOCSIFFLAGS, name, struct.pack("H", IFF_UP | IFF_RUNNING))


def _interface(control: socket.socket, request: int, name: str, value: bytes) -> None:
    fcntl.ioctl(control, request, struct.pack("16s24s", name.encode(), value))


def _address(dotted: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(dotted))
