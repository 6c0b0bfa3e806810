"""Answers end with the token that completes a stop string, with engines that have no stop strings."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from echo2d.core.protocol.control_messages import LeaseGranted
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.worker.events import EngineLost, GenerationFailed, LabelSpan, SampleProgressed
from echo2d.engines.base import FinishReason, GenerateRequest, SampleOutput
from echo2d.engines.fake import FakeEngine
from echo2d.errors import EngineFault
from echo2d.runtime.worker.generation import LeaseRunner
from echo2d.runtime.worker.stop_strings import ServedTexts
from tests.support.column_engine import columns_of
from tests.support.polling import HANG_S
from tests.support.texts import bytes_tokenizer
from tests.support.worker import a_lease

TOKENIZER = bytes_tokenizer()
LABELS = ("0-a", "1-b")


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


class Speaker(FakeEngine):
    """Says a text for each sample seed, a few tokens at a time; the second half by another version."""

    def __init__(self, *texts: str, finish: FinishReason = "length", bundle: int = 3) -> None:
        super().__init__()
        self.texts, self.finish, self.bundle = texts, finish, bundle
        self.told: list[int] = []  # tokens that each request was asked for before it was ended
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
        assert request.rng_seeds is not None
        self.asked.append(request)
        tokens, told = ids(self.texts[request.rng_seeds[0]]), 0
        try:
            for start in range(0, len(tokens), self.bundle):
                part = tokens[start : start + self.bundle]
                told = end = start + len(part)
                spans = [LabelSpan(start, end, LABELS[start >= len(tokens) // 2])]
                last = end == len(tokens)
                finish = self.finish if last else None
                logprobs = [-0.5] * len(part)
                yield SampleOutput(0, part, logprobs, spans, finish, columns_of(part))
                await asyncio.sleep(0)
        finally:
            self.told.append(told)


def lease(*texts: str, stops: tuple[str, ...] = ("END",), before: str = "") -> LeaseGranted:
    samples = tuple(range(len(texts)))
    made = replace(a_lease(samples=samples, tokens=100), rng_seeds=samples, stop_strings=stops)
    written = ids(before)
    return replace(made, prompt=made.prompt + pack_tokens(written), written=len(written))


async def said(engine: Speaker, granted: LeaseGranted) -> list[SampleProgressed]:
    """All that is reported, until every sample has finished or the lease failed."""
    events: list[SampleProgressed | GenerationFailed] = []
    ended = asyncio.Event()

    def take(event: object) -> None:
        if isinstance(event, EngineLost):
            return
        assert isinstance(event, SampleProgressed | GenerationFailed)
        events.append(event)
        finished = sum(isinstance(e, SampleProgressed) and e.finish is not None for e in events)
        if finished == len(granted.samples) or isinstance(event, GenerationFailed):
            ended.set()

    texts = ServedTexts()
    texts.serve({"tokenizer.json": TOKENIZER.to_str().encode()})
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as tasks:
        LeaseRunner([engine], tasks, take, texts).start(granted)
        await ended.wait()
    for event in events:
        if isinstance(event, GenerationFailed):
            raise EngineFault(event.reason)
    return [event for event in events if isinstance(event, SampleProgressed)]


def whole(events: list[SampleProgressed], sample: int) -> tuple[str, str | None]:
    """An answer's text, and how it ended."""
    mine = [event for event in events if event.sample == sample]
    tokens = [token for event in mine for token in event.tokens]
    for event in mine:
        assert len(event.tokens) == len(event.logprobs)
        assert sum(span.end - span.start for span in event.spans) == len(event.tokens)
        assert event.columns == columns_of(event.tokens)
    return TOKENIZER.decode(tokens), mine[-1].finish


async def test_each_sample_ends_at_the_stop_string_of_its_own_text() -> None:
    texts = ("abENDxyz and more and more", "no end here", "x" * 30 + "END")
    engine = Speaker(*texts)
    events = await said(engine, lease(*texts))
    assert [whole(events, sample) for sample in range(3)] == [
        ("abEND", "stop_string"),
        ("no end here", "length"),
        ("x" * 30 + "END", "stop_string"),
    ]
    # The engine is not asked for what would be thrown away.
    assert min(engine.told) < len(ids(texts[0]))
    assert all(request.samples == 1 for request in engine.asked)


@pytest.mark.parametrize("bundle", range(1, 8))
async def test_a_stop_string_may_come_in_pieces(bundle: int) -> None:
    events = await said(Speaker("abENENDxyz", bundle=bundle), lease("x"))
    assert whole(events, 0) == ("abENEND", "stop_string")


async def test_a_stop_string_may_have_begun_in_an_earlier_attempt() -> None:
    events = await said(Speaker("Dxyz"), lease("x", before="abEN"))
    assert whole(events, 0) == ("D", "stop_string")


async def test_a_lease_without_stop_strings_is_one_request() -> None:
    engine = Speaker("abEND", "abEND")
    granted = replace(lease("x"), stop_strings=())
    assert whole(await said(engine, granted), 0) == ("abEND", "length")
    assert [request.request_id for request in engine.asked] == ["1.1"]


async def test_a_stop_token_behind_the_text_ends_the_sample_as_usual() -> None:
    events = await said(Speaker("abEND", finish="stop", bundle=9), lease("x"))
    assert whole(events, 0) == ("abEND", "stop")


async def test_an_engine_that_gives_up_fails_the_lease_once() -> None:
    class Broken(Speaker):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
            async for delta in super().generate(request):
                yield delta
                raise EngineFault("out of memory")

    with pytest.raises(EngineFault, match="out of memory"):
        await said(Broken("abc", "abc", bundle=1), lease("a", "b"))


async def test_a_version_without_a_tokenizer_fails_a_lease_with_stop_strings() -> None:
    texts = ServedTexts()
    with pytest.raises(EngineFault, match="stop strings need a tokenizer"):
        await texts.get()


async def test_a_tokenizer_is_made_again_when_any_of_its_files_changes() -> None:
    texts, files = ServedTexts(), {"tokenizer.json": TOKENIZER.to_str().encode()}
    texts.serve(files)
    first = await texts.get()
    texts.serve(dict(files))
    assert await texts.get() is first
    texts.serve({**files, "tokenizer_config.json": b'{"bos_token": "<new>"}'})
    assert "<new>" in (await texts.get()).added.values()
