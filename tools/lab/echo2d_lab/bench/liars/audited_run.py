"""A run of real processes on this machine, with the demo's model and any mixture of workers."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from echo2d.client import Coordinator
from echo2d.demo.processes import Program, Programs, wait_for
from echo2d.demo.run import CACHE, CONFIG, DEMO_KINDS, DEMO_LEARNER, DemoTask
from echo2d.demo.tiny_model import TinyRecipe, make_tiny_model
from echo2d.engines.base import Quantization
from echo2d.errors import Fault
from echo2d.runtime.run_dir.tokens import create_token
from echo2d_lab.bench.liars.kinds import LieKind

START_S = 120.0
STALENESS, KAPPA = 2, 1
AUDIT = """
[audit]
enabled = true
trusted = {trusted}
share = {share}
newcomer = {newcomer}
seeds = "{seeds}"
"""
WORKER = """\
[worker]
url = "{url}"
token_file = "{run}/{name}.token"
state_dir = "{run}/{name}"
name = "{name}"
slots = {slots}
threads = 1
dtype = "{dtype}"
quantization = "{quantization}"
"""


@dataclass(frozen=True, slots=True)
class RunWorker:
    """A worker of the run. lie: None: it is honest. share: of its samples about which it lies. late:
    `join_late` starts it. quantization: as in [worker]; a liar only claims it.
    """

    name: str
    dtype: str = "float32"
    trusted: bool = False
    lie: LieKind | None = None
    share: float = 1.0
    late: bool = False
    quantization: Quantization = "none"


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Keys of [audit]."""

    share: float = 0.05
    newcomer: int = 20
    seeds: str = "torch"


class AuditedRun:
    """See the module docstring. audit: None: the run has no audit. folder: for its files. task: one of
    the demo's.
    """

    def __init__(
        self,
        folder: Path,
        programs: Programs,
        workers: Sequence[RunWorker],
        *,
        audit: AuditSettings | None,
        steps: int,
        slots: int,
        rng_seed: int,
        task: DemoTask = "sort_digits",
    ) -> None:
        self._task = task
        self.folder, self._programs, self._workers = folder.absolute(), programs, workers
        self._audit, self._steps, self._slots, self._rng_seed = audit, steps, slots, rng_seed
        self.recipe = TinyRecipe(rng_seed=rng_seed)
        self._needed: list[Program] = []
        self.learner: Program | None = None

    def start(self) -> Coordinator:
        """Start every process. The caller must close the client, and stop the programs."""
        self.model = make_tiny_model(CACHE, self.recipe)
        (self.folder / "snapshots").mkdir(parents=True)
        url = self._start_coordinator()
        self._url = url
        for worker in self._workers:
            if not worker.late:
                self._join(worker, url)
        config = str(self.folder / "run.toml")
        self.learner = self._programs.start("learner", "-m", "echo2d", "learn", "--config", config)
        return Coordinator(url, token_file=self.folder / "coordinator" / "tokens" / "viewer.token")

    def join_late(self) -> None:
        """Start the workers that are marked as late."""
        for worker in self._workers:
            if worker.late:
                self._join(worker, self._url)

    def check(self) -> bool:
        """Whether the learner still trains. Fault: a program that should be running has ended."""
        for program in self._needed:
            if program.returncode is not None:
                raise Fault(f"{program.name} ended; {program.log} ends:\n{program.tail()}")
        assert self.learner is not None
        if self.learner.returncode:
            raise Fault(f"the learner ended; {self.learner.log} ends:\n{self.learner.tail()}")
        return self.learner.returncode is None

    def _start_coordinator(self) -> str:
        facts = {
            "run": self.folder,
            "model": self.model,
            "staleness": STALENESS,
            "kappa": KAPPA,
            "seed": self._rng_seed,
        }
        text = CONFIG.format(**facts, delta="true", task=DEMO_KINDS.get(self._task, self._task))
        if any(worker.quantization != "none" for worker in self._workers):
            text = text.replace("[policy]", "[policy]\nquantized_workers = true")
        if self._audit is not None:
            trusted = json.dumps([worker.name for worker in self._workers if worker.trusted])
            text += AUDIT.format(trusted=trusted, **asdict(self._audit))
        config = self.folder / "run.toml"
        config.write_text(text)
        self._needed.append(
            self._programs.start(
                "coordinator", "-m", "echo2d", "coordinate", "--config", str(config)
            )
        )
        written = wait_for(
            self.folder / "coordinator" / "coordinator.json", self._programs, START_S
        )
        url = str(json.loads(written)["url"])
        config.write_text(text + DEMO_LEARNER.format(**facts, steps=self._steps, url=url))
        return url

    def _join(self, worker: RunWorker, url: str) -> None:
        name, folder = worker.name, self.folder
        create_token(
            folder / "coordinator", name, role="worker", url=url, out=folder / f"{name}.token",
            max_workers=1, expires="1d",
        )  # fmt: skip
        config = folder / f"{name}.toml"
        config.write_text(
            WORKER.format(
                url=url,
                run=folder,
                name=name,
                slots=self._slots,
                dtype=worker.dtype,
                quantization=worker.quantization,
            )
        )
        lying = (
            "echo2d_lab.bench.liars.worker",
            str(worker.lie),
            str(worker.share),
            str(self.model),
        )
        module = ("echo2d",) if worker.lie is None else lying
        program = self._programs.start(name, "-m", *module, "join", "--config", str(config))
        if worker.lie is None:
            self._needed.append(program)
