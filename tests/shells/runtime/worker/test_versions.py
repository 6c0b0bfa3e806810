"""Versions on their way from the seed through workers to engines; some peers lie, and some roots are forged."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from echo2d.core.base.ids import FormId, FrameId
from echo2d.core.protocol.control_messages import (
    EdgeBroken,
    FrameAccused,
    RefitDone,
    SampleFinished,
    SignedRoot,
    TransferReport,
    VersionKey,
    VersionSpan,
    VersionsRevoked,
    VersionVerified,
)
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.runtime.peer.frame_holdings import FrameHoldings
from echo2d.store.sealed import unsealed
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_model, a_seed, a_worker, spread, spread_striped
from tests.support.polling import poll


async def test_a_version_is_sent_down_the_chain_and_served(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with (
        a_seed(double),
        a_worker(double, tmp_path / "one"),
        a_worker(double, tmp_path / "two"),
    ):
        names = await double.peers(3)
        facts, digest = await spread(double, 0, names["seed"], names["one"], names["two"])
        for name in ("one", "two"):
            done = await double.until_said(RefitDone, names[name])
            assert (done.version, done.digest, done.memory_ok) == (0, digest, True)
            assert double.said(VersionVerified, names[name]) == [
                VersionVerified(facts.form, facts.version, digest)
            ]
        double.send(names["two"], double.lease(7))
        await double.until(lambda: len(double.said(SampleFinished)) == 2)
        for result in double.said(SampleFinished, names["two"]):
            length = len(unpack_tokens(result.tokens))
            assert result.spans == (VersionSpan(0, length, done.version, digest),)
        sent = await double.until_said(TransferReport, names["seed"])
        assert 0 < sent.sent_bytes < 1.1 * sent.payload_bytes, "the seed sends each byte about once"


async def test_a_version_arrives_over_striped_chains_with_a_relay_peer(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with (
        a_seed(double),
        a_worker(double, tmp_path / "one", relay_only=True),
        a_worker(double, tmp_path / "two"),
        a_worker(double, tmp_path / "three"),
    ):
        names = await double.peers(4)
        seed, one, two, three = (names[name] for name in ("seed", "one", "two", "three"))
        chains = [(seed, one, two, three), (seed, two, three, one), (seed, three, one, two)]
        facts, digest = await spread_striped(double, 0, *chains, weight_bytes=4 << 20)
        for peer in (one, two, three):
            verified = await double.until_said(VersionVerified, peer)
            assert verified == VersionVerified(facts.form, facts.version, digest)
        for peer in (two, three):
            await double.until_said(RefitDone, peer)
        assert double.hellos[one].kind == "relay"
        assert double.said(RefitDone, one) == []
        assert double.said(EdgeBroken) == []


async def test_a_newcomer_fetches_from_peers_that_have_the_version(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with (
        a_seed(double),
        a_worker(double, tmp_path / "one"),
        a_worker(double, tmp_path / "two"),
    ):
        chain = [(await double.peers(3))[name] for name in ("seed", "one", "two")]
        facts, digest = await spread_striped(double, 0, chain, weight_bytes=4 << 20)
        await double.until_said(VersionVerified, count=2)
        async with a_worker(double, tmp_path / "three"):
            three = (await double.peers(4))["three"]
            double.chains(facts.form, [(*chain, three)], 2, sources=chain[1:])
            assert await double.until_said(VersionVerified, three) == VersionVerified(
                facts.form, facts.version, digest
            )
            report = await double.until_said(TransferReport, three)
            assert {sample.peer for sample in report.links} == set(chain[1:])
            assert double.said(EdgeBroken, three) == []


async def test_workers_serve_one_version_after_another(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        for version in range(3):
            _, digest = await spread(double, version, names["seed"], names["one"])
            done = await double.until_said(RefitDone, count=version + 1)
            assert (done.version, done.digest) == (version, digest)


async def test_a_restarted_worker_needs_no_transfer(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "two"):
        async with a_worker(double, tmp_path / "one"):
            names = await double.peers(3)
            one = names["one"]
            facts, digest = await spread(double, 0, names["seed"], one, names["two"])
            await double.until_said(RefitDone, names["two"])
            await double.until_said(RefitDone, one)
            boot = double.hellos[one].boot_id
        await double.until(lambda: one not in double.connected)
        async with a_worker(double, tmp_path / "one"):
            done = await double.until_said(RefitDone, one, count=2)
            assert (done.version, done.digest) == (facts.version, digest)
            assert double.hellos[one].boot_id != boot
            assert double.hellos[one].holding == (VersionKey(facts.version, digest),)
            assert double.hellos[one].serving is None


async def test_a_peer_that_sends_a_false_frame_is_accused_and_the_frame_is_not_used(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FrameHoldings.in_memory

    def lie(self: FrameHoldings, form: FormId, frame: FrameId) -> memoryview | None:
        payload = honest(self, form, frame)
        lies = payload is not None and "one" in str(self._store._root) and frame == 3
        return (
            memoryview(bytes([payload[0] ^ 1]) + bytes(payload[1:]))
            if lies and payload
            else payload
        )

    monkeypatch.setattr(FrameHoldings, "in_memory", lie)
    async with (
        a_seed(double),
        a_worker(double, tmp_path / "one"),
        a_worker(double, tmp_path / "two"),
    ):
        names = await double.peers(3)
        facts, _ = await spread(double, 0, names["seed"], names["one"], names["two"])
        accused = await double.until_said(FrameAccused, names["two"])
        assert accused == FrameAccused(facts.form, accused.frame, names["one"])
        assert accused.frame == 3
        broken = await double.until_said(EdgeBroken, names["two"])
        assert broken.peer == names["one"]
        assert double.said(VersionVerified, names["two"]) == []
        double.chain(facts.form, [names["seed"], names["two"], names["one"]], plan=9)
        await double.until_said(RefitDone, names["two"])


async def test_roots_that_are_not_signed_or_too_old_are_refused(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        one = names["one"]
        await spread(double, 5, names["seed"], one)
        await double.until_said(RefitDone, one)
        accepted = tmp_path / "one" / "state" / "accepted.json"
        # A refit does not wait for it.
        await asyncio.to_thread(poll, accepted.exists)
        kept = unsealed(await asyncio.to_thread(accepted.read_bytes))
        assert kept == {"run_id": double.run.run_id, "publish_seq": 6}
        path, digest = await a_model(double, 6)
        facts = double.facts(6, 7)
        double.start_form(facts)
        double.refused_roots.add(facts.form)
        double.send(names["seed"], double.order(facts, digest, path))
        forged = dataclasses.replace(double.roots[-1], signature=bytes(64))
        double.send(one, SignedRoot(forged.root, forged.signature))
        await spread(double, 4, names["seed"], one)
        double.send(one, VersionsRevoked(double.facts(5, 6).epoch, ()))
        await spread(double, 7, names["seed"], one)
        done = await double.until_said(RefitDone, one, count=2)
        assert done.version == 7
        assert {message.version for message in double.said(VersionVerified, one)} == {5, 7}
