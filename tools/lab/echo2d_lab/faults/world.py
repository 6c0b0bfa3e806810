"""Plays a whole run in virtual time under a fault schedule: coordinator, seed, workers, learner.

CoordinatorState, WorkerState and every Relay are real. Disks, engines, tasks, the learner and the
connections are modelled. `InvariantChecker` judges every record, answer and lease, and the states
check themselves regularly. After `heal_s` the run must train STEPS_AFTER more steps within LIMIT_S,
or it is stuck. The same rng_seed gives the same trace, in any process.

Not here: forms of many frames and their faults (`echo2d.plan.broadcast`).
"""

import random
import struct
from dataclasses import dataclass
from typing import assert_never

from blake3 import blake3

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.events import PeerRevoked
from echo2d.core.protocol.control_messages import LeaseGranted
from echo2d.plan.kernel.virtual_clock import Clock
from echo2d_lab.faults.auditor import SimAuditor
from echo2d_lab.faults.control_links import Control
from echo2d_lab.faults.coordinator import SimCoordinator
from echo2d_lab.faults.engine import Pace
from echo2d_lab.faults.environment import TURNS
from echo2d_lab.faults.fault_schedule import FADE, RunFault, Schedule, WorkerSpec
from echo2d_lab.faults.invariants import InvariantChecker
from echo2d_lab.faults.learner import BASE, Checkpoint, SimLearner
from echo2d_lab.faults.peer_links import SimPeerLinks
from echo2d_lab.faults.seed import SimSeed
from echo2d_lab.faults.worker import SimWorker

STEPS_AFTER = 3  # this many train steps show that the run continues
# Virtual time for these steps. A hung engine's leases are given back after 120 s, and stuck leases
# are taken away after 180 s. With environments each turn may take as long.
LIMIT_S = 400.0
# Events of one schedule. If there are more, some process is in an endless loop.
EVENTS_MAX = 100_000
_STAMP = struct.Struct("<dhI")


class RunStuckError(AssertionError):
    """The run does not continue although all faults have healed."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a run.

    steps: commits, with replays. handed_over: leases that continued the output of another one.
    joined: kept results of such leases. outlived: kept results of leases from before a restart of
    the coordinator. after_s: seconds from the healing to the end. trace: a digest of all events.
    """

    steps: int
    handed_over: int
    joined: int
    outlived: int
    after_s: float
    events: int
    epochs: int
    trace: str


