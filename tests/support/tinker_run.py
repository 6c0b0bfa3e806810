"""A run that serves the Tinker API: `echo2d tinker` and `echo2d learn --serve`, as a user starts them."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from echo2d.demo.processes import Program, Programs, start_worker, wait_for
from echo2d.net.tinker.routes import KEY_PREFIX, PREFIX
from echo2d.runtime.run_dir.tokens import create_token
from tests.support.tinker_recipes import BASE_MODEL

START_S = 120.0


@dataclass(frozen=True, slots=True)
class TinkerRun:
    url: str
    folder: Path
    programs: Programs
    coordinator: Program
    learner: Program

    def key(self) -> str:
        """A new client's key, once the coordinator knows it."""
        return self.keys(1)[0]

    def keys(self, count: int) -> list[str]:
        """The keys of new clients, once the coordinator knows them."""
        found = []
        for _ in range(count):
            name = f"client-{len(list(self.folder.glob('*.token')))}"
            token = self.folder / f"{name}.token"
            create_token(
                self.folder / "coordinator",
                name,
                role="tinker",
                url=self.url,
                out=token,
                max_workers=1,
                expires="1d",
            )
            found.append(KEY_PREFIX + str(json.loads(token.read_text())["secret"]))
        for key in found:
            self._wait_until_known(key)
        return found

    def _wait_until_known(self, key: str) -> None:
        request = Request(f"{self.url}{PREFIX}/training_runs", headers={"X-API-Key": key})
        deadline = time.monotonic() + START_S
        while True:
            self.programs.check()
            try:
                urlopen(request).close()
            except HTTPError as refused:
                # The coordinator reads the table of tokens again every few seconds.
                if refused.code != HTTPStatus.UNAUTHORIZED or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return


@contextmanager
def tinker_run(
    folder: Path,
    model: Path,
    workers: int = 1,
    port: int = 0,
    slots: int = 16,
    tables: str = "",
    ranks: int = 1,
) -> Iterator[TinkerRun]:
    """port: of the coordinator, and the next one of its link; 0: any free ones, others after a restart.
    slots: of each worker. tables: more of the run's file. ranks: of the learner.
    """
    folder.mkdir(exist_ok=True)
    config = folder / "run.toml"
    config.write_text(
        f"""
[run]
run_dir = "coordinator"
base_model = "{model}"
[coordinator]
port = {port}
[link]
port = {port and port + 1}
[tinker.models]
"{BASE_MODEL}" = "{model}"
[learner]
threads = 1
{tables}
"""
    )
    with Programs(folder / "logs") as programs:
        coordinator = programs.start("coordinator", "-m", "echo2d", "tinker", f"--config={config}")
        announced = wait_for(folder / "coordinator" / "coordinator.json", programs, START_S)
        url = json.loads(announced)["url"]
        serve = (f"--config={config}", "--serve")
        if ranks > 1:
            torchrun = ("echo2d.learner.torchrun", f"--nproc-per-node={ranks}", "--standalone")
            learner = programs.start("learner", "-m", *torchrun, "-m", "echo2d.learner", *serve)
        else:
            learner = programs.start("learner", "-m", "echo2d", "learn", *serve)
        for number in range(workers):
            flags = (f"--base-model={model}", f"--slots={slots}", "--threads=1")
            start_worker(programs, f"box-{number}", folder, url, *flags)
        yield TinkerRun(url, folder, programs, coordinator, learner)
