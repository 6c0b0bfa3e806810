"""Frames that a peer holds are not fetched: after a restart, in the middle of a form, from a base model. Rotten frames
are fetched again.
"""

import asyncio
import shutil
from pathlib import Path

import pytest

from echo2d.core.base.ids import FormId, FrameId, SegmentId, Version, frame_id, is_table
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    EdgeBroken,
    EncodeFailed,
    ForgetForm,
    FormEncoded,
    FrameAccused,
    RefitDone,
    VersionKey,
    VersionVerified,
)
from echo2d.core.relay import disk_frames
from echo2d.core.weights.form import FormFacts
from echo2d.runtime.peer import frame_holdings as holdings_module
from echo2d.runtime.peer.frame_holdings import FrameHoldings
from echo2d.runtime.seed.main import Seed
from echo2d.runtime.worker.main import Worker
from echo2d.store.disk import write_at
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_model, a_seed, a_worker, spread, spread_striped
from tests.support.polling import HANG_S

FIRST = SegmentId(0)


def sent(peer: Seed | Worker, form: FormId) -> int:
    """Bytes of frames and tables that went out."""
    return peer._receiver._sent.get(form, 0)


def books(peer: Seed | Worker) -> FrameHoldings:
    return peer._receiver.holdings


def bytes_of(seed: Seed, form: FormId, frames: set[FrameId]) -> int:
    index = books(seed).index(form)
    assert index is not None
    return sum(index.length(frame) or 0 for frame in frames)


async def rot(peer: Seed | Worker, facts: FormFacts, frame: FrameId) -> None:
    """The frame's bytes on the peer's disk change, and it has them nowhere else."""
    index = books(peer).index(facts.form)
    assert index is not None
    span = index.span(frame)
    assert span is not None
    path = books(peer)._store._root / facts.form / "0000.frames"
    await asyncio.to_thread(write_at, path, b"rot", span.offset_in_segment)
    books(peer)._recent.forget(facts.form)


# --- restarts


async def test_a_restarted_peer_fetches_no_frame_again(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double) as seed:
        async with a_worker(double, tmp_path / "one", relay_only=True):
            names = await double.peers(2)
            chain = [names["seed"], names["one"]]
            facts, _ = await spread(double, 0, *chain)
            await double.until_said(VersionVerified)
        await double.until(lambda: len(double.connected) == 1)
        before = sent(seed, facts.form)
        assert before > 500_000
        async with a_worker(double, tmp_path / "one", relay_only=True):
            await double.peers(2)
            double.chain(facts.form, chain, plan=2)
            await double.until_said(VersionVerified, count=2)
            assert sent(seed, facts.form) == before


