"""Measures the rivals of echo2d's broadcast, on the same links and with the same number of bytes.

Each rival has the same rounds as echo2d: a cold one, those that warm up, warm ones (`kinds`). Its programs (`rivals`)
start before its cold round and run until the end. Preparations before the clock starts cost the rival no time: the
torrent is made and given to every peer, checksums are computed. A peer is done when it holds all bytes and has verified
them. This module checks that they are the right bytes.
"""

import hashlib
import json
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np

from echo2d.errors import Fault, OperatorFault
from echo2d.plan.kernel.scenario import Scenario
from echo2d_lab.bench.broadcast.kinds import RoundKind
from echo2d_lab.bench.broadcast.rivals.libtorrent_settings import BEST, TRIED
from echo2d_lab.bench.broadcast.rivals.node import RivalNode, RivalOffer
from echo2d_lab.bench.lab.cpu import CpuMeter, CpuShares
from echo2d_lab.bench.lab.netlab import CACHE, Lab

RIVALS = ("star", "libtorrent", "aria2", "relay-tree", "object-store")
# The module of a rival, if it does not have the rival's name.
MODULES = {"relay-tree": "http_tree", "object-store": "http_tree"}
PROGRAMS = "echo2d_lab.bench.broadcast.rivals"
LIBTORRENT = "libtorrent==2.1.1"
PORT, PORTS = 7900, 200  # the first port of the first rival; ports of one rival
START_S = 60.0
LOOK_S = 0.5  # seconds between two checks whether a program has ended
ROOM = Path(__file__).parents[3]  # the folder of echo2d_lab
# A program is started as a module and not by its path, because it may have the name of a module that it imports. It
# may run in a Python without echo2d_lab.
BOOT = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_module(sys.argv[2], run_name='__main__')"


@dataclass(frozen=True, slots=True)
class RivalRound:
    """One version's bytes. seconds: from the start until the last peer was done. seed_copies, cpu: as in `Round`."""

    kind: RoundKind
    seconds: float
    seed_copies: float
    cpu: CpuShares


@dataclass(frozen=True, slots=True)
class Rival:
    """The result of one rival. Figures are medians over the warm rounds, or those of the cold one if there is no other.

    ratio, ratio_cold: time over the bound, as in `BroadcastResult`. over_ours, over_ours_cold: time over that of
    echo2d, warm over warm and cold over cold. rounds: those that count.
    """

    median_s: float
    min_s: float
    max_s: float
    cold_s: float
    ratio: float
    ratio_cold: float
    over_ours: float
    over_ours_cold: float
    seed_copies: float
    cpu: CpuShares
    rounds: tuple[RivalRound, ...]

    @staticmethod
    def of(
        rounds: Sequence[RivalRound],
        *,
        bound_s: float,
        cold_bound_s: float,
        ours_s: float,
        ours_cold_s: float,
    ) -> "Rival":
        """bound_s, cold_bound_s: bounds of the versions that echo2d has spread. ours_s, ours_cold_s: its T_verify."""
        cold_s = next(each.seconds for each in rounds if each.kind == "cold")
        warm = [each for each in rounds if each.kind == "warm"] or rounds
        times = [each.seconds for each in warm]
        return Rival(
            median_s=median(times),
            min_s=min(times),
            max_s=max(times),
            cold_s=cold_s,
            ratio=median(times) / bound_s,
            ratio_cold=cold_s / cold_bound_s,
            over_ours=median(times) / ours_s,
            over_ours_cold=cold_s / ours_cold_s,
            seed_copies=median(each.seed_copies for each in warm),
            cpu=CpuShares.of([each.cpu for each in warm]),
            rounds=tuple(rounds),
        )


def check_rivals(names: Sequence[str]) -> None:
    """OperatorFault: a rival is unknown, is named twice, or cannot be installed here."""
    known = {*RIVALS, *(f"libtorrent:{name}" for name in TRIED)}
    if not set(names) <= known or len(set(names)) < len(names):
        raise OperatorFault(
            f"--against: expected some of {', '.join(RIVALS)}, or libtorrent:SETTINGS with any of "
            f"{', '.join(TRIED)}, each once; found {', '.join(names)}"
        )


def interpreter_of(rival: str) -> str:
    """The Python that runs the rival. OperatorFault: the rival cannot be installed."""
    if rival == "aria2" and shutil.which("aria2c") is None:
        raise OperatorFault("--against aria2: there is no aria2c (Debian: apt-get install aria2)")
    if rival.partition(":")[0] != "libtorrent":
        return sys.executable
    environment = CACHE / LIBTORRENT.replace("==", "-")
    python = environment / "bin" / "python"
    if (
        subprocess.run([python, "-c", "import libtorrent"], check=False).returncode
        if python.exists()
        else True
    ):
        venv.create(environment, with_pip=True, clear=True)
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", LIBTORRENT], check=False, capture_output=True
        )
        if done.returncode != 0:
            raise OperatorFault(f"--against libtorrent: pip cannot install {LIBTORRENT}")
    return str(python)


