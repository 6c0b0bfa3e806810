"""Leases on fake engines: every sample ends, aborts are silent, an engine that misbehaves fails its lease once."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from echo2d.core.base.ids import LeaseId
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.worker.events import EngineLost, GenerationFailed, SampleProgressed
from echo2d.engines.base import Engine, GenerateRequest, SampleOutput
from echo2d.engines.fake import FAKE_EOS, FakeEngine, FakePolicy
from echo2d.runtime.worker.generation import LeaseRunner
from tests.support.polling import HANG_S
from tests.support.snapshots import write_snapshot
from tests.support.worker import a_lease

LABEL = "0-abc"


class Broken(FakeEngine):
    """Its output is the deltas it was given."""

    def __init__(self, *deltas: SampleOutput) -> None:
        super().__init__()
        self._deltas = deltas

    async def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
        for delta in self._deltas:
            yield delta


class Shift:
    """Rollouts over some engines, and what they emit."""

    def __init__(self, engines: Sequence[Engine], tasks: asyncio.TaskGroup) -> None:
        self.events: list[SampleProgressed | GenerationFailed] = []
        self.lost: list[str] = []
        self.rollouts = LeaseRunner(engines, tasks, self._take)
        self._changed = asyncio.Event()

    def _take(self, event: SampleProgressed | GenerationFailed | EngineLost) -> None:
        if isinstance(event, EngineLost):
            self.lost.append(event.reason)
        else:
            self.events.append(event)
        self._changed.set()

    async def until(self, count: int) -> None:
        """So many samples have finished, or leases failed."""
        async with asyncio.timeout(HANG_S):
            while (
                sum(isinstance(e, GenerationFailed) or e.finish is not None for e in self.events)
                < count
            ):
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def a_shift(*engines: Engine) -> AsyncIterator[Shift]:
    async with asyncio.TaskGroup() as tasks:
        yield Shift(engines, tasks)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(FakePolicy(answer_tokens=(3, 6)))
    await engine.start()
    await engine.refit(await asyncio.to_thread(write_snapshot, tmp_path / "model"), LABEL)
    yield engine
    await engine.close()


async def test_every_sample_is_reported_under_its_own_number(engine: FakeEngine) -> None:
    async with a_shift(engine) as shift:
        shift.rollouts.start(a_lease(1, samples=(4, 9), stops=[FAKE_EOS]))
        await shift.until(2)
    progress = [event for event in shift.events if isinstance(event, SampleProgressed)]
    for sample in (4, 9):
        mine = [event for event in progress if event.sample == sample]
        assert [event.finish for event in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish in ("stop", "length")
        assert {span.label for event in mine for span in event.spans} == {LABEL}
        assert 3 <= sum(len(event.tokens) for event in mine) <= 6


async def test_an_aborted_lease_reports_nothing_more(engine: FakeEngine) -> None:
    async with a_shift(engine) as shift:
        shift.rollouts.start(a_lease(1))
        shift.rollouts.abort(LeaseId(1), 1)
        shift.rollouts.abort(LeaseId(1), 1)
        shift.rollouts.start(a_lease(2))
        await shift.until(2)
    assert {event.lease for event in shift.events} == {2}
    assert (await engine.load()).running == 0


async def test_work_goes_to_the_engine_with_the_most_room(
    engine: FakeEngine, tmp_path: Path
) -> None:
    other = FakeEngine()
    await other.start()
    await other.refit(tmp_path / "model", "other")
    async with a_shift(engine, other) as shift:
        shift.rollouts.start(a_lease(1, samples=(0, 1, 2)))
        shift.rollouts.start(a_lease(2, samples=(0,)))
        shift.rollouts.start(a_lease(3, samples=(0,)))
        await shift.until(5)
    progress = [event for event in shift.events if isinstance(event, SampleProgressed)]
    labels = {event.lease: span.label for event in progress for span in event.spans}
    assert labels == {1: LABEL, 2: "other", 3: "other"}


async def test_an_engine_without_a_version_fails_the_lease() -> None:
    engine = FakeEngine()
    await engine.start()
    async with a_shift(engine) as shift:
        shift.rollouts.start(a_lease(1))
        await shift.until(1)
    assert shift.events == [GenerationFailed(LeaseId(1), 1, "no version is served")]
    assert len(shift.lost) == 1


async def test_an_engine_that_still_serves_is_not_lost(engine: FakeEngine) -> None:
    async with a_shift(engine) as shift:
        shift.rollouts.start(dataclasses.replace(a_lease(1), sampling=Sampling(top_p=0.0)))
        await shift.until(1)
    assert isinstance(shift.events[0], GenerationFailed)
    assert shift.lost == []


@pytest.mark.parametrize(
    ("deltas", "reason"),
    [
        ((), "the engine ended without finishing samples [0, 1]"),
        ((SampleOutput(0, (), (), (), "abort"),), "the engine aborted the request"),
        (
            (SampleOutput(7, (), (), (), "stop"),),
            "the engine reported sample 7, which is not running",
        ),
    ],
)
async def test_an_engine_that_misbehaves_fails_the_lease_once(
    deltas: tuple[SampleOutput, ...], reason: str
) -> None:
    async with a_shift(Broken(*deltas)) as shift:
        shift.rollouts.start(a_lease(1))
        await shift.until(1)
    assert shift.events == [GenerationFailed(LeaseId(1), 1, reason)]
