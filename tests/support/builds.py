"""Programs of other builds, started as on other machines: the first release as it was frozen, and copies of
it that say another protocol number.

`tests/compat/README.md` says how the frozen copy was made. A program of a build imports nothing of this
checkout: its folder is first in PYTHONPATH, and it starts in a folder of its own.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2d.demo.processes import Program
from tests.support.paths import REPO
from tests.support.polling import START_S, poll

RELEASED = REPO / "tests" / "compat" / "echo2d-0.1.0.tar.xz"

CONFIG = """
[run]
run_dir = "{folder}/run"
snapshot_root = "{folder}/out"
[coordinator]
port = {port}
[policy]
staleness_max = 8
publish_every = 1
trajectories_per_step = 24
group_size = 2
filter_zero_variance = false
[sampling]
vocab_size = 512
max_new_tokens = 8
[task]
kind = "sort_digits"
processes = 1
[activation]
mode = "all"
[dissemination]
shape = "chain"
"""

# `echo2d join` as it is, with an engine that needs no torch.
JOIN = """
import sys
from echo2d.engines.fake import FakeEngine
from echo2d.runtime.worker import main
main.make_engines = lambda config: [FakeEngine(answer_tokens=(8, 8), slots=4)]
from echo2d.cli import main
sys.argv = ["echo2d", "join", *sys.argv[1:]]
main()
"""

# A learner without a model: so many steps, then it leaves.
LEARN = """
import functools
import inspect
import sys
from pathlib import Path
from echo2d.client import Coordinator
from echo2d_lab.standins.fake_learner import FakeLearner
url, token, folder, steps = sys.argv[1:]
class Learner(FakeLearner):
    def _publish(self, version):
        super()._publish(version)
        print("published", version, flush=True)
        if version == int(steps):
            self._stopped.set()
if "steps" in inspect.signature(Coordinator.open_session).parameters:
    # As our trainer does: it says where it ends, and this release's API has a place for it.
    Coordinator.open_session = functools.partialmethod(Coordinator.open_session, steps=int(steps))
learner = Learner(url, Path(token), Path(folder), t_train_s=0.2)
learner._run()
sys.exit(f"fault: {learner.fault}" if learner.fault else 0)
"""


@dataclass(frozen=True, slots=True)
class BuildPrograms:
    """An installed build. place: a folder with `echo2d` in it."""

    name: str
    place: Path

    def argv(self, *arguments: str) -> list[str]:
        """`python arguments...` of this build."""
        return [
            "env",
            "-C",
            str(self.place),
            f"PYTHONPATH={self.place}",
            sys.executable,
            *arguments,
        ]

    def run(self, *arguments: str) -> str:
        """What an `echo2d` command of this build prints."""
        return subprocess.run(
            self.argv("-m", "echo2d", *arguments), check=True, capture_output=True, text=True
        ).stdout


TODAY = BuildPrograms("today", REPO)


def released(folder: Path) -> BuildPrograms:
    """The first release, unpacked below this folder."""
    place = folder / "echo2d-0.1.0"
    with tarfile.open(RELEASED) as archive:
        archive.extractall(place, filter="data")
    return BuildPrograms("0.1.0", place)


def incompatible(folder: Path, version: str, protocol: int) -> BuildPrograms:
    """This checkout as if it were a later release that speaks only this protocol number."""
    place = folder / version
    shutil.copytree(
        REPO / "echo2d", place / "echo2d", ignore=shutil.ignore_patterns("__pycache__", "share")
    )
    builds, init = (place / "echo2d" / each for each in ("core/protocol/builds.py", "__init__.py"))
    text, changed = re.subn(
        r"^(PROTOCOL_(?:VERSION|OLDEST)) = \d+$",
        rf"\1 = {protocol}",
        builds.read_text(),
        flags=re.MULTILINE,
    )
    assert changed == 2
    builds.write_text(text)
    init.write_text(init.read_text().replace("0.1.0", version))
    return BuildPrograms(version, place)


class Site:
    """A learner host and its boxes, each with the build that it is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, Program] = {}
        for each in ("out", "logs"):
            (folder / each).mkdir()

    def coordinate(self, build: BuildPrograms) -> None:
        """Start the coordinator, or start it anew at the same port."""
        known = self.folder / "port"
        port = int(known.read_text()) if known.exists() else 0
        config = self.folder / "run.toml"
        config.write_text(CONFIG.format(folder=self.folder, port=port))
        self._start("coordinator", build.argv("-m", "echo2d", "coordinate", f"--config={config}"))
        known.write_text(self.url.rpartition(":")[2])

    @property
    def url(self) -> str:
        announced = self.folder / "run" / "coordinator.json"
        poll(lambda: announced.exists() or self._running["coordinator"].returncode is not None)
        return str(json.loads(announced.read_text())["url"])

    def join(self, name: str, build: BuildPrograms, owner: BuildPrograms | None = None) -> Program:
        """Start a worker. owner: the coordinator's build, which makes a token for a new worker."""
        token = self.folder / f"{name}.token"
        if owner is not None:
            run_dir = self.folder / "run"
            owner.run(
                "token", "create", name, "--role=worker", f"--run-dir={run_dir}", f"--url={self.url}",
                f"--out={token}",
            )  # fmt: skip
        options = (f"--token-file={token}", f"--state-dir={self.folder / name}", f"--name={name}")
        return self._start(name, build.argv("-c", JOIN, self.url, *options))

    def learn(self, build: BuildPrograms, steps: int) -> Program:
        token = self.folder / "run" / "tokens" / "learner.token"
        folder = self.folder / "out"
        return self._start(
            "learner", build.argv("-c", LEARN, self.url, str(token), str(folder), str(steps))
        )

    def status(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(
            TODAY.run("status", f"--run-dir={self.folder / 'run'}", "--json")
        )
        return facts

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()

    def says(self, name: str, words: str) -> str:
        """The first line of a program's log that has these words."""
        poll(lambda: words in self.log(name))
        return next(line for line in self.log(name).splitlines() if words in line)

    def stop(self, name: str) -> int:
        program = self._running.pop(name)
        program.terminate()
        return program.wait(START_S)

    def stop_all(self) -> None:
        for name in reversed(tuple(self._running)):
            self.stop(name)

    def _start(self, name: str, argv: list[str]) -> Program:
        program = self._running[name] = Program(name, argv, self.folder / "logs" / f"{name}.log")
        return program


@contextmanager
def a_site(folder: Path) -> Iterator[Site]:
    site = Site(folder)
    try:
        yield site
    finally:
        site.stop_all()
