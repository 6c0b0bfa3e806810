"""Workers joined to a seed and a coordinator by hand: real links, stores, control links, signatures; fake engines."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from echo2d.config import WorkerConfig
from echo2d.core.base.ids import Digest, FormId, FrameId, PeerId, Version
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    EdgeBroken,
    FormEncoded,
    FrameAccused,
    Goodbye,
    Heartbeat,
    LeaseFailed,
    LeaseProgress,
    RefitDone,
    RefitFailed,
    Refused,
    SampleFinished,
    SignedRoot,
    TransferReport,
    VersionKey,
    VersionSpan,
    VersionsRevoked,
    VersionVerified,
)
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.core.weights.encoding import FormFacts
from echo2d.core.weights.signed_index import Root
from echo2d.core.worker.events import EngineRefitFailed, EngineRefitted, RefitEngines
from echo2d.engines.fake import FakeEngine
from echo2d.errors import OperatorFault, StoreFault
from echo2d.runtime.peer.frame_holdings import FrameHoldings
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.worker.engine_refit import EngineRefits
from echo2d.runtime.worker.main import run_worker
from echo2d.store.disk import write_at
from echo2d.store.frames import FrameStore
from echo2d.store.snapshots import build_manifest
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_model, a_seed, a_worker, config_of, spread, spread_striped


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[CoordinatorDouble]:
    async with CoordinatorDouble.serving(tmp_path / "run") as double:
        yield double


async def running(double: CoordinatorDouble, peer: PeerId) -> None:
    """Its engine is at work."""
    await double.until(lambda: any(beat.running for beat in double.said(Heartbeat, peer)))


async def test_a_version_travels_down_the_chain_and_writes_tokens(
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


async def test_striped_chains_with_a_relay_peer_in_them(
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


async def test_a_newcomer_fetches_from_those_who_have_the_version(
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


async def test_a_delta_form_is_applied_to_the_version_held(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        chain = [names["seed"], names["one"]]
        _, base = await spread(double, 0, *chain)
        await double.until_said(RefitDone)
        _, digest, _ = await spread_delta(double, base, *chain)
        done = await double.until_said(RefitDone, count=2)
        assert (done.digest, done.memory_ok) == (digest, True)
        assert (await double.until_said(FormEncoded, count=2)).wire_bytes < 2000


async def spread_delta(
    double: CoordinatorDouble, base: Digest, *chain: PeerId, base_path: str = "versions/0"
) -> tuple[FormFacts, Digest, Path]:
    """Publish version 0 with another config.json as version 1, a delta from version 0 or another one."""
    path, _ = await a_model(double, 0, folder="1")
    await asyncio.to_thread(
        (path / "config.json").write_text, '{"architectures": ["Qwen3ForCausalLM"], "x": 1}'
    )
    digest = (await asyncio.to_thread(build_manifest, path)).digest
    facts = dataclasses.replace(double.facts(1, 2), kind="delta", base_digest=base)
    double.start_form(facts)
    double.chain(facts.form, chain, plan=2)
    order = double.order(facts, digest, path)
    double.send(chain[0], dataclasses.replace(order, kind="delta", base_path=base_path))
    return facts, digest, path


async def test_of_a_base_that_rotted_only_the_damaged_chunk_is_fetched_in_full(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with (
        a_seed(double) as seed,
        a_worker(double, tmp_path / "one") as one,
        a_worker(double, tmp_path / "two") as two,
    ):
        names = await double.peers(3)
        chain = [names[name] for name in ("seed", "one", "two")]
        _, base = await spread(double, 0, *chain)
        await double.until_said(RefitDone, count=2)
        [slot] = one._state._versions._standing.values()
        await asyncio.to_thread(write_at, Path(slot) / "model-0.safetensors", b"rot", 3000)
        _, digest, path = await spread_delta(double, base, *chain)
        await double.until_said(VersionVerified, names["two"], count=2)
        failed = await double.until_said(ApplyFailed, names["one"])
        assert (failed.lacks_base, failed.reason) == (
            True,
            "the current slot is damaged under 1 delta chunks",
        )

        full = double.facts(1, 2)
        double.start_form(full)
        double.send(chain[0], double.order(full, digest, path))
        await double.until(lambda: Root.decode(double.roots[-1].root).form == full.form)
        double.chain(full.form, [chain[0], chain[2], chain[1]], plan=3)
        done = await double.until_said(RefitDone, names["one"], count=2)
        assert (done.digest, done.memory_ok) == (digest, True)
        wire_bytes = (await double.until_said(FormEncoded, count=3)).wire_bytes
        assert seed._receiver._sent.get(full.form, 0) < 0.1 * wire_bytes, (
            "who has the version makes its frames"
        )
        assert 0.4 * wire_bytes < two._receiver._sent[full.form] < 0.6 * wire_bytes, (
            "one shard of two"
        )


async def test_a_delta_from_another_version_touches_nothing(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one") as one:
        names = await double.peers(2)
        chain = [names["seed"], names["one"]]
        await spread(double, 0, *chain)
        await double.until_said(RefitDone)
        slot = await asyncio.to_thread(one._slots.current)
        _, other = await a_model(double, 9, folder="other")
        await spread_delta(double, other, *chain, base_path="versions/other")
        failed = await double.until_said(ApplyFailed)
        assert (failed.lacks_base, failed.reason) == (
            True,
            "the current slot is not the base of this delta",
        )
        assert await asyncio.to_thread(one._slots.current) == slot
        assert not (await asyncio.to_thread(one._slots.directories))[1].exists(), (
            "the spare slot was not begun"
        )


async def test_versions_follow_each_other(double: CoordinatorDouble, tmp_path: Path) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        for version in range(3):
            _, digest = await spread(double, version, names["seed"], names["one"])
            done = await double.until_said(RefitDone, count=version + 1)
            assert (done.version, done.digest) == (version, digest)


async def test_a_slot_that_rots_before_its_refit_is_never_loaded_and_written_again(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refit, rotten = EngineRefits.refit, Version(1)

    async def rot_and_refit(
        self: EngineRefits, order: RefitEngines
    ) -> EngineRefitted | EngineRefitFailed:
        if order.version == rotten and not double.said(RefitFailed):
            path = Path(order.path) / "model-1.safetensors"
            await asyncio.to_thread(write_at, path, b"rot", 3000)
            await asyncio.to_thread(
                os.utime, path, (0, 0)
            )  # clocks of files may tick too slowly for a test
        return await refit(self, order)

    monkeypatch.setattr(EngineRefits, "refit", rot_and_refit)
    async with a_seed(double) as seed, a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        _, old = await spread(double, 0, names["seed"], names["one"])
        await double.until_said(RefitDone)
        facts, new = await spread(double, 1, names["seed"], names["one"])
        failed = await double.until_said(RefitFailed)
        assert (failed.serving, "is damaged" in failed.reason) == (
            VersionKey(Version(0), old),
            True,
        )
        sent = seed._receiver._sent[facts.form]
        done = await double.until_said(RefitDone, count=2)
        assert (done.version, done.digest, done.memory_ok) == (1, new, True)
        assert len(double.said(VersionVerified)) == 3
        assert seed._receiver._sent[facts.form] == sent


async def test_a_chunk_that_rots_in_the_current_slot_is_not_copied_into_the_next(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    async with a_seed(double), a_worker(double, tmp_path / "one") as one:
        names = await double.peers(2)
        await spread(double, 0, names["seed"], names["one"])
        await double.until_said(RefitDone)
        [path] = one._state._versions._standing.values()
        await asyncio.to_thread(
            write_at, Path(path) / "config.json", b"rot", 0
        )  # the same in all versions
        _, digest = await spread(double, 1, names["seed"], names["one"])
        done = await double.until_said(RefitDone, count=2)
        assert (done.version, done.digest) == (1, digest)
        assert not double.said(ApplyFailed)


async def test_leases_outlive_the_control_link(double: CoordinatorDouble, tmp_path: Path) -> None:
    async with (
        a_seed(double),
        a_worker(double, tmp_path / "one", FakeEngine(tokens_per_s=20.0, answer_tokens=(99, 99))),
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


async def test_a_lying_peer_is_accused_and_nothing_of_its_frame_is_used(
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
        kept = json.loads(
            await asyncio.to_thread((tmp_path / "one" / "state" / "accepted.json").read_text)
        )
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


async def test_a_full_disk_is_reported_and_costs_nothing_else(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_after(version: int) -> Callable[..., None]:
        put = FrameStore.put_verified

        def put_verified(self: FrameStore, form: FormId, *frames: object) -> None:
            if "seed" not in str(self._root) and self._forms[form].facts.version == version:
                raise StoreFault(f"storing frames in {form} failed: No space left on device")
            put(self, form, *frames)  # type: ignore[arg-type]

        return put_verified

    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        one = names["one"]
        await spread(double, 0, names["seed"], one)
        await double.until_said(RefitDone, one)
        with monkeypatch.context() as patched:
            patched.setattr(FrameStore, "put_verified", full_after(1))
            facts, _ = await spread(double, 1, names["seed"], one)
            failed = await double.until_said(ApplyFailed, one)
            assert (failed.form, failed.reason.endswith("No space left on device")) == (
                facts.form,
                True,
            )
            double.send(one, double.lease(1, samples=1))
            result = await double.until_said(SampleFinished, one)
            assert result.spans[0].version == 0
        await spread(double, 2, names["seed"], one)
        done = await double.until_said(RefitDone, one, count=2)
        assert done.version == 2


async def test_a_form_that_cannot_even_begin_is_reported(
    double: CoordinatorDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = FrameStore.begin

    def full(self: FrameStore, facts: FormFacts) -> None:
        if "seed" not in str(self._root):
            raise StoreFault("beginning a form failed: No space left on device")
        begin(self, facts)

    async with a_seed(double), a_worker(double, tmp_path / "one"):
        names = await double.peers(2)
        one = names["one"]
        with monkeypatch.context() as patched:
            patched.setattr(FrameStore, "begin", full)
            facts, _ = await spread(double, 0, names["seed"], one)
            failed = await double.until_said(ApplyFailed, one)
            assert (failed.form, failed.reason.endswith("No space left on device")) == (
                facts.form,
                True,
            )
            double.send(one, double.roots[-1])
            await double.until_said(ApplyFailed, one, count=2)
        for plan in range(
            2, 12
        ):  # told again, as a coordinator does, for one telling may meet the failure before it
            double.send(one, double.roots[-1])
            double.chains(facts.form, [(names["seed"], one)], plan=plan)
            with contextlib.suppress(TimeoutError):
                await double.until(lambda: bool(double.said(RefitDone, one)), timeout_s=1.0)
                break
        await double.until_said(RefitDone, one)


async def test_a_stopped_worker_gives_back_and_says_goodbye(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    engine = FakeEngine(tokens_per_s=20.0, answer_tokens=(99, 99))
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


async def test_what_a_stopped_worker_has_goes_on_at_another_one(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    engine = FakeEngine(tokens_per_s=50.0, answer_tokens=(500, 500))
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


async def test_a_revoked_token_ends_the_worker_with_one_line(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    config = await config_of(double, tmp_path / "one")
    await asyncio.to_thread(double.access.revoke, "one")
    with pytest.raises(OperatorFault, match="token one was revoked"):
        await run_worker(config)


async def test_the_daemon_serves_until_sigterm(
    double: CoordinatorDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    config = dataclasses.replace(await config_of(double, tmp_path / "one"), metrics_port=port)
    async with a_seed(double), asyncio.TaskGroup() as tasks:
        daemon = tasks.create_task(run_worker(config))
        names = await double.peers(2)
        await spread(double, 0, names["seed"], names["one"])
        await double.until_said(RefitDone)
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{port}/metrics") as answer,
        ):
            assert "echo2d_serving_version 0.0" in await answer.text()
        os.kill(os.getpid(), signal.SIGTERM)
        await double.until_said(Goodbye)
        double.sessions.close(double.connected[names["one"]])
        assert await daemon == 0
    listen = double.hellos[names["one"]].listen
    assert listen is not None
    assert any(
        message.endswith(f" listen={listen.host}:{listen.port}") for message in caplog.messages
    )


async def test_a_session_refused_for_good_ends_the_daemon(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    config = await config_of(double, tmp_path / "one")
    async with asyncio.TaskGroup() as tasks:
        daemon = tasks.create_task(_fault_of(config))
        names = await double.peers(1)
        double.send(names["one"], Refused("revoked", "token one was revoked", permanent=True))
        assert "refused this peer (revoked)" in await daemon


async def _fault_of(config: WorkerConfig) -> str:
    with pytest.raises(OperatorFault) as fault:
        await run_worker(config)
    return str(fault.value)


async def test_one_worker_per_state_directory(double: CoordinatorDouble, tmp_path: Path) -> None:
    config = await config_of(double, tmp_path / "one")
    await asyncio.to_thread(config.state_dir.mkdir)
    other = await asyncio.to_thread(StateDir, config.state_dir)
    assert stat.S_IMODE((await asyncio.to_thread(config.state_dir.stat)).st_mode) == 0o700
    with pytest.raises(OperatorFault, match="is in use by another worker"):
        await run_worker(config)
    other.close()


@pytest.mark.parametrize("change", [{"url": "http://203.0.113.9:1"}, {"listen_host": "0.0.0.0"}])
async def test_off_loopback_only_with_tls_or_when_told_to(
    double: CoordinatorDouble, tmp_path: Path, change: dict[str, str]
) -> None:
    config = await config_of(double, tmp_path / "one")
    with pytest.raises(OperatorFault, match=r"is not loopback.*no TLS.*--no-tls"):
        await run_worker(dataclasses.replace(config, **change))  # type: ignore[arg-type]
