"""A worker on fake engines that hold several adapters: a lease that names one of them has its tokens alone."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.control_messages import (
    HeldVersions,
    LeaseFailed,
    LeaseProgress,
    RefitDone,
    RefitFailed,
    SampleFinished,
    VersionKey,
    VersionSpan,
)
from echo2d.engines.fake import FakeEngine, FakePolicy, RefitOutcome
from tests.support.engine_harness import CONTEXT_MAX, VOCAB_SIZE
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.lora import AdapterHarness
from tests.support.peer import a_seed, a_worker, publish_full

PACE = 200.0  # tokens per second of one engine


def fake_engine(*outcomes: RefitOutcome) -> FakeEngine:
    endless = (CONTEXT_MAX, CONTEXT_MAX)
    return FakeEngine(
        FakePolicy(vocab_size=VOCAB_SIZE, eos_token_id=VOCAB_SIZE, answer_tokens=endless),
        tokens_per_s=PACE,
        refit_outcomes=outcomes,
    )


class Site:
    """A double whose versions are adapters, and a worker with the base model."""

    def __init__(self, double: CoordinatorDouble, adapters: AdapterHarness) -> None:
        self.double, self._adapters = double, adapters
        self.keys: list[VersionKey] = []
        self.box = PeerId("")

    async def publish(self, *, held: tuple[int, ...] = ()) -> RefitDone | RefitFailed:
        """Publish the next adapter; the engines hold these versions beside it. Returns what the worker says."""
        double, number = self.double, len(self.keys)
        names = await double.peers(2)
        self.box = names["box"]
        double.send(self.box, HeldVersions(3, tuple(self.keys[each] for each in held)))
        before = self.refits()
        source = self._adapters.snapshot(number)
        await asyncio.to_thread(shutil.copytree, source, double.run.path / "versions" / str(number))
        digest = await publish_full(double, number, names["seed"], self.box)
        self.keys.append(VersionKey(double.facts(number, 0).version, digest))
        await double.until(lambda: len(self.refits()) > len(before))
        return self.refits()[-1]

    def refits(self) -> list[RefitDone | RefitFailed]:
        said = self.double.messages
        return [each for _, each in said if isinstance(each, RefitDone | RefitFailed)]

    def ask(self, lease: int, version: int, tokens: int = 8) -> None:
        grant = self.double.lease(lease, samples=1, tokens=tokens)
        self.double.send(self.box, replace(grant, version=self.keys[version], report_s=0.1))

    def spans(self, lease: int) -> list[VersionSpan]:
        """The reports of this lease."""
        reports = [each for each in self.double.said(LeaseProgress) if each.lease == lease]
        return [span for each in reports for sample in each.samples for span in sample.spans]

    async def writers(self, lease: int) -> set[VersionKey]:
        """The versions that wrote the result of this lease."""
        double = self.double
        await double.until(lambda: any(each.lease == lease for each in double.said(SampleFinished)))
        [result] = [each for each in double.said(SampleFinished) if each.lease == lease]
        return {span.key for span in result.spans}


async def test_named_versions_write_their_leases_whatever_is_served(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    adapters = await asyncio.to_thread(AdapterHarness, tmp_path / "models")
    site, base = Site(double, adapters), adapters.base.directory
    engines = [fake_engine(), fake_engine()]
    async with a_seed(double), a_worker(double, tmp_path / "box", *engines, base_model=base):
        await site.publish()
        site.ask(1, 0, tokens=CONTEXT_MAX - 100)
        second = await site.publish(held=(0,))
        third = await site.publish(held=(0, 1))
        zero, one, two = site.keys
        assert (second.held, third.held) == ((one, zero), (two, one, zero))
        for version in range(3):
            site.ask(2 + version, version)
            assert await site.writers(2 + version) == {site.keys[version]}
        fourth = await site.publish(held=(2, 0))
        assert fourth.held == (site.keys[3], two, zero)
        site.ask(5, 1)
        failed = await double.until_said(LeaseFailed, site.box)
        assert (failed.lease, failed.reason) == (5, "it does not hold version 1")
        before = len(site.spans(1))
        await double.until(lambda: len(site.spans(1)) >= before + 2)
        assert {span.key for span in site.spans(1)} == {zero}


async def test_only_what_all_engines_hold_is_held(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    adapters = await asyncio.to_thread(AdapterHarness, tmp_path / "models")
    site, base = Site(double, adapters), adapters.base.directory
    engines = [fake_engine("done", "done", "fails"), fake_engine("done", "doubtful")]
    async with a_seed(double), a_worker(double, tmp_path / "box", *engines, base_model=base):
        await site.publish()
        failed = await site.publish(held=(0,))
        assert isinstance(failed, RefitFailed)
        assert (failed.serving, failed.held) == (None, ())
        site.ask(1, 0)
        refused = await double.until_said(LeaseFailed, site.box)
        assert refused.reason == "no version is served"
        failed = await site.publish(held=(0,))
        assert isinstance(failed, RefitFailed)
        # The first engine failed again, and the other one was not asked.
        assert (failed.serving, failed.held) == (None, ())
        last = await site.publish(held=(0, 1))
        assert last.held == (site.keys[3],)
