"""The seed forgets a form while it is being made, and may get the order again."""

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterable
from pathlib import Path

import pytest

from echo2d.core.base.ids import FormId, PeerId
from echo2d.core.protocol.control_messages import (
    EncodeVersion,
    ForgetForm,
    FormEncoded,
    SegmentEncoded,
)
from echo2d.core.weights.encoder import Segment
from echo2d.core.weights.form import FormFacts, FrameSpan
from echo2d.runtime.seed.encoder import Base, Encoder
from echo2d.runtime.seed.main import Seed
from echo2d.store.frames import FrameStore
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_model, a_seed
from tests.support.polling import HANG_S

SEGMENTS = 5


class Gate:
    """A thread stops here once, until it may go on."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def stop(self) -> None:
        self._reached.set()
        self._open.wait(HANG_S)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, HANG_S)

    def open(self) -> None:
        self._open.set()


class Several(Encoder):
    """In SEGMENTS segments; the second one passes the gate."""

    gate: Gate | None = None

    def __init__(
        self, facts: FormFacts, directory: Path, base: Base | None, *, keep: bool = False
    ) -> None:
        super().__init__(facts, directory, base, keep=keep, segment_bytes=8 << 20)

    def segments(self) -> Generator[Segment, None, None]:
        for number, segment in enumerate(super().segments()):
            if number == 1 and self.gate is not None:
                self.gate.stop()
            yield segment


@pytest.fixture
async def double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[CoordinatorDouble]:
    monkeypatch.setattr("echo2d.runtime.seed.main.Encoder", Several)
    async with CoordinatorDouble.serving(tmp_path / "run") as double:
        yield double


async def forgotten(seed: Seed, form: FormId) -> None:
    async with asyncio.timeout(HANG_S):
        while form in seed._orders:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


async def being_made(double: CoordinatorDouble) -> tuple[PeerId, FormFacts, EncodeVersion]:
    """The seed, and a form of SEGMENTS segments that it was asked for."""
    [peer] = (await double.peers(1)).values()
    path, digest = await a_model(double, 0, SEGMENTS * 8 << 20)
    facts = double.facts(0, 1)
    double.start_form(facts)
    order = double.order(facts, digest, path)
    double.send(peer, order)
    return peer, facts, order


async def test_a_form_ordered_again_while_it_is_made_begins_again(
    double: CoordinatorDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(Several, "gate", gate)
    async with a_seed(double) as seed:
        peer, facts, order = await being_made(double)
        await gate.reached()
        await double.until_said(SegmentEncoded)
        double.send(peer, ForgetForm(order.form))
        await forgotten(seed, order.form)
        double.start_form(facts)
        double.send(peer, order)
        gate.open()
        done = await double.until_said(FormEncoded)
        said = [each.segment for each in double.said(SegmentEncoded)]
        assert said == [0, *range(done.segments)]


async def test_a_form_forgotten_while_its_last_segment_is_written_ends_quietly(
    double: CoordinatorDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, put = Gate(), FrameStore.put_verified
    written: list[FormId] = []

    def slow(
        self: FrameStore, form: FormId, frames: Iterable[tuple[FrameSpan, memoryview]]
    ) -> None:
        put(self, form, frames)
        written.append(form)
        if len(written) == SEGMENTS:
            gate.stop()

    monkeypatch.setattr(FrameStore, "put_verified", slow)
    async with a_seed(double) as seed:
        peer, _, order = await being_made(double)
        await gate.reached()
        double.send(peer, ForgetForm(order.form))
        await forgotten(seed, order.form)
        gate.open()
        other, digest = await a_model(double, 1)
        later = double.facts(1, 2)
        double.start_form(later)
        double.send(peer, double.order(later, digest, other))
        done = await double.until_said(FormEncoded)
        assert done.form == later.form
