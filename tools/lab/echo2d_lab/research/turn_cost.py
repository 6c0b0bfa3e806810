"""Measures what a trajectory of several turns costs the coordinator: `python -m echo2d_lab.research.turn_cost`.

    scripted workers --bytes--> decode -> CoordinatorState -> ledger (SQLite) -> encode --bytes--> workers
                                              |   ^
                                              v   | a real task process, over its pipe: rewards, or an environment

Trajectories of one turn and of `--turns` turns, with the same number of written tokens, alternate in one process. The
measure is the CPU time of this process, user and kernel, without that of scripted workers and learner. Sockets, TLS and
versions are left out: messages are encoded and decoded, and only they depend on the number of turns.
"""

import argparse
import asyncio
import cProfile
import json
import logging
import pstats
import statistics
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from echo2d.core.base.ids import Digest, RunId, SessionId, Version
from echo2d.core.cluster.events import PeerSaid, Persist, Reply, Send
from echo2d.core.coordinator.events import (
    CheckpointAsked,
    CommitAsked,
    CoordinatorAction,
    CoordinatorEvent,
    EpochOpened,
)
from echo2d.core.protocol.control_messages import (
    TO_COORDINATOR,
    TO_PEER,
    LeaseGranted,
    LeaseProgress,
    SampleAnswered,
    SampleDelta,
    SampleFinished,
    ToPeer,
    VersionKey,
    VersionSpan,
)
from echo2d.core.rules.run import DisseminationTable, RunRules
from echo2d.core.rules.tasks import EpisodeRules, TaskRules
from echo2d.core.work.events import ForgetEpisode, ScoreSample, StepEnvironment
from echo2d.runtime.coordinator.environment_calls import EnvironmentCalls
from echo2d.runtime.coordinator.task_calls import TaskCalls
from echo2d.store.ledger import Ledger
from echo2d.tasks.episodes import Episodes
from echo2d.tasks.pool import TaskPool
from echo2d_lab.bench.lab.stub_environment import GIVEN
from echo2d_lab.bench.lab.stub_task import StubTask
from echo2d_lab.standins.memory_run import FakePeer, MemoryRun

TASKS = (
    "echo2d_lab.bench.lab.stub_task:StubTask",
    "echo2d_lab.bench.lab.stub_environment:StubEnvironment",
)
GROUP_SIZE = 8
VOCAB_SIZE = 32_000
PROMPT_TOKENS = 128
WORKERS, SLOTS = 16, 4
REPORT_TOKENS = 512  # in one LeaseProgress
ASKED_MAX = 32  # open requests to the task process, for steps or rewards
EVENTS = 16  # in one turn of the loop, with one transaction
PER_TURN_MS = 0.3
FACTOR = 1.2


@dataclass(frozen=True, slots=True)
class Said:
    """A worker's message in the bytes of its socket."""

    session: SessionId
    data: bytes