async def test_a_frame_that_arrives_although_it_is_held_is_counted(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one", relay_only=True) as one:
        names = await double.peers(2)
        facts, _ = await spread(double, 0, names["seed"], names["one"])
        await double.until_said(VersionVerified)
        again = frame_id(SegmentId(0), 1), memoryview(b"whatever")
        before = books(one).duplicates(facts.form)
        assert books(one).put_at_once(facts.form, *again)
        assert await books(one).put_frames(facts.form, [again]) == set()
        assert books(one).duplicates(facts.form) == before + 2


async def test_a_peer_restarted_in_the_middle_of_a_form_fetches_only_the_rest(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, half, go_on = FrameHoldings.load, 20, asyncio.Event()
    served: list[FrameId] = []

    async def slow_load(self: FrameHoldings, form: FormId, frame: FrameId) -> memoryview:
        served.append(frame)
        if len(served) > half:
            await go_on.wait()
        return await load(self, form, frame)

    monkeypatch.setattr(FrameHoldings, "load", slow_load)
    monkeypatch.setattr(FrameHoldings, "in_memory", lambda *_: None)
    async with a_seed(double) as seed:
        async with a_worker(double, tmp_path / "one") as worker:
            names = await double.peers(2)
            chain = [names["seed"], names["one"]]
            facts, _ = await spread_striped(double, 0, chain, weight_bytes=4 << 20)
            await double.until(lambda: len(books(worker).held(facts.form)) >= half - 1)
            async with asyncio.timeout(HANG_S):
                while len(books(worker).held(facts.form)) < half:
                    await books(worker).changed()
        await double.until(lambda: len(double.connected) == 1)
        held, before = set(books(worker).held(facts.form)), sent(seed, facts.form)
        go_on.set()
        async with a_worker(double, tmp_path / "one"):
            await double.peers(2)
            double.chain(facts.form, chain, plan=2)
            await double.until_said(RefitDone)
            whole = set(books(seed).held(facts.form))
            assert 10 < len(held) < len(whole) // 2
            assert sent(seed, facts.form) - before == bytes_of(seed, facts.form, whole - held)


# --- rot


async def test_a_frame_damaged_at_a_relay_is_fetched_again_and_delays_no_peer(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double) as seed, a_worker(double, tmp_path / "one") as one:
        names = await double.peers(2)
        facts, _ = await spread(double, 0, names["seed"], names["one"])
        await double.until_said(RefitDone)
        before = sent(seed, facts.form)
        await rot(one, facts, FrameId(3))
        async with a_worker(double, tmp_path / "two"):
            names = await double.peers(3)
            double.chain(facts.form, [names[name] for name in ("seed", "one", "two")], plan=2)
            await double.until_said(RefitDone, names["two"])
        assert sent(seed, facts.form) - before == bytes_of(seed, facts.form, {FrameId(3)})
        assert not double.said(FrameAccused)
        assert not double.said(EdgeBroken)


async def test_a_frame_that_rots_at_the_seed_is_made_again(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double) as seed:
        names = await double.peers(1)
        facts, _ = await spread(double, 0, names["seed"])
        await double.until(lambda: bool(books(seed).whole_forms()))
        await rot(seed, facts, FrameId(3))
        async with a_worker(double, tmp_path / "one"):
            names = await double.peers(2)
            double.chain(facts.form, [names["seed"], names["one"]], plan=2)
            await double.until_said(RefitDone)
        assert FrameId(3) in books(seed).held(facts.form)
        assert not double.said(FrameAccused)
        assert not double.said(EdgeBroken)


async def test_frames_whose_file_is_gone_at_the_seed_are_made_again(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double) as seed:
        names = await double.peers(1)
        facts, digest = await spread(double, 0, names["seed"])
        await double.until(lambda: bool(books(seed).whole_forms()))
        await rot(seed, facts, FrameId(3))
        await asyncio.to_thread((books(seed)._store._root / facts.form / "0000.frames").unlink)
        async with a_worker(double, tmp_path / "one"):
            names = await double.peers(2)
            double.chain(facts.form, [names["seed"], names["one"]], plan=2)
            assert (await double.until_said(RefitDone)).digest == digest


@pytest.mark.parametrize("folder", [False, True])
async def test_a_frame_that_is_gone_for_good_ends_its_form_and_not_the_run(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, folder: bool
) -> None:
    """The seed says so, says it again if it is told to encode the form again, and the next version spreads."""
    monkeypatch.setattr(disk_frames, "CHILD_GONE_S", 0.5)
    monkeypatch.setattr(holdings_module, "LOST_WAIT_S", 0.1)
    async with a_seed(double) as seed, a_worker(double, tmp_path / "one") as one:
        names = await double.peers(2)
        chain = [names["seed"], names["one"]]
        _, old = await spread(double, 0, *chain)
        await double.until_said(RefitDone)
        path, digest = await a_model(double, 1)
        facts = double.facts(1, 2)
        double.start_form(facts)
        order = double.order(facts, digest, path)
        double.send(names["seed"], order)
        await double.until_said(FormEncoded, count=2)
        await rot(seed, facts, FrameId(3))
        await asyncio.to_thread(shutil.rmtree, path)
        if folder:
            await asyncio.to_thread(shutil.rmtree, books(seed)._store._root / facts.form)
        double.chain(facts.form, chain, plan=2)
        gone = await double.until_said(EncodeFailed)
        assert (gone.form, gone.reason.startswith("frame ")) == (facts.form, True)
        double.send(names["seed"], order)
        assert "cannot be read" in (await double.until_said(EncodeFailed, count=2)).reason
        for peer in chain:
            double.send(peer, ForgetForm(facts.form))
        assert one._state.serving == VersionKey(Version(0), old)
        await spread(double, 2, *chain)
        assert (await double.until_said(RefitDone, count=2)).version == 2
        assert not double.said(FrameAccused)


async def test_a_form_that_lost_everything_is_encoded_again_for_those_that_wait(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_frames, "CHILD_GONE_S", 0.5)
    monkeypatch.setattr(holdings_module, "LOST_WAIT_S", 0.1)
    async with a_seed(double) as seed:
        names = await double.peers(1)
        path, digest = await a_model(double, 0)
        facts = double.facts(0, 1)
        double.start_form(facts)
        order = double.order(facts, digest, path)
        double.send(names["seed"], order)
        await double.until_said(FormEncoded)
        await rot(seed, facts, FrameId(3))
        await asyncio.to_thread(shutil.rmtree, books(seed)._store._root / facts.form)
        async with a_worker(double, tmp_path / "one"):
            names = await double.peers(2)
            double.chain(facts.form, [names["seed"], names["one"]], plan=2)
            await double.until_said(EncodeFailed)
            double.send(names["seed"], order)
            await double.until_said(FormEncoded, count=2)
            double.chain(facts.form, [names["seed"], names["one"]], plan=3)
            assert (await double.until_said(RefitDone)).digest == digest


async def test_a_frame_that_rots_before_it_is_applied_is_fetched_again(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, rotten = FrameHoldings._hold, FrameId(3)

    def hold_and_rot(
        self: FrameHoldings, form: FormId, frame: FrameId, payload: memoryview
    ) -> None:
        if (
            frame == rotten
            and "seed" not in str(self._store._root)
            and not any(here.lost for here in self._forms.values())
        ):
            index = self.index(form)
            assert index is not None
            span = index.span(frame)
            assert span is not None
            write_at(self._store._root / form / "0000.frames", b"rot", span.offset_in_segment)
        hold(self, form, frame, payload)

    monkeypatch.setattr(FrameHoldings, "_hold", hold_and_rot)
    async with a_seed(double), a_worker(double, tmp_path / "one") as one:
        names = await double.peers(2)
        facts, digest = await spread(double, 0, names["seed"], names["one"])
        done = await double.until_said(RefitDone)
        assert (done.digest, done.memory_ok) == (digest, True)
        assert books(one)._forms[facts.form].lost == 1
        assert double.said(ApplyFailed) == []


async def test_a_disk_that_damages_everything_is_given_up(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings_module, "LOST_FRAMES_MAX", 0)
    async with a_seed(double), a_worker(double, tmp_path / "one") as one:
        names = await double.peers(2)
        facts, _ = await spread(double, 0, names["seed"], names["one"])
        await double.until_said(RefitDone)
        await rot(one, facts, FrameId(3))
        async with a_worker(double, tmp_path / "two"):
            names = await double.peers(3)
            double.chain(facts.form, [names[name] for name in ("seed", "one", "two")], plan=2)
            failed = await double.until_said(ApplyFailed)
            assert failed.reason == "this disk damages what is written to it: 1 frames"


# --- a base model


async def test_a_version_that_a_peer_holds_is_not_fetched(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    path, _ = await a_model(double, 0, folder="base")
    await asyncio.to_thread(shutil.copytree, path, tmp_path / "base")
    async with (
        a_seed(double) as seed,
        a_worker(double, tmp_path / "one", base_model=tmp_path / "base") as one,
        a_worker(double, tmp_path / "two") as two,
    ):
        names = await double.peers(3)
        facts, digest = await spread(double, 0, names["seed"], names["one"], names["two"])
        for name in ("one", "two"):
            done = await double.until_said(RefitDone, names[name])
            assert (done.digest, done.memory_ok) == (digest, True)
        whole = set(books(seed).held(facts.form))
        assert sent(seed, facts.form) == bytes_of(seed, facts.form, set(filter(is_table, whole)))
        assert sent(one, facts.form) == bytes_of(seed, facts.form, whole), (
            "it serves what it did not fetch"
        )
        assert sent(two, facts.form) == 0
        await spread(double, 1, names["seed"], names["one"], names["two"])
        assert (await double.until_said(RefitDone, names["two"], count=2)).version == 1


async def test_only_what_differs_from_the_base_model_is_fetched(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    path, _ = await a_model(double, 0, folder="base")
    await asyncio.to_thread(shutil.copytree, path, tmp_path / "cache")
    (tmp_path / "base").mkdir()
    for file in (tmp_path / "cache").iterdir():  # as a download cache keeps them
        (tmp_path / "base" / file.name).symlink_to(file)
    await asyncio.to_thread(write_at, tmp_path / "cache" / "model-1.safetensors", b"other", 1000)
    async with (
        a_seed(double) as seed,
        a_worker(double, tmp_path / "one", base_model=tmp_path / "base"),
    ):
        names = await double.peers(2)
        facts, digest = await spread(double, 0, names["seed"], names["one"])
        done = await double.until_said(RefitDone)
        assert done.digest == digest
        index = books(seed).index(facts.form)
        assert index is not None
        largest = max(index.spans(FIRST), key=lambda span: (span.length, span.frame)).chunk
        other = {span.frame for span in index.chunk_spans(largest)} | {FrameId(0)}
        assert sent(seed, facts.form) == bytes_of(seed, facts.form, other)
        assert len(other) > 3