class SimulatedRun:
    """Plays one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._clock = Clock()
        self._random = random.Random(schedule.rng_seed ^ 0x5EED)
        self._trace = blake3()
        self._events = 0
        self._lying: set[PeerId] = set()
        self._leases: list[LeaseGranted] = []
        self._gone: set[int] = set()  # workers that do not come back
        self._refused: dict[int, int] = {}  # step -> how often a batch of it was refused
        self.judge = InvariantChecker(schedule.rules, lambda peer: peer not in self._lying)
        if schedule.learnt is not None:
            self.judge.ledger.append(schedule.learnt)
        self.coordinator = SimCoordinator(
            self._clock,
            self._random,
            schedule.rules,
            self.judge,
            self._noted,
            self._leases,
            self._kill_coordinator,
        )
        self._control = Control(self._clock, self._random, self.coordinator)
        self._control.emit = self.coordinator.emit
        self.coordinator.control = self._control
        self._links = SimPeerLinks(self._clock, self._random)
        run_id = schedule.rules.run_id
        self._seed = SimSeed(
            self._clock, self._random, self._control, self._links, run_id, self._noted
        )
        self._auditor = SimAuditor(self._clock, self._random, self._control, run_id, self._leases)
        self.workers = [
            self._worker(number, spec) for number, spec in enumerate(schedule.workers, 1)
        ]
        self._learner = self._new_learner([Checkpoint(0, BASE)])

    def run(self) -> RunOutcome:
        """Play the schedule to its end.

        AssertionError: an invariant broke; a note names the rng_seed. RunStuckError: the run did
        not continue after the healing.
        """
        try:
            return self._run()
        except BaseException as error:
            error.add_note(
                f"rng_seed={self._schedule.rng_seed} at {self._clock.now:.3f} s of virtual time"
            )
            raise

    def play(self, seconds: float) -> None:
        """Play this much time, with the healing at `heal_s`, and judge no outcome."""
        self._begin()
        while self._clock.step(min(seconds, self._schedule.heal_s)):
            pass
        self._heal()
        while self._clock.step(seconds):
            pass
        self._check_all()

    def _begin(self) -> None:
        schedule = self._schedule
        self._start_coordinator()
        self._learner.start()
        for worker, spec in zip(self.workers, schedule.workers, strict=True):
            self._clock.after(spec.joins_at_s, self._start_worker, worker)
        for fault in schedule.faults:
            self._clock.at(fault.at_s, self._strike, fault)

    def _run(self) -> RunOutcome:
        schedule = self._schedule
        self._begin()
        while self._clock.step(schedule.heal_s):
            pass
        self._heal()
        target = self.judge.newest_step + STEPS_AFTER
        episodes = any(task.episode is not None for task in schedule.rules.tasks)
        limit_s = LIMIT_S * (TURNS if episodes else 1)
        while self.judge.newest_step < target:
            if not self._clock.step(schedule.heal_s + limit_s):
                raise RunStuckError(
                    f"step {self.judge.newest_step} of {target}: {self.coordinator.state.status()}"
                )
        self._check_all()
        after_s = self._clock.now - schedule.heal_s
        epochs = self.judge.ledger.epoch
        judge, trace = self.judge, self._trace.hexdigest()
        return RunOutcome(
            judge.steps_committed, judge.handed_over, judge.joined, judge.outlived,
            after_s, self._events, epochs, trace,
        )  # fmt: skip

    def _check_all(self) -> None:
        self.coordinator.state.check()
        for worker in self.workers:
            if worker.up:
                worker.state.check()

    def _noted(self, number: int, event: object, actions: int) -> None:
        self._events += 1
        assert self._events < EVENTS_MAX, f"more than {EVENTS_MAX} events: a process loops for ever"
        self._trace.update(_STAMP.pack(self._clock.now, number, actions))
        self._trace.update(type(event).__name__.encode())

    # --- processes

    def _worker(self, number: int, spec: WorkerSpec) -> SimWorker:
        worker = SimWorker(
            self._clock,
            self._random,
            self._control,
            self._links,
            number,
            run_id=self._schedule.rules.run_id,
            slots=spec.slots,
            latency_s=spec.latency_s,
            pace=Pace(spec.token_s, spec.faulty, together=spec.bad == "hoards"),
            noted=self._noted,
            granted=self._leases,
            stopped=self._restart_worker,
        )
        worker.lies, worker.invents = spec.lies, self._schedule.rules.audit is not None
        worker.trusted = number == 1
        if spec.lies:
            self._lying.add(worker.peer)
        return worker

    def _new_learner(self, saved: list[Checkpoint]) -> SimLearner:
        schedule = self._schedule
        return SimLearner(
            self._clock,
            self._random,
            self.coordinator,
            schedule.rules,
            saved,
            self._refused,
            train_s=schedule.train_s,
            checkpoint_every=schedule.checkpoint_every,
            refusals=schedule.refusals,
        )

    def _start_coordinator(self) -> None:
        if not self.coordinator.up:
            self.coordinator.start()
            self._clock.after(0.1, self._start_seed)
            self._clock.after(0.2, self._start_auditor)

    def _start_seed(self) -> None:
        if not self._seed.up and self.coordinator.up:
            self._seed.start()

    def _start_auditor(self) -> None:
        if self.judge.audited and not self._auditor.up and self.coordinator.up:
            self._auditor.start()

    def _kill_auditor(self) -> None:
        if self._auditor.up:
            self._control.cut(self._auditor)
            self._auditor.end()

    def _start_worker(self, worker: SimWorker) -> None:
        if not worker.up and worker.number not in self._gone:
            worker.start()

    def _restart_worker(self, number: int) -> None:
        """Start a worker again, as its supervisor would."""
        self._clock.after(
            self._random.uniform(0.2, 10.0), self._start_worker, self.workers[number - 1]
        )

    def _start_learner(self, learner: SimLearner) -> None:
        if not learner.up and not learner.fenced and learner is self._learner:
            learner.start()

    def _kill_coordinator(self, back_s: float = 1.0) -> None:
        """Kill the coordinator, and the seed with it; start both after `back_s`."""
        if self.coordinator.up:
            self._kill_seed()
            self._kill_auditor()
            self.coordinator.end()
            self._clock.after(back_s, self._start_coordinator)

    def _kill_seed(self) -> None:
        if self._seed.up:
            self._control.cut(self._seed)
            self._seed.end()

    def _kill_worker(self, worker: SimWorker, back_s: float | None) -> None:
        if worker.up:
            worker.end()
        if back_s is not None:
            self._clock.after(back_s, self._start_worker, worker)

    # --- faults

    def _strike(self, fault: RunFault) -> None:  # noqa: C901 - one line per kind
        worker, lasts_s = self.workers[fault.worker - 1], fault.lasts_s
        match fault.kind:
            case "kill_coordinator":
                self._kill_coordinator(lasts_s)
            case "kill_in_commit":
                self.coordinator.die = self._random.choice(["before", "after", "between"])
            case "pause_coordinator":
                self.coordinator.pause(lasts_s)
            case "jump_coordinator":
                self.coordinator.jump(4 * lasts_s)
            case "kill_seed":
                self._kill_seed()
                self._clock.after(lasts_s, self._start_seed)
            case "encode_fails":
                self._seed.failures = 1
            case "kill_worker":
                self._control.cut(worker)
                self._kill_worker(worker, lasts_s)
            case "vanish_worker":
                self._control.vanish(worker)
                self._kill_worker(worker, lasts_s)
            case "stop_worker":
                worker.stop()
            case "pause_worker":
                worker.pause(lasts_s)
            case "jump_worker":
                worker.jump(4 * lasts_s)
            case "cut":
                self._control.cut(worker)
            case "block":
                self._control.block(worker, min(lasts_s, self._schedule.heal_s - fault.at_s))
            case "cut_links":
                self._links.cut(worker.peer)
            case "hang":
                worker.pace.hung = True
                self._clock.after(lasts_s, self._unhang, worker)
            case "revoke":
                self._revoke(worker)
            case "kill_learner":
                self._learner.end()
                self._clock.after(lasts_s, self._start_learner, self._learner)
            case "second_learner":
                self._learner = self._new_learner(self._learner.saved)
                self._learner.start()
            case "lose_call":
                self.coordinator.lose_calls()
            case "rewards_fail":
                self.coordinator.rewards_fail = 2
            case "kill_auditor":
                self._kill_auditor()
                self._clock.after(lasts_s, self._start_auditor)
            case _:
                assert_never(fault.kind)

    def _unhang(self, worker: SimWorker) -> None:
        worker.pace.hung = self._schedule.workers[worker.number - 1].bad == "hangs"

    def _revoke(self, worker: SimWorker) -> None:
        """Revoke a worker for ever, except for the first: one must remain to finish the run."""
        if worker.number > 1:
            worker.barred = True
            self._gone.add(worker.number)
            self.coordinator.emit(PeerRevoked(worker.peer))

    def _heal(self) -> None:
        """End all faults, except for those of workers that are bad for ever."""
        self.coordinator.die, self.coordinator.rewards_fail, self._seed.failures = None, 0, 0
        self._start_coordinator()
        self._clock.after(0.1, self._start_seed)
        self._clock.after(0.2, self._start_auditor)
        self._learner.refusals = 0.0
        self._start_learner(self._learner)
        for worker, spec in zip(self.workers, self._schedule.workers, strict=True):
            self._heal_worker(worker, spec)

    def _heal_worker(self, worker: SimWorker, spec: WorkerSpec) -> None:
        worker.pace.faulty, worker.pace.hung = 0.0, spec.bad == "hangs"
        worker.lies = spec.lies if spec.bad == "lies" else 0.0
        if spec.bad == "fades":
            worker.pace.token_s *= FADE
        if spec.bad == "dead":
            self._gone.add(worker.number)
            self._control.vanish(worker)
            self._kill_worker(worker, None)
        else:
            self._start_worker(worker)
