"""Workers with a valid token lie to the real coordinator: they get the reason, nothing is believed, the run goes on."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from echo2d.client import AsyncCoordinator
from echo2d.core.base.codec import MESSAGE_BYTES_MAX
from echo2d.core.base.ids import Digest, FormId, LeaseId, SegmentId, Version
from echo2d.core.protocol.builds import PROTOCOL_VERSION, Build
from echo2d.core.protocol.control_messages import (
    Goodbye,
    LeaseGranted,
    RefitDone,
    SampleAnswered,
    SampleFinished,
    SegmentEncoded,
    ToCoordinator,
    VersionSpan,
    Welcome,
)
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens, unpack_tokens
from echo2d.net.control.client import ControlLink, Identity
from echo2d.net.control.refusals import PROTOCOL_FAULTS_MAX, REFUSED_S
from echo2d.runtime.coordinator.main import Opened, core_machine
from echo2d.tasks.sort_digits import answer
from echo2d.this_build import THIS_BUILD
from echo2d.views.status import print_status
from tests.support.control_link import HELLO, Owner, enrolled
from tests.support.scripted_core import learner, make_config, make_snapshot, serving

NOWHERE = Digest(bytes(32))
FLOOD = 1000
Lie = Callable[[SampleFinished], SampleFinished]


class Box(Owner):
    """A worker and its link."""

    def __init__(self, url: str, identity: Identity, name: str) -> None:
        super().__init__(replace(HELLO, name=name))
        self.link = ControlLink(url, identity, self, rng=random.Random(1))


@asynccontextmanager
async def joined(
    opened: Opened, run_dir: Path, name: str, *, shown: str = ""
) -> AsyncIterator[Box]:
    """shown: the name that it gives itself."""
    identity = await enrolled(run_dir, opened.url, name)
    async with linked(opened, identity, shown or name) as box:
        yield box


@asynccontextmanager
async def linked(opened: Opened, identity: Identity, name: str) -> AsyncIterator[Box]:
    box = Box(opened.url, identity, name)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(box.link.run())
        await box.hears(Welcome)
        yield box
        box.link.send(Goodbye("done"))
        box.link.leave()


def finished(lease: LeaseGranted, sample: int, digest: Digest) -> SampleFinished:
    """What an honest worker says: even samples are right, odd ones wrong."""
    right = answer(unpack_tokens(lease.prompt).tolist())
    tokens = right if sample % 2 == 0 else (*right[1:-1], right[0], right[-1])[1:]
    spans = (VersionSpan(0, len(tokens), Version(0), digest),)
    logprobs = pack_logprobs([-1.0] * len(tokens))
    return SampleFinished(
        lease.lease, lease.attempt, sample, pack_tokens(tokens), logprobs, spans, "stop"
    )


LIES: dict[str, tuple[Lie, str]] = {
    "nan": (
        lambda said: replace(said, logprobs=pack_logprobs([math.nan] * (len(said.tokens) // 4))),
        "logprob",
    ),
    "certain": (
        lambda said: replace(said, logprobs=pack_logprobs([0.5] * (len(said.tokens) // 4))),
        "logprob",
    ),
    "few-logprobs": (lambda said: replace(said, logprobs=said.logprobs[4:]), "logprobs for"),
    "beyond": (
        lambda said: replace(said, tokens=pack_tokens([17]) + said.tokens[4:]),
        "beyond the vocabulary",
    ),
    "negative": (
        lambda said: replace(said, tokens=pack_tokens([-1]) + said.tokens[4:]),
        "beyond the vocabulary",
    ),
    "endless": (lambda said: replace(said, tokens=said.tokens * 2000), "are allowed"),
    "half-a-token": (lambda said: replace(said, tokens=said.tokens + b"x"), "bytes"),
    "no-spans": (lambda said: replace(said, spans=()), "spans"),
    "other-version": (
        lambda said: replace(said, spans=(said.spans[0]._replace(digest=NOWHERE),)),
        "version 0",
    ),
    "never-given": (lambda said: replace(said, lease=LeaseId(1 << 62)), "no such lease"),
}


async def test_false_results_are_refused_and_the_batch_has_none_of_them(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path)
    run_dir = config.run.run_dir
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, core_machine) as opened, learner(run_dir, opened) as client:
        await client.open_session(0)
        digest = Digest(bytes.fromhex((await client.publish(0, snapshot)).digest))
        done = RefitDone(Version(0), digest, 0.0, memory_ok=None)
        for name, (lie, reason) in LIES.items():
            async with joined(opened, run_dir, name) as liar:
                liar.link.send(done)
                lease = await liar.hears(LeaseGranted)
                liar.link.send(lie(finished(lease, lease.samples[0], digest)))
                told: SampleAnswered = await liar.hears(SampleAnswered)
                assert not told.accepted, name
                assert reason in told.reason, name
        async with (
            joined(opened, run_dir, "honest") as honest,
            joined(opened, run_dir, "thief") as thief,
        ):
            honest.link.send(done)
            lease = await honest.hears(LeaseGranted)
            thief.link.send(finished(lease, lease.samples[0], digest))
            assert (await thief.hears(SampleAnswered)).reason == "the lease is over"
            await _deliver(honest, lease, digest, client)
        assert sum((await client.status())["results_refused"].values()) >= len(LIES)


async def _deliver(
    honest: Box, lease: LeaseGranted, digest: Digest, client: AsyncCoordinator
) -> None:
    """The honest box answers all its leases until the batch is full; nobody else has a part in it."""
    taking = asyncio.ensure_future(client.take_batch(1))
    while not taking.done():
        for sample in lease.samples:
            honest.link.send(finished(lease, sample, digest))
            assert (await honest.hears(SampleAnswered)).accepted
        waiting = asyncio.ensure_future(honest.hears(LeaseGranted))
        await asyncio.wait([waiting, taking], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            lease = waiting.result()
        else:
            waiting.cancel()
    batch = taking.result()
    honest_ids = {trajectory.worker for group in batch.groups for trajectory in group.trajectories}
    assert len(honest_ids) == 1
    assert sorted(trajectory.reward for trajectory in batch.groups[0].trajectories) == [0.0, 1.0]


async def test_a_breach_of_the_protocol_is_reported_and_ends_only_its_link(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run_dir = config.run.run_dir
    async with (
        serving(config, core_machine) as opened,
        learner(run_dir, opened) as client,
        joined(opened, run_dir, "bystander") as bystander,
    ):
        cases: dict[str, ToCoordinator] = {
            "pause_s, held_s and recompute_s must be finite": RefitDone(
                Version(0), NOWHERE, math.nan, memory_ok=None
            ),
            "only the seed encodes": SegmentEncoded(FormId("f" * 32), SegmentId(0), NOWHERE),
            "a second hello": bystander.hello(),
        }
        for number, (words, bad) in enumerate(cases.items()):
            async with joined(opened, run_dir, f"rogue-{number}") as rogue:
                rogue.link.send(bad)
                assert words in await rogue.ended.get()
        assert bystander.ended.empty()
        faults = (await client.status())["faults"]
        assert all(any(words in fault["text"] for fault in faults) for words in cases)


async def test_a_flood_of_results_under_a_forged_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path)
    async with (
        serving(config, core_machine) as opened,
        learner(config.run.run_dir, opened) as client,
        joined(opened, config.run.run_dir, "loud", shown="box\nall is lost [/x]") as loud,
    ):
        stranger = SampleFinished(LeaseId(1 << 62), 0, 0, b"", b"", (), "stop")
        for _ in range(FLOOD):
            loud.link.send(stranger)
        for _ in range(FLOOD):
            assert (await loud.hears(SampleAnswered)).reason == "no such lease"
        facts = await client.status()
    print_status(facts)
    assert "box all is lost [/x]" in capsys.readouterr().out
    assert len(facts["faults"]) < FLOOD


async def test_a_box_of_another_build_is_named_at_once_until_it_is_upgraded(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run_dir = config.run.run_dir
    async with serving(config, core_machine) as opened, learner(run_dir, opened) as client:
        identity = await enrolled(run_dir, opened.url, "gpu-7")
        later = PROTOCOL_VERSION + 1
        old = replace(HELLO, name="gpu-7", build=Build(later, later, "0.9.1"))
        link = ControlLink(opened.url, identity, Owner(old), rng=random.Random(1))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(link.run())
            while not (status := await client.status())["other_builds"]:
                pass
            link.leave()
        assert status["other_builds"] == [
            {"id": identity.peer, "name": "gpu-7", "build": "0.9.1", "protocol": later}
        ]
        (told,) = [each for each in status["alerts"] if each["kind"] == "peer_build"]
        assert told["sentence"].startswith("gpu-7 is of another build: echo2d 0.9.1")
        assert (status["build"], status["workers"]) == (THIS_BUILD.name, [])
        async with linked(opened, identity, "gpu-7"):
            status = await client.status()
            assert status["other_builds"] == []
            assert [each["build"] for each in status["workers"]] == [THIS_BUILD.name]


async def test_a_box_that_sends_message_bombs_is_refused_by_name_and_others_go_on(
    tmp_path: Path,
) -> None:
    """A bomb is 4 MiB of nested lists: unpacked whole, it would hold the event loop for seconds."""
    bomb = b"\x94" + msgpack.packb("LeaseProgress") + b"\x01\x01\xdc\x1f\x40" + b"\x91" * (4 << 20)
    config = make_config(tmp_path)
    run_dir = config.run.run_dir
    async with serving(config, core_machine) as opened, learner(run_dir, opened) as client:
        await client.open_session(0)
        async with (
            joined(opened, run_dir, "honest") as honest,
        ):
            identity = await enrolled(run_dir, opened.url, "bomber")
            for _ in range(PROTOCOL_FAULTS_MAX):
                # A new link does not wait for as long as it was told to.
                async with linked(opened, identity, "bomber") as bomber:
                    link = bomber.link._send_buffer
                    assert link is not None
                    link.put(bomb[:MESSAGE_BYTES_MAX])
                    await bomber.ended.get()
            status = await client.status()
            [refused] = status["refused_peers"]
            assert refused["name"] == "bomber"
            assert (refused["token"], refused["token_peers"]) == ("bomber", 1)
            assert 0.0 < refused["refused_s"] <= REFUSED_S
            assert status["peer_faults"] == PROTOCOL_FAULTS_MAX
            assert any(each["sentence"].startswith("bomber (") for each in status["alerts"])
            assert honest.ended.empty()
