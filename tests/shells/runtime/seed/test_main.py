"""The seed: encodes the ordered versions, reports every segment, keeps serving, and says when it cannot."""

import asyncio
import dataclasses
import functools
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Digest
from echo2d.core.protocol.control_messages import (
    DeltasKept,
    EncodeFailed,
    EncodeVersion,
    ForgetForm,
    FormEncoded,
    SegmentEncoded,
    VersionVerified,
)
from echo2d.core.topology.uplink_pace import BURST_S, HEADERS
from echo2d.core.weights.form import FormFacts
from echo2d.core.weights.kept_deltas import FormKind
from echo2d.net.security.auth import public_bytes
from echo2d.runtime.seed.delta_bases import BaseCopy
from echo2d.runtime.seed.encoder import Encoder
from echo2d.runtime.seed.supervisor import SEED_MODULE, SeedHandover, supervise_seed
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import sync, write_at
from echo2d.store.frames import FrameStore
from echo2d.store.snapshots import build_manifest
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_model, a_seed, a_worker, spread
from tests.support.snapshots import in_page_cache, write_snapshot

FRAME_BYTES = 64 << 10


async def an_order(double: CoordinatorDouble, version: int) -> EncodeVersion:
    path, digest = await a_model(double, version)
    facts = double.facts(version, version + 1)
    double.start_form(facts)
    return double.order(facts, digest, path)


async def test_an_ordered_form_is_encoded_onto_disk(double: CoordinatorDouble) -> None:
    async with a_seed(double):
        [seed] = (await double.peers(1)).values()
        order = await an_order(double, 0)
        double.send(seed, order)
        encoded = await double.until_said(FormEncoded)
        assert (encoded.form, encoded.snapshot) == (order.form, order.digest)
        assert encoded.segments == len(double.said(SegmentEncoded)) == 1
        assert 0 < encoded.wire_bytes < encoded.full_bytes
        store = await asyncio.to_thread(FrameStore, double.run.path / "seed", DiskBudget(1 << 30))
        assert [facts.form for facts in store.forms()] == [order.form]


async def test_a_version_counts_as_different_only_if_its_files_were_read(
    double: CoordinatorDouble,
) -> None:
    async with a_seed(double):
        [seed] = (await double.peers(1)).values()
        order = dataclasses.replace(await an_order(double, 0), digest=Digest(digest_of(b"other")))
        double.send(seed, order)
        assert (await double.until_said(EncodeFailed)).differs
        double.send(seed, dataclasses.replace(await an_order(double, 1), path="versions/none"))
        assert not (await double.until_said(EncodeFailed, count=2)).differs


async def test_a_repeated_order_is_answered_again(double: CoordinatorDouble) -> None:
    async with a_seed(double):
        [seed] = (await double.peers(1)).values()
        order = await an_order(double, 0)
        double.send(seed, order)
        first = await double.until_said(FormEncoded)
        double.send(seed, order)
        assert await double.until_said(FormEncoded, count=2) == first
        assert len(double.said(SegmentEncoded)) == 2


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"digest": Digest(digest_of(b"other"))}, "is not the snapshot that was published"),
        ({"path": "versions/none"}, "cannot be read"),
        ({"form": "0" * 32}, "another form's"),
        ({"facts": b"\xc0"}, ""),
    ],
)
async def test_a_version_that_cannot_be_encoded_is_reported(
    double: CoordinatorDouble, change: dict[str, object], word: str
) -> None:
    async with a_seed(double):
        [seed] = (await double.peers(1)).values()
        order = await an_order(double, 0)
        wrong = dataclasses.replace(order, **change)  # type: ignore[arg-type]
        double.send(seed, wrong)
        failed = await double.until_said(EncodeFailed)
        assert failed.form == wrong.form
        assert word in failed.reason
        if wrong.form == order.form:
            double.send(seed, order)
            await double.until_said(FormEncoded)