class TurnsRun(MemoryRun):
    """A coordinator without sockets.

    tokens: of a turn. outside_s: CPU time of workers and learner. answers: number of accepted ones.
    """

    def __init__(self, rules: RunRules, ledger: Ledger, tokens: int) -> None:
        self.outside_s = 0.0
        self.steps = self.answers = 0
        self._file = ledger
        self._tokens = tokens
        self._prompts = StubTask(PROMPT_TOKENS, VOCAB_SIZE)
        self._said: list[Said] = []
        self._asked = 0  # samples for which the task has not answered
        self._came = asyncio.Event()
        self._told: list[tuple[FakePeer, LeaseGranted]] = []
        self._by_session: dict[SessionId, FakePeer] = {}
        self._calls: TaskCalls | EnvironmentCalls | None = None
        self._tasks: asyncio.TaskGroup | None = None
        super().__init__(rules)

    async def play(self, calls: TaskCalls | EnvironmentCalls, steps: int) -> None:
        """Train this many further steps."""
        wanted = self.steps + steps
        self._calls = calls
        async with asyncio.TaskGroup() as self._tasks:
            while self.steps < wanted:
                with self.outside():
                    self._write()
                # These workers write at once what real ones write in seconds, so the loop waits for the task.
                while (
                    len(self.pending) < EVENTS
                    and self._asked
                    and (self._asked >= ASKED_MAX or not self._said)
                ):
                    self._came.clear()
                    await self._came.wait()
                taken = max(0, EVENTS - len(self.pending)) if self._asked < ASKED_MAX else 0
                events = [*self.pending, *self._said[:taken]]
                self.pending.clear()
                del self._said[:taken]
                self._turn(events)
                await asyncio.sleep(0)

    @contextmanager
    def outside(self) -> Iterator[None]:
        began = time.process_time()
        yield
        self.outside_s += time.process_time() - began

    # --- the coordinator

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        return self._turn([event])

    def _turn(self, events: Sequence[Said | CoordinatorEvent]) -> list[CoordinatorAction]:
        self.now += 1e-3
        actions: list[CoordinatorAction] = []
        for event in events:
            if isinstance(event, Said):
                event = PeerSaid(event.session, TO_COORDINATOR.decode(event.data))
            actions += self.state.handle(event, now=self.now)
        records = [action.record for action in actions if isinstance(action, Persist)]
        if records:
            self._file.append(records)
        for record in records:
            if isinstance(record, EpochOpened):
                self.ledger.append(record)
        for action in actions:
            self._perform(action)
        scoring = [action for action in actions if isinstance(action, ScoreSample)]
        if scoring and isinstance(self._calls, TaskCalls):
            self._asked += len(scoring)
            self._later(self._rewarded(self._calls, scoring))
        return actions

    def _perform(self, action: CoordinatorAction) -> None:
        match action:
            case Persist() | ScoreSample():
                pass
            case Send(session, message):
                TO_PEER.encode(message)
                with self.outside():
                    peer = self._by_session.get(session)
                    if peer is None:
                        super()._perform(action)
                    else:
                        self._heard(peer, message)
            case StepEnvironment():
                self._asked += 1
                assert isinstance(self._calls, EnvironmentCalls)
                self._later(self._step(self._calls.step(action)))
            case ForgetEpisode():
                assert isinstance(self._calls, EnvironmentCalls)
                self._calls.forget(action)
            case _:
                with self.outside():
                    super()._perform(action)
                if isinstance(action, Reply) and isinstance(action.body, bytes):
                    self._commit(action)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    async def _step(self, answer: Coroutine[Any, Any, CoordinatorEvent]) -> None:
        self._came_in(await answer)

    async def _rewarded(self, calls: TaskCalls, actions: Sequence[ScoreSample]) -> None:
        async for scored in calls.score(actions):
            self._came_in(scored)

    def _came_in(self, event: CoordinatorEvent) -> None:
        self._asked -= 1
        self.pending.append(event)
        self._came.set()

    def _prompt(self, cursor: int) -> bytes:
        return b"".join(t.to_bytes(4, "little") for t in self._prompts.prompt(cursor).tokens)

    # --- workers and learner

    def work_at(self, peer: FakePeer, key: VersionKey) -> None:
        """Let this peer serve this version, and write from now on."""
        peer.serving = key
        self._by_session[peer.session] = peer

    def _heard(self, peer: FakePeer, message: ToPeer) -> None:
        match message:
            case LeaseGranted():
                self._told.append((peer, message))
            case SampleAnswered(accepted=accepted, reason=reason):
                assert accepted, reason
                self.answers += 1
            case _:
                pass

    def _write(self) -> None:
        """Write each lease at once, with the progress reports that a real worker would send."""
        for peer, lease in self._told:
            key = peer.serving
            assert key is not None
            for sample in lease.samples:
                for start in range(0, self._tokens, REPORT_TOKENS):
                    self._report(peer, lease, sample, start, key)
                tokens = sample.to_bytes(4, "little") + bytes(4 * (self._tokens - 1))
                spans = (VersionSpan(0, self._tokens, key.version, key.digest),)
                self._say_later(
                    peer,
                    SampleFinished(
                        lease.lease, lease.attempt, sample, tokens, bytes(4 * self._tokens), spans, "length"
                    ),
                )  # fmt: skip
        self._told.clear()

    def _report(
        self, peer: FakePeer, lease: LeaseGranted, sample: int, start: int, key: VersionKey
    ) -> None:
        end = min(self._tokens, start + REPORT_TOKENS)
        spans = (VersionSpan(start, end, key.version, key.digest),)
        tokens = bytes(4 * (end - start))
        if not start:
            tokens = sample.to_bytes(4, "little") + tokens[4:]
        delta = SampleDelta(sample, tokens, bytes(4 * (end - start)), spans)
        self._say_later(peer, LeaseProgress(lease.lease, lease.attempt, (delta,)))

    def _say_later(self, peer: FakePeer, message: SampleFinished | LeaseProgress) -> None:
        self._said.append(Said(peer.session, TO_COORDINATOR.encode(message)))

    def _commit(self, reply: Reply) -> None:
        """The learner commits the batch, and asks for the next one."""
        assert reply.digest is not None
        digest, epoch, step = reply.digest, self.ledger.epoch, self.steps + 1
        self.call(lambda number: CommitAsked(number, epoch, step, digest, 1.0))
        self.call(lambda number: CheckpointAsked(number, epoch, step))
        while self._file.trim():
            pass
        self.steps = step
        self.ask_batch(step + 1)


