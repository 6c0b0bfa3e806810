"""Samples of the Tinker API, drawn by calls of the gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d.core.tinker.events import DrawSample, SampleEnded, SampleOrder
from echo2d.core.tinker.futures import Failed, FutureId
from echo2d.core.work.calls.events import CallAction, CallAsked, CallId, CallRefused, ChoiceGrew
from echo2d.core.work.calls.open_calls import CHOICES_MAX
from echo2d.runtime.coordinator.tinker_samples import SampleDrawer
from echo2d.tinker import messages_pb2 as pb

FUTURE = FutureId("s:sample:0/1")


class Calls:
    """The gateway's calls, and what the core answers to each of them."""

    def __init__(self, answers: Callable[[CallAsked], Sequence[CallAction]]) -> None:
        self.answers, self.ids = answers, count()
        self.asked: list[CallAsked] = []
        self.stopped: list[tuple[int, int]] = []
        self.open_now = 0

    @asynccontextmanager
    async def open(self, make: Callable[[CallId], CallAsked]) -> AsyncIterator["OpenedCall"]:
        asked = make(CallId(next(self.ids)))
        self.asked.append(asked)
        self.open_now += 1
        try:
            yield OpenedCall(self, asked)
        finally:
            self.open_now -= 1


class OpenedCall:
    def __init__(self, calls: Calls, asked: CallAsked) -> None:
        self.calls, self.asked = calls, asked
        self.left = list(calls.answers(asked))

    async def next(self) -> CallAction:
        if not self.left:
            await asyncio.Event().wait()
        return self.left.pop(0)

    async def stop(self, choice: int) -> None:
        self.calls.stopped.append((self.asked.call, choice))
        self.left.append(grew(self.asked, choice, [], "stop"))


def grew(
    asked: CallAsked, choice: int, tokens: Sequence[int], finish: str | None = None
) -> ChoiceGrew:
    logprobs = pack_logprobs([-float(each) for each in tokens])
    return ChoiceGrew(asked.call, choice, pack_tokens(tokens), logprobs, (), finish)  # type: ignore[arg-type]


def order(count: int = 1, stops: tuple[str, ...] = ()) -> SampleOrder:
    return SampleOrder(pack_tokens([9]), count, 8, WHOLE, (7,), stops, 5)


async def drawn(calls: Calls, asked: SampleOrder) -> SampleEnded:
    """What the core is told in the end."""
    told: list[SampleEnded] = []

    async def tell(ended: SampleEnded) -> None:
        told.append(ended)

    drawer = SampleDrawer(calls, lambda tokens: "".join(chr(96 + each) for each in tokens), tell)
    async with asyncio.TaskGroup() as tasks:
        drawer.draw(DrawSample(FUTURE, "ann", asked, Version(3)), tasks)
    assert calls.open_now == 0
    (ended,) = told
    return ended


def sequences(ended: SampleEnded) -> list[tuple[list[int], str]]:
    assert isinstance(ended.result, bytes)
    found = pb.SampleResult.FromString(ended.result).sequences
    for each in found:
        tokens = memoryview(each.tokens).cast("i").tolist()
        assert memoryview(each.logprobs).cast("f").tolist() == [-float(token) for token in tokens]
    ends = {pb.END_STOP: "stop", pb.END_LENGTH: "length"}
    return [(memoryview(each.tokens).cast("i").tolist(), ends[each.end]) for each in found]


async def test_sequences_are_drawn_by_calls_of_exactly_one_version() -> None:
    def answers(asked: CallAsked) -> list[CallAction]:
        return [
            each
            for choice in range(asked.choices)
            for each in (grew(asked, choice, [1, 2]), grew(asked, choice, [7], "stop"))
        ]

    calls = Calls(answers)
    ended = await drawn(calls, order(CHOICES_MAX + 3))
    assert sequences(ended) == [([1, 2, 7], "stop")] * (CHOICES_MAX + 3)
    assert [each.choices for each in calls.asked] == [CHOICES_MAX, 3]
    # Each sequence has a seed of its own.
    one, two = [each.rng_seed for each in calls.asked]
    assert one is not None
    assert two == one + CHOICES_MAX
    assert {(each.min_version, each.max_version) for each in calls.asked} == {(3, 3)}


async def test_a_sequence_ends_at_the_token_that_completes_a_stop_text() -> None:
    def answers(asked: CallAsked) -> list[CallAction]:
        first = [grew(asked, 0, [1]), grew(asked, 0, [2, 3, 4]), grew(asked, 0, [5])]
        return [*first, grew(asked, 1, [4, 4], "length")]

    calls = Calls(answers)
    ended = await drawn(calls, order(2, stops=("x", "bc")))
    assert sequences(ended) == [([1, 2, 3], "stop"), ([4, 4], "length")]
    assert ended.tokens == 5
    assert calls.stopped == [(0, 0)], "the worker need not go on"


@pytest.mark.parametrize(
    ("code", "again"), [("version", True), ("late", True), ("stopping", False)]
)
async def test_a_call_that_is_refused_is_tried_again_or_fails(code: str, again: bool) -> None:
    def answers(asked: CallAsked) -> list[CallAction]:
        if asked.choices == 1:
            return [CallRefused(asked.call, code, "no worker", None)]  # type: ignore[arg-type]
        return []  # the other call waits, and is given up

    ended = await drawn(Calls(answers), order(CHOICES_MAX + 1))
    assert ended.again == again
    assert ended.result == Failed("the sample was not drawn: no worker", "server")


async def test_a_sample_that_is_stopped_tells_nothing() -> None:
    calls, told = Calls(lambda _: []), list[SampleEnded]()

    async def tell(ended: SampleEnded) -> None:
        told.append(ended)

    drawer = SampleDrawer(calls, lambda _: "", tell)
    for turns in (5, 0):
        async with asyncio.TaskGroup() as tasks:
            drawer.draw(DrawSample(FUTURE, "ann", order(), Version(3)), tasks)
            for _ in range(turns):
                await asyncio.sleep(0)
            assert calls.open_now == bool(turns)
            drawer.stop(FUTURE)
        assert (calls.open_now, told) == (0, [])
    drawer.stop(FUTURE)
