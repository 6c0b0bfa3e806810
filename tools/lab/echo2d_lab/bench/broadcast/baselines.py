"""What people would use instead, on the same links and as many bytes: a plain download by everybody, or BitTorrent.

Every round is cold: programs start, say that they are ready, and begin together. A peer is done when it holds all
bytes, verified; that they are the right ones is checked here.
"""

import hashlib
import shutil
import subprocess
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from echo2d.demo.processes import Programs
from echo2d.errors import Fault, OperatorFault
from echo2d.plan.kernel.scenario import Scenario
from echo2d_lab.bench.lab.cpu import CpuMeter, CpuShares
from echo2d_lab.bench.lab.netlab import CACHE, Lab

RIVALS = ("star", "libtorrent", "aria2")
LIBTORRENT = "libtorrent==2.1.1"
START_S = 60.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RivalRound:
    """One version's bytes. seconds: from the start until the last peer was done; seed_copies, cpu: as of `Round`."""

    seconds: float
    seed_copies: float
    cpu: CpuShares


@dataclass(frozen=True, slots=True)
class Rival:
    """How one of them did, as of `RivalRound`."""

    median_s: float
    min_s: float
    max_s: float
    ratio: float
    seed_copies: float
    cpu: CpuShares

    @staticmethod
    def of(rounds: Sequence[RivalRound], bound_s: float) -> "Rival":
        times = [each.seconds for each in rounds]
        return Rival(
            median(times),
            min(times),
            max(times),
            median(times) / bound_s,
            median(each.seed_copies for each in rounds),
            CpuShares.of([each.cpu for each in rounds]),
        )


def interpreter_of(rival: str) -> str | None:
    """The Python that runs it: None for this one. OperatorFault: it cannot be had."""
    if rival == "aria2" and shutil.which("aria2c") is None:
        raise OperatorFault("--against aria2: there is no aria2c (Debian: apt-get install aria2)")
    if rival != "libtorrent":
        return None
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


def rival_round(
    rival: str, lab: Lab, scenario: Scenario, run: Path, *, limit_s: float
) -> RivalRound:
    """One version's bytes by these means."""
    signals = run / "against"
    shutil.rmtree(signals, ignore_errors=True)
    signals.mkdir()
    content = np.random.default_rng(scenario.rng_seed).bytes(scenario.wire_bytes)
    digest = hashlib.sha256(content).hexdigest()
    (signals / "sha256").write_text(digest)
    addresses = [lab.address(node) for node in range(len(scenario.peers))]
    script = str(Path(__file__).with_name(f"{rival}.py"))
    python = interpreter_of(rival)
    with lab.programs(run / "logs") as programs:
        for node, address in enumerate(addresses):
            file = signals / address / "version"
            file.parent.mkdir()
            if node == 0:
                file.write_bytes(content)
            role = "peer" if node else "seed"
            with lab.inside(node):
                # Not beside the script: it may have the name of what it imports.
                programs.start(
                    f"{rival}-{node}",
                    "-P",
                    script,
                    role,
                    address,
                    str(signals),
                    str(file),
                    *addresses,
                    python=python,
                )
        _wait(programs, signals, "ready", len(addresses), START_S)
        before, meter = lab.counts().nodes[0].up.link_bytes, CpuMeter(lab, programs)
        began_at = time.monotonic()
        (signals / "go").touch()
        _wait(programs, signals, "done", len(addresses) - 1, limit_s)
        cpu = meter.shares()
        copies = (lab.counts().nodes[0].up.link_bytes - before) / scenario.wire_bytes
        programs.kill_all()
    ends = [path.read_text().split() for path in signals.glob("*.done")]
    if any(found != digest for _, found in ends):
        raise Fault(f"{rival} has delivered other bytes than were given")
    shutil.rmtree(signals)
    return RivalRound(max(float(at) for at, _ in ends) - began_at, copies, cpu)


def _wait(programs: Programs, signals: Path, suffix: str, count: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while len(list(signals.glob(f"*.{suffix}"))) < count:
        programs.check()
        if time.monotonic() > deadline:
            raise Fault(
                f"{suffix} after {limit_s:.0f} s: {len(list(signals.glob(f'*.{suffix}')))} of {count}"
            )
        time.sleep(POLL_S)