def rules(tokens: int, turns: int, step: int) -> RunRules:
    """The rules for trajectories of this many tokens; a train step takes `step` of them."""
    episode = None if turns == 1 else EpisodeRules(turns, 2 * tokens + turns * len(GIVEN))
    return RunRules(
        run_id=RunId("run-1"),
        staleness_max=1 << 20,
        publish_every=1,
        trajectories_per_step=step,
        group_size=GROUP_SIZE,
        tasks=(TaskRules(max_new_tokens=tokens // turns, episode=episode),),
        vocab_size=VOCAB_SIZE,
        over_stale="drop",
        filter_zero_variance=True,
        lease_silence_s=1e9,
        group_patience=0.0,
        dissemination=DisseminationTable(shape="chain", chains=1),
    )


def started(rules: RunRules, ledger: Ledger, tokens: int) -> TurnsRun:
    """A run whose workers serve version 0."""
    run = TurnsRun(rules, ledger, tokens)
    run.connect("seed", kind="seed", slots=0)
    workers = [run.connect(f"w{number:031}", slots=SLOTS) for number in range(WORKERS)]
    run.open_session()
    run.publish_key(VersionKey(Version(0), Digest(bytes(32))))
    run.drain()
    for worker in workers:
        assert worker.ready is not None
        run.work_at(worker, worker.ready)
        run.refit(worker)
    run.ask_batch(1)
    return run


async def measured(
    options: argparse.Namespace, turns: int, folder: Path, *, profile: bool
) -> float:
    """CPU seconds of a trajectory."""
    arguments = {"prompt_tokens": PROMPT_TOKENS, "vocab_size": VOCAB_SIZE}
    if turns > 1:
        arguments["turns"] = turns
    tokens = options.tokens // turns
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        async with TaskPool(TASKS[turns > 1], arguments, timeout_s=60.0) as pool:
            calls: TaskCalls | EnvironmentCalls
            if turns > 1:
                calls = EnvironmentCalls(Episodes(pool), name="", vocab_size=VOCAB_SIZE)
            else:
                calls = TaskCalls(pool, name="", vocab_size=VOCAB_SIZE)
            run = started(rules(options.tokens, turns, options.trajectories), ledger, tokens)
            await run.play(calls, 1)
            counted = cProfile.Profile(time.process_time)
            if profile:
                counted.enable()
            began, outside, answers = time.process_time(), run.outside_s, run.answers
            await run.play(calls, options.steps)
            took = time.process_time() - began - (run.outside_s - outside)
            if profile:
                counted.disable()
                pstats.Stats(counted).sort_stats("cumtime").print_stats(80)
            return took * turns / (run.answers - answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="written in a trajectory")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--trajectories", type=int, default=128, help="of a train step")
    parser.add_argument("--steps", type=int, default=2, help="measured in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", type=int, default=0, help="show where turns of this kind go")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[int, list[float]] = {1: [], options.turns: []}
    numbers = count()
    with tempfile.TemporaryDirectory(prefix="echo2d-turns-") as folder:
        for turns in [options.profile] if options.profile else [*found] * options.rounds:
            place = Path(folder) / str(next(numbers))
            place.mkdir()
            profile = bool(options.profile)
            seconds = asyncio.run(measured(options, turns, place, profile=profile))
            found.setdefault(turns, []).append(1000 * seconds)
    if not options.profile:
        one, many = (statistics.median(found[turns]) for turns in found)
        facts = {
            "tokens": options.tokens, "turns": options.turns,
            "one_turn_ms": [round(one, 3), round(min(found[1]), 3), round(max(found[1]), 3)],
            "turns_ms": [round(many, 3), round(min(found[options.turns]), 3), round(max(found[options.turns]), 3)],
            "bar_ms": round(FACTOR * one + PER_TURN_MS * options.turns, 3),
            "beyond_per_turn_ms": round((many - FACTOR * one) / options.turns, 3),
        }  # fmt: skip
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