async def test_the_seed_keeps_its_uplink_limit_and_reports_it(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    limit = 1_000_000
    async with a_seed(double, uplink_limit=limit), a_worker(double, tmp_path / "box"):
        peers = await double.peers(2)
        assert double.hellos[peers["seed"]].uplink_limit == limit
        began_at = time.monotonic()
        await spread(double, 0, peers["seed"], peers["box"])
        encoded = await double.until_said(FormEncoded)
        await double.until_said(VersionVerified)
        took_s = time.monotonic() - began_at
    # The last frame of each link may exceed what is allowed.
    sent = HEADERS * (encoded.wire_bytes - 2 * FRAME_BYTES)
    assert took_s >= sent / limit - BURST_S > 0.5


async def test_a_forgotten_form_is_deleted_from_disk(double: CoordinatorDouble) -> None:
    async with a_seed(double):
        [seed] = (await double.peers(1)).values()
        first, second = await an_order(double, 0), await an_order(double, 1)
        double.send(seed, first)
        await double.until_said(FormEncoded)
        double.send(seed, ForgetForm(first.form))
        double.send(seed, second)
        await double.until_said(FormEncoded, count=2)
    store = await asyncio.to_thread(FrameStore, double.run.path / "seed", DiskBudget(1 << 30))
    assert [facts.form for facts in store.forms()] == [second.form]


async def test_the_last_of_several_orders_is_next_even_if_a_learner_went_back(
    double: CoordinatorDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class Watched(Encoder):
        def __init__(self, *arguments: object, keep: bool) -> None:
            super().__init__(*arguments, keep=keep)  # type: ignore[arg-type]
            started.append(str(arguments[1]))

    monkeypatch.setattr("echo2d.runtime.seed.main.Encoder", Watched)
    async with a_seed(double) as seed:
        await double.peers(1)
        for order in [await an_order(double, version) for version in (3, 4, 2)]:
            await seed.received(order)  # all before the encoder looks
        await double.until_said(FormEncoded, count=3)
    assert [Path(path).name for path in started] == ["2", "4", "3"]


def test_a_delta_form_carries_only_what_changed(tmp_path: Path) -> None:
    base = write_snapshot(tmp_path / "base", weight_bytes=1 << 20, rng_seed=1)
    model = write_snapshot(tmp_path / "model", weight_bytes=1 << 20, rng_seed=1)
    (model / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "x": 1}')
    facts = dataclasses.replace(
        CoordinatorDouble(tmp_path / "run").facts(1, 2),
        kind="delta",
        base_digest=build_manifest(base).digest,
    )
    delta = Encoder(facts, model, BaseCopy(base, build_manifest(base).digest, None))
    wire_bytes = sum(segment.table.wire_bytes for segment in delta.segments())
    assert wire_bytes < 100
    assert delta.totals().snapshot == build_manifest(model).digest


def next_step(model: Path) -> Path:
    """A copy of it under the next number, in which a few bytes differ."""
    new = model.with_name(str(int(model.name) + 1))
    shutil.copytree(model, new)
    write_at(new / "model-0.safetensors", bytes(range(100)), 10_000 * int(new.name))
    return new


def delta_order(
    double: CoordinatorDouble,
    version: int,
    base: Path,
    new: Path,
    *,
    kind: FormKind = "delta",
    via: Sequence[Path] = (),
) -> EncodeVersion:
    """Blocking. Of a version in `new`; composed forms need no copy of the base."""
    digests = {path: build_manifest(path).digest for path in (base, new, *via)}
    facts = dataclasses.replace(
        double.facts(version, version + 1), kind=kind, base_digest=digests[base]
    )
    double.start_form(facts)
    order = double.order(facts, digests[new], new)
    path = str(base.relative_to(double.run.path)) if kind == "delta" else None
    return dataclasses.replace(
        order, kind=kind, base_path=path, via=tuple(digests[path] for path in via)
    )


async def test_deltas_made_for_all_are_composed_for_peers_that_are_behind(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    """After a restart of the seed, and of the base and what came after it there is no copy."""
    async with a_worker(double, tmp_path / "box"):
        async with a_seed(double):
            peers = await double.peers(2)
            path, digest = await a_model(double, 0)
            facts = double.facts(0, 1)
            double.start_form(facts)
            double.chain(facts.form, [peers["seed"], peers["box"]], plan=1)
            double.send(peers["seed"], double.order(facts, digest, path))
            await double.until_said(VersionVerified)
            paths = [path]
            for version in (1, 2):
                paths.append(await asyncio.to_thread(next_step, paths[-1]))
                await asyncio.to_thread(sync, paths[-2] / "model-0.safetensors")
                double.send(
                    peers["seed"],
                    await asyncio.to_thread(delta_order, double, version, *paths[-2:]),
                )
                await double.until_said(DeltasKept, count=version + 1)
                assert not in_page_cache(paths[-2] / "model-0.safetensors")
        composed = await asyncio.to_thread(
            functools.partial(
                delta_order, double, 2, paths[0], paths[2], kind="composed", via=[paths[1]]
            )
        )
        lost = await asyncio.to_thread(
            functools.partial(
                delta_order, double, 2, paths[1], paths[2], kind="composed", via=[paths[0]]
            )
        )
        for gone in paths[:2]:
            await asyncio.to_thread(shutil.rmtree, gone)
        await double.until(lambda: len(double.connected) == 1)
        double.messages.clear()
        async with a_seed(double):
            seed = (await double.peers(2))["seed"]
            kept = await double.until_said(DeltasKept)
            made = FormFacts.decode(composed.facts).base_digest, *composed.via, composed.digest
            assert [(each.base, each.made) for each in kept.deltas] == list(pairwise(made))
            double.chain(composed.form, [seed, peers["box"]], plan=2)
            double.send(seed, composed)
            encoded = await double.until_said(FormEncoded)
            assert encoded.wire_bytes < sum(each.wire_bytes for each in kept.deltas)
            verified = await double.until_said(VersionVerified)
            assert (verified.form, verified.digest) == (composed.form, composed.digest)
            double.send(seed, lost)
            assert (await double.until_said(EncodeFailed)).lacks_base


async def test_a_base_that_differs_from_the_published_one_is_reported(
    double: CoordinatorDouble,
) -> None:
    async with a_seed(double):
        [seed] = (await double.peers(1)).values()
        path, _ = await a_model(double, 0)
        new = await asyncio.to_thread(next_step, path)
        order = await asyncio.to_thread(delta_order, double, 1, path, new)
        await asyncio.to_thread(write_at, path / "model-1.safetensors", b"rot", 1000)
        double.send(seed, order)
        failed = await double.until_said(EncodeFailed)
        assert failed.lacks_base
        assert "is not the base that was published" in failed.reason


async def test_the_seed_process_joins_and_ends_with_its_parent(double: CoordinatorDouble) -> None:
    key = Ed25519PrivateKey.generate()
    double.access.admit_own(public_bytes(key), "seed")
    handover = SeedHandover.make(
        double.url, key, run=double.run, link_host="127.0.0.1", link_port=0
    )

    async with asyncio.TaskGroup() as tasks:
        supervisor = tasks.create_task(supervise_seed(handover, rng=random.Random(1)))
        [seed] = (await double.peers(1)).values()
        assert double.hellos[seed].kind == "seed"
        supervisor.cancel()
    await double.until(lambda: not double.connected)


def test_a_seed_started_by_hand_is_the_operators_mistake() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", SEED_MODULE], input=b"", capture_output=True, timeout=30, check=False
    )
    assert ended.returncode == 2
    assert b"started by `echo2d coordinate`" in ended.stderr
    assert b"Traceback" not in ended.stderr
