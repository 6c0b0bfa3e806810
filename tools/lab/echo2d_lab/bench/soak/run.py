"""`echo2d bench soak`: a run of real processes and scripted workers that has all kinds of troubles for an hour.

    this process                                                 other processes, as in any run
    300 scripted workers that come and go --WebSocket--> echo2d coordinate: ledger, task process, seed
    a learner without gradients ---------------HTTP----> echo2d join, 4 times: torch engines, peer links

Troubles are drawn (`plan`). At a third of the time and at the end all workers are present and no trouble
happens for a while; then the things that processes hold are counted (`counts`). The alerts are watched all
the time (`alert_watch`), and at the end every answer is accounted for (`books`).
"""

import asyncio
import json
import logging
import os
import random
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from echo2d.client import AsyncCoordinator
from echo2d.core.cluster.membership import PEER_GONE_S
from echo2d.core.protocol.builds import OURS
from echo2d.demo.chaos import find_process, kill_process
from echo2d.demo.processes import Program, Programs, wait_for
from echo2d.demo.run import CACHE
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.errors import Fault, first_fault
from echo2d.net.control.client import Identity, enrol
from echo2d.net.security.auth import TokenFile, read_token_file
from echo2d.runtime.run_dir.run_directory import LEDGER_FILE
from echo2d.runtime.run_dir.tokens import create_token, revoke_token
from echo2d.tasks.sort_digits import VOCABULARY
from echo2d_lab.bench.coordinator.bombers import Bomber, attack
from echo2d_lab.bench.coordinator.fake_fleet import Script
from echo2d_lab.bench.coordinator.load import GROUP_SIZE, Load
from echo2d_lab.bench.coordinator.load_meter import LoadMeter
from echo2d_lab.bench.lab.stub_task import config
from echo2d_lab.bench.soak.alert_watch import WITHIN_S, AlertBook, watch_alerts
from echo2d_lab.bench.soak.books import balance, dropped_groups, stored_groups
from echo2d_lab.bench.soak.counts import CountQuestion, ProcessCounts
from echo2d_lab.bench.soak.learner import SoakBatches, SoakLearner
from echo2d_lab.bench.soak.plan import OVER_S, SoakPlan, Trouble, TroubleKind
from echo2d_lab.bench.soak.report import Count, SoakReport, print_report
from echo2d_lab.bench.soak.seats import NEXT_BUILD, ScriptedSeat, SoakAnswers, StrangeWorker

SLOTS, TOKENS, PROMPT_TOKENS = 4, 64, 16
REAL_SLOTS, REAL_TOKENS_PER_S = 4, 30.0
PAIR = 2  # scripted workers that share a token which may be revoked
PAIRS = 8
T_TRAIN_S = 2.0
START_S = 120.0
CHURN_S = (1.0, 5.0)  # smallest and largest time from one worker that leaves to the next
AWAY_S = (5.0, 60.0)
CUT, NEW = 0.5, 0.2  # share of leaves without a goodbye, and of joins as a new machine
DOWN_S = 40.0  # a killed worker or learner stays down this long: its alert must come in that time
FROZEN_S = 20.0
BOMBS_S = 15.0
STRANGE_S = 60.0
LOOKS, LOOK_GAP_S = 10, 6.0  # looks in each count, and seconds between two of them
REFUSED_S = 700.0  # a peer that broke the protocol is refused for a little less than this
STOPPED = 130


def run_soak(plan: SoakPlan, *, out: Path | None, as_json: bool) -> int:
    """Run the soak. Returns the exit code: 1 if something leaked or was lost, or an alert was missing or wrong."""
    import uvloop

    logging.disable(logging.WARNING)  # three hundred links would log too much
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    progress = Progress(console=Console(stderr=True), disable=as_json)
    try:
        with tempfile.TemporaryDirectory(prefix="echo2d-soak-") as spare, progress:
            folder = out or Path(spare)
            folder.mkdir(parents=True, exist_ok=out is None)
            with Programs(folder / "logs") as programs:
                soak = Soak(plan, folder.absolute(), programs, progress)
                uvloop.run(soak.run())
            report = soak.report()
    except KeyboardInterrupt:
        return STOPPED
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        print_report(report)
    return 1 if report.faults() else 0


