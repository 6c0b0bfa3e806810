"""Bundles of tokens with their spans, and the stream of deltas to one consumer."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.protocol.sampling import TEMPERATURE_MIN, Sampling
from echo2d.core.worker.events import LabelSpan
from echo2d.engines.base import GenerateRequest, SampleOutput
from echo2d.engines.stream import RequestStream, SampleBuffer, check_request
from echo2d.errors import EngineFault


def request(**changes: object) -> GenerateRequest:
    settings: dict[str, object] = {
        "request_id": "r",
        "prompt": [1, 2],
        "samples": 1,
        "max_new_tokens": 4,
    }
    return GenerateRequest(**settings | changes)  # type: ignore[arg-type]


def test_a_delta_splits_where_the_version_changes() -> None:
    buffer = SampleBuffer(3)
    for token, label in [(10, "a"), (11, "a"), (12, "b")]:
        buffer.add(token, -0.5, label)
        buffer.check()
    spans = [LabelSpan(0, 2, "a"), LabelSpan(2, 3, "b")]
    assert buffer.take() == SampleOutput(3, [10, 11, 12], [-0.5] * 3, spans)


def test_positions_go_on_over_deltas() -> None:
    buffer = SampleBuffer(0)
    buffer.add(10, -0.5, "a")
    buffer.take()
    buffer.add(11, -0.25, "a")
    assert buffer.take("stop") == SampleOutput(0, [11], [-0.25], [LabelSpan(1, 2, "a")], "stop")


def test_an_empty_delta_has_no_spans() -> None:
    assert SampleBuffer(0).take("abort") == SampleOutput(0, [], [], [], "abort")


@given(st.lists(st.one_of(st.sampled_from("abc"), st.none()), max_size=40))
def test_spans_cover_exactly_the_tokens(writes: list[str | None]) -> None:
    """None takes a delta, a letter is the version of one token."""
    buffer, labels = SampleBuffer(0), []
    for label in [*writes, None]:
        if label is not None:
            buffer.add(0, 0.0, label)
        else:
            delta = buffer.take()
            assert [span.start for span in delta.spans] == sorted(
                {span.start for span in delta.spans}
            )
            labels += [span.label for span in delta.spans for _ in range(span.start, span.end)]
            assert not delta.spans or delta.spans[-1].end == len(labels)
        buffer.check()
    assert labels == [label for label in writes if label is not None]


async def test_a_stream_ends_when_every_sample_has_ended() -> None:
    stream = RequestStream(2)
    first, last = (
        SampleOutput(1, [5], [0.0], [LabelSpan(0, 1, "a")], "stop"),
        SampleOutput(0, [], [], [], "abort"),
    )
    for delta in (first, last):
        stream.put(delta)
        stream.check()
    assert [await stream.get(), await stream.get(), await stream.get()] == [first, last, None]
    assert stream.samples_open == 0


async def test_a_waiting_consumer_is_woken() -> None:
    stream = RequestStream(1)
    asyncio.get_running_loop().call_soon(stream.abort)
    assert await stream.get() == SampleOutput(0, (), (), (), "abort")
    assert await stream.get() is None


async def test_deltas_after_a_finish_are_dropped() -> None:
    stream = RequestStream(1)
    stream.abort()
    stream.put(SampleOutput(0, [5], [0.0], [LabelSpan(0, 1, "a")], "stop"))
    stream.abort()
    stream.check()
    assert await stream.get() == SampleOutput(0, (), (), (), "abort")
    assert await stream.get() is None


@pytest.mark.parametrize(
    "good",
    [
        request(),
        request(sampling=Sampling(0.0)),
        request(sampling=Sampling(TEMPERATURE_MIN)),
        request(prompt=[0, 9], sampling=Sampling(top_p=0.1)),
    ],
)
def test_a_possible_request_is_accepted(good: GenerateRequest) -> None:
    check_request(good, vocab_size=10, context_max=6)
    check_request(good, vocab_size=10, context_max=None)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(samples=0), "samples"),
        (request(max_new_tokens=0), "max_new_tokens"),
        (request(prompt=[1] * 6), "context"),
        (request(sampling=Sampling(TEMPERATURE_MIN / 2)), "temperature"),
        (request(sampling=Sampling(float("nan"))), "temperature"),
        (request(sampling=Sampling(top_p=1.1)), "top_p"),
        (request(prompt=[]), "empty"),
        (request(prompt=[10]), "vocabulary"),
        (request(prompt=[-1]), "vocabulary"),
    ],
)
def test_an_impossible_request_is_refused_with_the_reason(bad: GenerateRequest, words: str) -> None:
    with pytest.raises(EngineFault, match=words):
        check_request(bad, vocab_size=10, context_max=6)
