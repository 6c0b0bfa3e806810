"""The seed: encodes what it is asked for, tells of every segment, keeps serving, and says when it cannot."""

import asyncio
import dataclasses
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.canonical import digest_of
from echo2d.core.ids import Digest
from echo2d.core.messages import EncodeFailed, EncodeVersion, ForgetForm, FormEncoded, SegmentEncoded
from echo2d.net.auth import public_bytes
from echo2d.runtime.bases import BaseCopy
from echo2d.runtime.encoder import Encoder
from echo2d.runtime.seed_process import SEED_MODULE, SeedHandover, supervise_seed
from echo2d.store.budget import DiskBudget
from echo2d.store.frames import FrameStore
from echo2d.store.snapshots import build_manifest
from tests.coordinator_kit import CoordinatorDouble
from tests.peer_kit import a_model, a_seed
from tests.snapshot_kit import write_snapshot


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[CoordinatorDouble]:
    async with CoordinatorDouble.serving(tmp_path / "run") as double:
        yield double


async def an_order(double: CoordinatorDouble, version: int) -> EncodeVersion:
    path, digest = await a_model(double, version)
    facts = double.facts(version, version + 1)
    double.start_form(facts)
    return double.order(facts, digest, path)


async def test_a_form_is_encoded_onto_disk(double: CoordinatorDouble) -> None:
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


async def test_an_order_that_is_repeated_is_answered_again(double: CoordinatorDouble) -> None:
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
async def test_what_cannot_be_encoded_is_said(double: CoordinatorDouble, change: dict[str, object], word: str) -> None:
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


async def test_a_forgotten_form_leaves_the_disk(double: CoordinatorDouble) -> None:
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


async def test_of_several_orders_the_last_is_next_though_a_learner_went_back(
    double: CoordinatorDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class Watched(Encoder):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            started.append(str(arguments[1]))

    monkeypatch.setattr("echo2d.runtime.seed.Encoder", Watched)
    async with a_seed(double) as seed:
        await double.peers(1)
        for order in [await an_order(double, version) for version in (3, 4, 2)]:
            await seed.received(order)  # all before the encoder looks
        await double.until_said(FormEncoded, count=3)
    assert [Path(path).name for path in started] == ["2", "4", "3"]


def test_a_delta_form_needs_only_what_changed(tmp_path: Path) -> None:
    base = write_snapshot(tmp_path / "base", weight_bytes=1 << 20, rng_seed=1)
    model = write_snapshot(tmp_path / "model", weight_bytes=1 << 20, rng_seed=1)
    (model / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "x": 1}')
    facts = dataclasses.replace(
        CoordinatorDouble(tmp_path / "run").facts(1, 2), kind="delta", base_digest=build_manifest(base).digest
    )
    delta = Encoder(facts, model, BaseCopy(base, build_manifest(base).digest, None))
    wire_bytes = sum(segment.table.wire_bytes for segment in delta.segments())
    assert wire_bytes < 100
    assert delta.totals().snapshot == build_manifest(model).digest


async def test_the_process_joins_and_ends_with_its_parent(double: CoordinatorDouble) -> None:
    key = Ed25519PrivateKey.generate()
    double.access.admit_seed(public_bytes(key))
    handover = SeedHandover.make(double.url, key, run=double.run, link_host="127.0.0.1", link_port=0)

    async with asyncio.TaskGroup() as tasks:
        supervisor = tasks.create_task(supervise_seed(handover, rng=random.Random(1)))
        [seed] = (await double.peers(1)).values()
        assert double.hellos[seed].kind == "seed"
        supervisor.cancel()
    await double.until(lambda: not double.connected)


def test_by_hand_it_is_the_operators_mistake() -> None:
    ended = subprocess.run([sys.executable, "-m", SEED_MODULE], input=b"", capture_output=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert b"started by `echo2d coordinate`" in ended.stderr
    assert b"Traceback" not in ended.stderr