class Soak:
    """See the module docstring."""

    def __init__(
        self, plan: SoakPlan, folder: Path, programs: Programs, progress: Progress
    ) -> None:
        self._plan, self._folder, self._programs = plan, folder, programs
        self._progress, self._bar = progress, progress.add_task("starting", total=60 * plan.minutes)
        self._rng = random.Random(plan.rng_seed)
        self._load = Load(plan.scripted, plan.rate, TOKENS, slots=SLOTS)
        self._script = Script(SLOTS, TOKENS, len(VOCABULARY), self._load.generate_s)
        self._meter, self._written, self._trained = LoadMeter(), SoakAnswers(), SoakBatches()
        self._book = AlertBook()
        self._happened: Counter[str] = Counter()
        self._counts: list[Count] = []
        self._machines: list[int] = []  # number of new machines before each count
        self._away: set[str] = set()  # programs that are down on purpose
        self._pair_tokens: list[str] = []
        self._seats: list[ScriptedSeat] = []
        self._calm = True  # no worker joins or leaves
        self._learner: SoakLearner | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{self._port}"

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run(tasks)
        except* Fault as faults:
            raise first_fault(faults) from None

    def report(self) -> SoakReport:
        """Call it when all programs have ended."""
        log = (self._folder / "logs" / "coordinator.log").read_text(errors="replace")
        ledger = self._folder / "coordinator" / LEDGER_FILE
        books = balance(
            self._written, self._trained, dropped_groups(log.splitlines()), stored_groups(ledger)
        )
        return SoakReport(
            self._plan, dict(self._happened), books, tuple(self._counts),
            tuple(self._book.missing()), tuple(self._book.unexpected.values()), self._book.seen,
            self._machines[1] - self._machines[0],
        )  # fmt: skip

    # --- the hour

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        self._model = await asyncio.to_thread(make_tiny_model, CACHE)
        await asyncio.to_thread(self._start_coordinator)
        token = self._folder / "coordinator" / "tokens" / "viewer.token"
        async with AsyncCoordinator(self._url, token_file=token) as self._client:
            self._expect_a_start()
            watcher = tasks.create_task(watch_alerts(self._client, self._book))
            for number in range(self._plan.real):
                await asyncio.to_thread(self._start_worker, f"real-{number}")
            await self._take_seats(tasks)
            self._start_learner()
            self._note("everybody is here")
            began = time.monotonic()
            churn = tasks.create_task(self._churn(tasks))
            for part in (0, 1):
                await self._troubles(part, began, tasks)
                await self._count(tasks)
                began += time.monotonic() - began - self._plan.ends_s[part]
            for task in (churn, watcher):
                task.cancel()
            await asyncio.to_thread(self._stop_learner)
            for seat in self._seats:
                await seat.leave(cut=False)

    async def _troubles(self, part: Literal[0, 1], began: float, tasks: asyncio.TaskGroup) -> None:
        """Make the troubles of a part, until the part and its last trouble are over."""
        self._calm = False
        under_way: list[asyncio.Task[None]] = []
        for trouble in self._plan.troubles(part):
            await self._until(began + trouble.at_s, f"next: {trouble.kind}", began)
            under_way.append(tasks.create_task(self._strike(trouble, tasks)))
        await self._until(began + self._plan.ends_s[part] - OVER_S, "the last troubles end", began)
        await asyncio.gather(*under_way)
        self._calm = True
        await self._until(began + self._plan.ends_s[part], "calm before a count", began)

    async def _until(self, at: float, text: str, began: float) -> None:
        while (left := at - time.monotonic()) > 0:
            if self._learner is not None and self._learner.fault is not None:
                raise self._learner.fault
            for program in self._programs:
                if program.returncode is not None and program.name not in self._away:
                    raise Fault(f"{program.name} ended; {program.log} ends:\n{program.tail()}")
            steps = f"{text}; step {self._trained.last_step}"
            self._progress.update(self._bar, description=steps, completed=time.monotonic() - began)
            await asyncio.sleep(min(1.0, left))

    async def _count(self, tasks: asyncio.TaskGroup) -> None:
        """Count when all workers are present, in several looks, because links and requests come and go."""
        self._note("count")
        self._machines.append(self._happened["new_machine"])
        for seat in self._seats:
            if not seat.here:
                await seat.come(self._url, tasks)
        await asyncio.sleep(OVER_S)
        taken: list[dict[str, ProcessCounts]] = []
        for _ in range(LOOKS):
            taken.append(await asyncio.to_thread(self._look))
            await asyncio.sleep(LOOK_GAP_S)
        always = set.intersection(*map(set, taken))
        self._counts.append({name: tuple(each[name] for each in taken) for name in sorted(always)})

    def _look(self) -> dict[str, ProcessCounts]:
        found = {}
        for program in self._programs:
            inside = self._question(program.name).ask()
            found[program.name] = ProcessCounts.of(program.pid, inside)
        for kind in ("seed", "task"):
            pid = find_process(kind, kind, self._programs)  # type: ignore[arg-type]
            if pid is not None:
                found[kind] = ProcessCounts.of(pid)
        return found

    def _note(self, text: str) -> None:
        """Write a line to the soak's own log, for later questions."""
        with (self._folder / "logs" / "soak.log").open("a") as file:
            file.write(f"{datetime.now(UTC):%H:%M:%S} step {self._trained.last_step}: {text}\n")

    # --- who takes part

    def _question(self, name: str) -> CountQuestion:
        return CountQuestion(self._folder / f"{name}.counts")

    def _start_coordinator(self) -> None:
        (self._folder / "snapshots").mkdir()
        load = self._load
        policy = {
            "staleness_max": load.staleness_max,
            "publish_every": 1,
            "trajectories_per_step": load.groups_per_step * GROUP_SIZE,
            "group_size": GROUP_SIZE,
        }
        task = {"prompt_tokens": PROMPT_TOKENS, "vocab_size": len(VOCABULARY)}
        path = self._folder / "run.toml"
        text = config(self._folder, task, TOKENS, policy, {"shape": "auto"})
        path.write_text(text.replace("port = 0", f"port = {self._port}"))
        self._observed("coordinator", "coordinate", "--config", str(path), "--log-json")
        wait_for(self._folder / "coordinator" / "coordinator.json", self._programs, START_S)

    def _start_worker(self, name: str) -> None:
        token = self._token(name, workers=1)
        self._expect_a_worker(name)
        self._observed(
            name, "join", self._url, f"--token-file={token}", f"--name={name}",
            f"--state-dir={self._folder / name}", "--engine=torch", f"--slots={REAL_SLOTS}",
            f"--set=tokens_per_s_max={REAL_TOKENS_PER_S}", "--threads=1", "--log-json",
        )  # fmt: skip

    def _observed(self, name: str, *arguments: str) -> Program:
        path = self._folder / f"{name}.counts"
        return self._programs.start(
            name, "-m", "echo2d_lab.bench.soak.observed", str(path), *arguments
        )

    def _token(self, name: str, *, workers: int) -> Path:
        path = self._folder / f"{name}.token"
        create_token(
            self._folder / "coordinator", name, role="worker", url=self._url, out=path,
            max_workers=workers, expires="30d",
        )  # fmt: skip
        return path

    async def _read_token(self, name: str, *, workers: int) -> TokenFile:
        path = await asyncio.to_thread(self._token, name, workers=workers)
        return await asyncio.to_thread(read_token_file, path)

    async def _take_seats(self, tasks: asyncio.TaskGroup) -> None:
        fleet = await self._read_token("fleet", workers=10_000)
        for number in range(self._plan.scripted):
            rng = random.Random(f"{self._plan.rng_seed} {number}")
            seat = ScriptedSeat(
                f"scripted-{number}", self._script, self._meter, self._written, fleet, rng
            )
            self._seats.append(seat)
        self._pair_tokens = [f"pair-{pair}" for pair in range(PAIRS)]
        for pair, name in enumerate(self._pair_tokens):
            token = await self._read_token(name, workers=PAIR)
            for seat in self._pair(pair):
                seat.token = token
        for seat in self._seats:
            self._expect_a_worker(seat.name)
            await seat.come(self._url, tasks)

    def _pair(self, pair: int) -> list[ScriptedSeat]:
        return self._seats[pair * PAIR : (pair + 1) * PAIR]

    def _start_learner(self, resume_step: int = 0) -> None:
        token = self._folder / "coordinator" / "tokens" / "learner.token"
        root = self._folder / "snapshots" / f"from-{resume_step}-{time.monotonic_ns()}"
        self._learner = SoakLearner(
            self._url, token, root, self._model, self._trained,
            t_train_s=T_TRAIN_S, resume_step=resume_step,
        )  # fmt: skip
        self._learner.start()

    def _stop_learner(self) -> None:
        assert self._learner is not None
        self._learner.stop()
        self._learner = None

    # --- what happens to them

    async def _churn(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*CHURN_S))
            if not self._calm:
                seat = self._rng.choice(self._seats[PAIRS * PAIR :])
                if seat.here:
                    tasks.create_task(self._go_and_come(seat, tasks))

    async def _go_and_come(self, seat: ScriptedSeat, tasks: asyncio.TaskGroup) -> None:
        away_s, cut = self._rng.uniform(*AWAY_S), self._rng.random() < CUT
        self._happened["cut" if cut else "leave"] += 1
        if cut:
            self._book.expect("worker_silent", seat.name, for_s=away_s + PEER_GONE_S)
        await seat.leave(cut=cut)
        await asyncio.sleep(away_s)
        if seat.here:
            return  # a count has called all workers back
        self._expect_a_worker(seat.name)
        new = self._rng.random() < NEW
        self._happened["new_machine"] += new
        await seat.come(self._url, tasks, new=new)

    async def _strike(self, trouble: Trouble, tasks: asyncio.TaskGroup) -> None:
        strikes: dict[TroubleKind, Callable[[Trouble], Coroutine[Any, Any, None]]] = {
            "kill_worker": self._kill_worker,
            "freeze_worker": self._freeze_worker,
            "kill_learner": self._kill_learner,
            "kill_seed": self._kill_child,
            "kill_tasks": self._kill_child,
            "other_build": self._other_build,
            "bomb": self._bomb,
            "kill_coordinator": self._kill_coordinator,
        }
        self._happened[trouble.kind] += 1
        self._note(f"{trouble.kind} begins")
        if trouble.kind == "revoke":
            await self._revoke(trouble, tasks)
        elif trouble.kind == "upgrade":
            await self._upgrade(trouble, tasks)
        else:
            await strikes[trouble.kind](trouble)
        self._note(f"{trouble.kind} is over")

    def _victim(self, trouble: Trouble) -> str:
        """The name of a real worker of the second half; those of the first half live from count to count."""
        first = self._plan.real // 2
        return f"real-{first + int(trouble.draw * (self._plan.real - first))}"

    async def _kill_worker(self, trouble: Trouble) -> None:
        name = self._victim(trouble)
        if name in self._away:
            return
        self._away.add(name)
        self._book.expect("worker_silent", name, for_s=DOWN_S + PEER_GONE_S, within_s=WITHIN_S)
        self._programs[name].kill()
        await asyncio.sleep(DOWN_S)
        self._expect_a_worker(name)
        self._programs[name].start()
        self._away.discard(name)

    async def _freeze_worker(self, trouble: Trouble) -> None:
        name = self._victim(trouble)
        if name in self._away:
            return
        self._away.add(name)
        self._book.expect("worker_silent", name, for_s=FROZEN_S + PEER_GONE_S, within_s=WITHIN_S)
        os.kill(self._programs[name].pid, signal.SIGSTOP)
        await asyncio.sleep(FROZEN_S)
        os.kill(self._programs[name].pid, signal.SIGCONT)
        self._expect_a_worker(name)
        self._away.discard(name)

    async def _kill_learner(self, trouble: Trouble) -> None:  # noqa: ARG002 - as the others
        if self._learner is None:
            return
        await asyncio.to_thread(self._stop_learner)
        self._book.expect("learner_silent", for_s=DOWN_S + WITHIN_S, within_s=WITHIN_S)
        await asyncio.sleep(DOWN_S)
        self._start_learner((await self._status())["checkpoint_step"])

    async def _status(self) -> dict[str, Any]:
        """The status; it is requested until the coordinator answers, which may have been killed."""
        async with asyncio.timeout(START_S):
            while True:
                with suppress(Fault):
                    return await self._client.status()
                await asyncio.sleep(1.0)

    async def _kill_child(self, trouble: Trouble) -> None:
        self._book.expect("seed_away", for_s=WITHIN_S)
        kind: Any = "seed" if trouble.kind == "kill_seed" else "task"
        await asyncio.to_thread(kill_process, kind, kind, self._programs)

    async def _revoke(self, trouble: Trouble, tasks: asyncio.TaskGroup) -> None:
        pair = int(trouble.draw * PAIRS)
        seats = self._pair(pair)
        if any(not seat.here or seat.closed for seat in seats):
            return
        for seat in seats:
            self._book.expect("worker_silent", seat.name, for_s=PEER_GONE_S)
        run = self._folder / "coordinator"
        await asyncio.to_thread(revoke_token, run, self._pair_tokens[pair])
        async with asyncio.timeout(WITHIN_S):
            for seat in seats:
                await seat.gone()
        self._pair_tokens[pair] = f"pair-{pair}-after-{self._happened['revoke']}"
        token = await self._read_token(self._pair_tokens[pair], workers=PAIR)
        for seat in seats:
            seat.token, seat.closed = token, False
            self._happened["new_machine"] += 1
            self._expect_a_worker(seat.name)
            await seat.come(self._url, tasks, new=True)

    async def _upgrade(self, trouble: Trouble, tasks: asyncio.TaskGroup) -> None:
        half = self._seats[PAIRS * PAIR :][int(2 * trouble.draw) :: 2]
        for seat in half:
            if seat.here:
                await seat.leave(cut=False)
                seat.build = NEXT_BUILD if seat.build == OURS else OURS
                self._expect_a_worker(seat.name)
                await seat.come(self._url, tasks)

    async def _other_build(self, trouble: Trouble) -> None:  # noqa: ARG002 - as the others
        self._happened["new_machine"] += 1
        name = f"strange-{self._happened['other_build']}"
        self._book.expect("peer_build", name, for_s=REFUSED_S, within_s=WITHIN_S)
        token = await asyncio.to_thread(read_token_file, self._folder / "fleet.token")
        strange = StrangeWorker(name, self._script, [], self._meter, self._rng)
        identity = Identity.of(self._url, token, strange.key)
        await enrol(self._url, token, identity, rng=self._rng, patience_s=START_S)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(strange.run(self._url, identity.run_key))
            await asyncio.sleep(STRANGE_S)
            strange.leave()
        if strange.let_in:
            raise Fault(f"{name}, a worker of another build, was let in")

    async def _bomb(self, trouble: Trouble) -> None:  # noqa: ARG002 - as the others
        self._happened["new_machine"] += 1
        name = f"bomber-{self._happened['bomb']}"
        self._book.expect("peer_refused", name, for_s=REFUSED_S, within_s=WITHIN_S)
        for kind in ("worker_silent", "worker_no_version"):
            self._book.expect(kind, name, for_s=BOMBS_S + PEER_GONE_S)
        bomber = Bomber(name)
        token = await asyncio.to_thread(read_token_file, self._folder / "fleet.token")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(attack([bomber], self._url, token))
            await asyncio.sleep(BOMBS_S)
            bomber.leave()

    async def _kill_coordinator(self, trouble: Trouble) -> None:  # noqa: ARG002 - as the others
        if "coordinator" in self._away:
            return
        self._away.add("coordinator")
        self._programs["coordinator"].kill()
        self._book.coordinator_killed(time.monotonic())
        await asyncio.sleep(1.0)
        self._expect_a_start()
        self._programs["coordinator"].start()
        self._away.discard("coordinator")

    def _expect_a_start(self) -> None:
        """Expect the alerts of a coordinator that starts: workers, learner and seed come back one by one."""
        for kind in ("worker_silent", "worker_no_version", "worker_stale"):
            self._book.expect(kind, for_s=PEER_GONE_S + WITHIN_S)
        for kind in ("seed_away", "no_workers", "no_learner", "learner_silent"):
            self._book.expect(kind, for_s=START_S)

    def _expect_a_worker(self, name: str) -> None:
        """Expect the alerts of a worker that joins: it has no version yet, or an old one."""
        for kind in ("worker_no_version", "worker_stale"):
            self._book.expect(kind, name, for_s=START_S)
