"""The leases of a worker: across broken control links, at its end, and for a revoked version."""

import dataclasses
from pathlib import Path

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.control_messages import (
    Goodbye,
    Heartbeat,
    LeaseFailed,
    LeaseProgress,
    RefitDone,
    SampleFinished,
    VersionKey,
    VersionsRevoked,
)
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.engines.fake import FakeEngine, FakePolicy
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_seed, a_worker, spread


async def running(double: CoordinatorDouble, peer: PeerId) -> None:
    """Its engine is at work."""
    await double.until(lambda: any(beat.running for beat in double.said(Heartbeat, peer)))


async def test_leases_survive_a_broken_control_link(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with (
        a_seed(double),
        a_worker(
            double,
            tmp_path / "one",
            FakeEngine(FakePolicy(answer_tokens=(99, 99)), tokens_per_s=20.0),
        ),
    ):
        names = await double.peers(2)
        one = names["one"]
        await spread(double, 0, names["seed"], one)
        await double.until_said(RefitDone, one)
        double.send(one, double.lease(7, samples=1, tokens=30))
        await running(double, one)
        await double.close()
        await double.until(lambda: not double.connected)
        await double.open()
        await double.until(lambda: one in double.connected)
        assert [held.lease for held in double.hellos[one].leases] == [7]
        assert double.hellos[one].serving is not None
        result = await double.until_said(SampleFinished, one)
        assert len(unpack_tokens(result.tokens)) == 30


async def test_an_unanswered_result_is_sent_again(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        one = names["one"]
        await spread(double, 0, names["seed"], one)
        await double.until_said(RefitDone, one)
        double.answer_results = False
        double.send(one, double.lease(7, samples=1))
        await double.until_said(SampleFinished, one)
        await double.close()
        await double.open()
        await double.until_said(SampleFinished, one, count=2)
        first, second = double.said(SampleFinished, one)
        assert first == second


async def test_a_stopped_worker_gives_its_leases_back_and_says_goodbye(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    engine = FakeEngine(FakePolicy(answer_tokens=(99, 99)), tokens_per_s=20.0)
    async with a_seed(double), a_worker(double, tmp_path / "one", engine) as worker:
        names = await double.peers(2)
        one = names["one"]
        await spread(double, 0, names["seed"], one)
        await double.until_said(RefitDone, one)
        double.send(one, double.lease(3, tokens=99))
        await running(double, one)
        worker.stop("SIGTERM")
        goodbye = await double.until_said(Goodbye, one)
        assert goodbye == Goodbye("SIGTERM")
        assert double.said(LeaseFailed, one)[0].reason == "SIGTERM"


async def test_samples_of_a_stopped_worker_go_on_at_another_worker(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    engine = FakeEngine(FakePolicy(answer_tokens=(500, 500)), tokens_per_s=50.0)
    async with (
        a_seed(double),
        a_worker(double, tmp_path / "one", engine) as worker,
        a_worker(double, tmp_path / "two"),
    ):
        names = await double.peers(3)
        one, two = names["one"], names["two"]
        await spread(double, 0, names["seed"], one, two)
        for peer in (one, two):
            await double.until_said(RefitDone, peer)
        lease = double.lease(3, samples=1, tokens=500)
        double.send(one, lease)
        await double.until(
            lambda: any(progress.samples for progress in double.said(LeaseProgress, one))
        )
        heard = len(double.said(Heartbeat, one))
        await double.until_said(Heartbeat, one, count=heard + 2)  # tokens that are not told yet
        worker.stop("SIGTERM")
        await double.until_said(Goodbye, one)
        last, failed, _ = [message for peer, message in double.messages if peer == one][-3:]
        assert (type(last), type(failed)) == (LeaseProgress, LeaseFailed)
        deltas = [
            delta for progress in double.said(LeaseProgress, one) for delta in progress.samples
        ]
        spans = [span for delta in deltas for span in delta.spans]
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        begun = b"".join(delta.tokens for delta in deltas)
        assert len(begun) == 4 * spans[-1].end

        double.send(
            two,
            dataclasses.replace(lease, attempt=2, prompt=lease.prompt + begun, max_new_tokens=8),
        )
        result = await double.until_said(SampleFinished, two)
        assert 0 < len(unpack_tokens(result.tokens)) <= 8


async def test_a_revoked_version_is_served_no_more(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        one: PeerId = names["one"]
        facts, digest = await spread(double, 0, names["seed"], one)
        await double.until_said(RefitDone, one)
        double.send(
            one,
            VersionsRevoked(
                double.facts(0, 1, epoch=2).epoch, (VersionKey(facts.version, digest),)
            ),
        )
        double.send(one, double.lease(3))
        failed = await double.until_said(LeaseFailed, one)
        assert failed.reason == "no version is served"
