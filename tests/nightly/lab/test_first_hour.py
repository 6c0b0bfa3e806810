"""A new user with two machines types the commands of README, and trains a first step.

Each machine is a network of its own, with a home and a clone of its own. Three things differ from a user's machines:
the addresses are those of the laboratory, `make setup` gets the environment of this test instead of installing one, and
`scp` copies between the two homes.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest

from echo2d.demo.processes import Program
from echo2d.plan.kernel.scenario import MBIT, PeerSpec
from echo2d_lab.bench.lab.netlab import Lab, LabPrograms
from tests.support.lab import MakeLab
from tests.support.paths import REPO
from tests.support.polling import START_S, poll
from tests.support.readme import BOX, CLONED, LEARNER_HOST, first_steps

pytestmark = [pytest.mark.timeout(900)]

HOST = PeerSpec(uplink=1000 * MBIT, downlink=1000 * MBIT, latency_s=0.0005)
DAEMONS = (" run ", " join ")  # words of commands that go on
SCP = '#!/bin/sh\nexec cp "$1" "$BOX/"\n'


class Keyboard:
    """A person who types at one machine."""

    def __init__(self, lab: Lab, node: int, home: Path, programs: LabPrograms) -> None:
        self._lab, self._node, self._home, self._programs = lab, node, home, programs
        self.folder = home
        self.typed = 0

    def type(self, line: str) -> Program:
        """The program that the line starts. It has ended well, unless it is one that goes on."""
        self.typed += 1
        for theirs, node in ((LEARNER_HOST, 0), (BOX, 1)):
            line = line.replace(theirs, self._lab.address(node))
        if line == "make setup":
            line = f"ln -s {shlex.quote(sys.prefix)} .venv"
        around = {
            "HOME": self._home,
            "BOX": self._home.parent / "box",
            "PATH": f"{self._home.parent / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": self.folder,
            "OMP_NUM_THREADS": 1,
        }
        exports = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in around.items())
        text = f"cd {shlex.quote(str(self.folder))} && export {exports} && exec {line}"
        with self._lab.inside(self._node):
            name = f"{self._home.name}-{self.typed}"
            program = self._programs.start(name, "-c", text, python="/bin/bash")
        if not any(word in f"{line} " for word in DAEMONS):
            assert program.wait(START_S) == 0, f"{line}: {program.tail()}"
        return program

    def clone(self) -> None:
        """`git clone` and `cd`: two lines."""
        self.type(f"git clone --quiet file://{REPO} echo2d")
        self.folder = self._home / "echo2d"
        self.typed += 1


def test_the_commands_of_readme_train_a_first_step(tmp_path: Path, make_lab: MakeLab) -> None:
    for name in ("host", "box", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "scp").write_text(SCP)
    (tmp_path / "bin" / "scp").chmod(0o755)
    here, there = first_steps()
    lab = make_lab(HOST, HOST)
    with lab.programs(tmp_path / "logs") as programs:
        host = Keyboard(lab, 0, tmp_path / "host", programs)
        box = Keyboard(lab, 1, tmp_path / "box", programs)
        host.clone()
        running = [host.type(line) for line in here]
        box.clone()
        running += [box.type(line) for line in there]

        metrics = host.folder / "run" / "learner" / "metrics.jsonl"
        poll(
            lambda: not all_are_well(running) or (metrics.exists() and "\n" in metrics.read_text())
        )
        assert all_are_well(running), [program.tail() for program in running if program.returncode]
        row = json.loads(metrics.read_text().partition("\n")[0])
        assert row["step"] == 1
    assert host.typed + box.typed == len(CLONED) + len(here) + len(there) <= 12
    assert [path.name for path in (tmp_path / "box").glob("*.token")] == ["box-1.token"]


def all_are_well(programs: list[Program]) -> bool:
    return all(program.returncode in (None, 0) for program in programs)