class RivalPrograms:
    """The programs of one rival, one for each node, and the socket over which they get orders.

    start: starts a program with this name, interpreter and arguments at a node. check: raises a Fault if a program has
    ended.
    """

    def __init__(
        self,
        rival: str,
        addresses: Sequence[str],
        uplinks: Sequence[float],
        directory: Path,
        *,
        port: int,
        start: Callable[[int, str, str, Sequence[str]], object],
        check: Callable[[], None],
    ) -> None:
        self._rival, self._directory, self._start, self._check = rival, directory, start, check
        self._addresses, self._uplinks, self._port = tuple(addresses), tuple(uplinks), port
        self._cleanup = ExitStack()
        self._controls: list[socket.socket] = []
        self._versions = 0

    def __enter__(self) -> Self:
        with ExitStack() as cleanup:
            # A socket's path must be short, and that of the rival's directory may be long.
            room = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="echo2d-rival-"))
            server = cleanup.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(f"{room}/control")
            server.listen(len(self._addresses))
            python = interpreter_of(self._rival)
            for number in range(len(self._addresses)):
                self._start_program(number, python, f"{room}/control")
            self._controls = self._accept_all(server, cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def prepare(self, content: bytes) -> RivalOffer:
        """Do everything that may happen before the clock starts; the version before is dropped."""
        offer = RivalOffer(
            self._versions, len(content), hashlib.sha256(content).hexdigest(), self._versions > 0
        )
        self._versions += 1
        (self._directory / self._addresses[0] / f"v{offer.version}").write_bytes(content)
        self._order("prepare", offer, self._controls[:1])
        self._answers(self._controls[:1], START_S)
        self._order("prepare", offer, self._controls[1:])
        self._answers(self._controls[1:], START_S)
        return offer

    def fetch(self, offer: RivalOffer, limit_s: float) -> float:
        """Seconds until the last peer was done. Fault: it took too long, or a peer has got wrong bytes."""
        began_at = time.monotonic()
        self._order("go", offer, self._controls)
        ends = self._answers(self._controls[1:], limit_s)
        if any(each["sha256"] != offer.sha256 for each in ends):
            raise Fault(f"{self._rival} has delivered other bytes than were given")
        return float(max(each["at"] for each in ends)) - began_at

    def _start_program(self, number: int, python: str, control: str) -> None:
        name, _, settings = self._rival.partition(":")
        if name == "libtorrent":
            settings = settings or BEST
        elif name in MODULES:
            settings = name
        node = RivalNode(
            number,
            self._addresses,
            self._uplinks,
            self._port,
            str(self._directory),
            control,
            settings,
        )
        node.folder.mkdir(parents=True)
        module = f"{PROGRAMS}.{MODULES.get(name, name)}"
        arguments = ("-P", "-c", BOOT, str(ROOM), module, node.as_json())
        self._start(number, f"{self._rival}-{number}", python, arguments)

    def _accept_all(self, server: socket.socket, cleanup: ExitStack) -> list[socket.socket]:
        """The connection of each program, in the order of their numbers."""
        found: dict[int, socket.socket] = {}
        deadline = time.monotonic() + START_S
        server.settimeout(LOOK_S)
        while len(found) < len(self._addresses):
            self._check_until(deadline, f"{self._rival}: {len(found)} programs have started")
            try:
                control, _ = server.accept()
            except TimeoutError:
                continue
            cleanup.enter_context(control)
            [hello] = self._answers([control], START_S)
            found[hello["node"]] = control
        return [found[number] for number in sorted(found)]

    def _order(self, what: str, offer: RivalOffer, controls: Sequence[socket.socket]) -> None:
        line = json.dumps({"do": what, "offer": asdict(offer)}).encode() + b"\n"
        for control in controls:
            control.sendall(line)

    def _answers(self, controls: Sequence[socket.socket], limit_s: float) -> list[dict[str, Any]]:
        """The next line of each program."""
        waiting, lines = list(controls), dict[socket.socket, bytes]()
        deadline = time.monotonic() + limit_s
        while waiting:
            self._check_until(
                deadline,
                f"{self._rival}: {len(controls) - len(waiting)} of {len(controls)} are done",
            )
            for control in select.select(waiting, [], [], LOOK_S)[0]:
                lines[control] = lines.get(control, b"") + control.recv(1 << 16)
                if lines[control].endswith(b"\n"):
                    waiting.remove(control)
                elif not lines[control]:
                    time.sleep(LOOK_S)  # the program has ended, which the check reports
        return [json.loads(lines[control]) for control in controls]

    def _check_until(self, deadline: float, found: str) -> None:
        self._check()
        if time.monotonic() > deadline:
            raise Fault(f"{found} when its time was over; see the logs in --run-dir")


class RivalSwarm:
    """One rival in the laboratory. index: its place among the rivals of the measurement, which gives its ports."""

    def __init__(self, rival: str, index: int, lab: Lab, scenario: Scenario, run: Path) -> None:
        self._rival, self._lab, self._scenario = rival, lab, scenario
        self._programs = lab.programs(run / "logs")
        self._rival_programs = RivalPrograms(
            rival,
            [lab.address(node) for node in range(len(scenario.peers))],
            [spec.uplink if spec.reachable else 0.0 for spec in scenario.peers],
            run / "against" / rival.replace(":", "-"),
            port=PORT + index * PORTS,
            start=self._start,
            check=self._programs.check,
        )
        self._random = np.random.default_rng(scenario.rng_seed)

    def __enter__(self) -> Self:
        with ExitStack() as cleanup:
            cleanup.callback(self._programs.kill_all)
            cleanup.enter_context(self._rival_programs)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def round(self, kind: RoundKind, *, limit_s: float) -> RivalRound:
        offer = self._rival_programs.prepare(self._random.bytes(self._scenario.wire_bytes))
        before, meter = self._seed_bytes(), CpuMeter(self._lab, self._programs)
        seconds = self._rival_programs.fetch(offer, limit_s)
        cpu = meter.shares()
        copies = (self._seed_bytes() - before) / self._scenario.wire_bytes
        return RivalRound(kind, seconds, copies, cpu)

    def _seed_bytes(self) -> int:
        return self._lab.counts().nodes[0].up.link_bytes

    def _start(self, node: int, name: str, python: str, arguments: Sequence[str]) -> None:
        with self._lab.inside(node):
            self._programs.start(name, *arguments, python=python)
