"""Bodies of forward_backward: all that a client may send is read, all else is refused in one line."""

import itertools
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from echo2d.tinker import messages_pb2 as pb
from echo2d.tinker.prompts import MostLikely, PromptCall, PromptTargets
from echo2d.tinker.wire import (
    CELLS_MAX,
    DATUMS_MAX,
    FORWARD_BACKWARD_BYTES_MAX,
    PARTS_MAX,
    Datum,
    ForwardBackward,
    Head,
    Malformed,
    SampledTokens,
    SequenceSpan,
    read_forward_backward,
    read_head,
    read_prompt_call,
    read_sample_result,
    write_forward_backward_output,
    write_prompt_call,
    write_sample_result,
)

ELEMENTS = {np.dtype(np.float32): pb.ELEMENT_FLOAT32, np.dtype(np.int64): pb.ELEMENT_INT64}
MEMORY_MAX = 4 << 20
ReadT = TypeVar("ReadT")


def int64(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


def tensor(array: NDArray[Any], *, sparse: bool = False) -> pb.Tensor:
    """As a client encodes it."""
    made = pb.Tensor(element=ELEMENTS[array.dtype], shape=array.shape)
    if sparse:
        rows, columns = np.nonzero(array)
        starts = np.searchsorted(rows, np.arange(len(array) + 1))
        made.sparse.entries = array[rows, columns].tobytes()
        made.sparse.row_starts = int64(*starts)
        made.sparse.columns = int64(*columns)
    else:
        made.dense = array.tobytes()
    return made


def text(*tokens: int) -> pb.InputChunk:
    return pb.InputChunk(text=pb.Text(tokens=np.array(tokens, "<i4").tobytes()))


def training_datum(length: int = 3, **inputs: pb.Tensor) -> pb.TrainingDatum:
    return pb.TrainingDatum(chunks=[text(*range(length))], inputs=inputs)


def call(*data: pb.TrainingDatum, **fields: Any) -> pb.ForwardBackwardCall:
    named = {"model": "s:train:1", "number": 3, "loss": "cross_entropy", **fields}
    return pb.ForwardBackwardCall(data=data, **named)


def read(message: pb.ForwardBackwardCall) -> ForwardBackward:
    return read_forward_backward(message.SerializeToString())


def same(found: Datum, expected: Datum) -> bool:
    names = found.inputs.keys() | expected.inputs.keys()
    pairs = [(found.inputs[name], expected.inputs[name]) for name in names]
    pairs.append((found.tokens_t, expected.tokens_t))
    return found.spans == expected.spans and all(
        one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
        for one, other in pairs
    )


names = st.text(max_size=8)
counts = st.integers(0, 2**63 - 1)
spans = st.builds(SequenceSpan, names, counts, counts, sampled=st.booleans())
shapes = arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5)
inputs = arrays.arrays(np.float32, shapes) | arrays.arrays(np.int64, shapes)
chunks = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=3)
heads = st.builds(Head, names, st.integers(0, 2**31 - 1), names, st.booleans())
settings = st.dictionaries(names, st.floats(allow_nan=False) | names, max_size=3)
bodies = st.builds(
    lambda head, config, data: (head, config, data),
    heads,
    settings,
    st.lists(
        st.tuples(chunks, st.dictionaries(names, inputs, max_size=3), st.lists(spans, max_size=3)),
        max_size=3,
    ),
)


def origin(span: SequenceSpan) -> pb.OriginSpan:
    part = pb.SequencePart(sequence=span.sequence, offset=span.offset, length=span.length)
    return pb.OriginSpan(sampled=part) if span.sampled else pb.OriginSpan(prompt=part)


def encode(drawn: Any, *, sparse: bool) -> pb.ForwardBackwardCall:
    head, config, data = drawn
    message = pb.ForwardBackwardCall(
        model=head.model, number=head.number, loss=head.loss, forward_only=head.forward_only
    )
    for name, value in config.items():
        if isinstance(value, str):
            message.config[name].text = value
        else:
            message.config[name].number = message.old_config[name] = value
    for pieces, named, origins in data:
        one = message.data.add(chunks=[text(*piece) for piece in pieces])
        for name, array in named.items():
            one.inputs[name].CopyFrom(tensor(array, sparse=sparse and array.ndim == 2))
        one.target_spans.extend(map(origin, origins))
    return message


def tried(reader: Callable[[bytes], ReadT], body: bytes) -> ReadT | str:
    """The result of the reader, or its line if it refuses the body."""
    try:
        return reader(body)
    except Malformed as refused:
        return str(refused)


@given(bodies, st.booleans())
def test_what_a_client_encodes_is_read_as_it_was(drawn: Any, sparse: bool) -> None:
    found = read(encode(drawn, sparse=sparse))
    head, config, data = drawn
    assert (found.head, found.config, len(found.data)) == (head, config, len(data))
    for one, (pieces, named, origins) in zip(found.data, data, strict=True):
        tokens = np.array([token for piece in pieces for token in piece], np.int64)
        assert same(one, Datum(tokens, named, tuple(origins)))
        assert all(array.flags.writeable for array in (one.tokens_t, *one.inputs.values()))


@given(bodies, st.data())
def test_changed_bytes_are_read_or_malformed(drawn: Any, chance: st.DataObject) -> None:
    body = bytearray(b"\x0a\x01m" + encode(drawn, sparse=True).SerializeToString())
    changes = st.tuples(st.integers(0, len(body) - 1), st.integers(0, 255))
    for place, byte in chance.draw(st.lists(changes, max_size=4)):
        body[place] = byte
    whole = tried(read_forward_backward, bytes(body))
    assert isinstance(whole, str) or whole.head == read_head(bytes(body))


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_malformed(body: bytes) -> None:
    for reader in (read_head, read_forward_backward):
        assert "\n" not in str(tried(reader, body))


@given(bodies)
def test_the_head_is_that_of_the_whole(drawn: Any) -> None:
    body = encode(drawn, sparse=False).SerializeToString()
    assert read_head(body) == read_forward_backward(body).head == drawn[0]


def test_the_head_is_read_though_the_data_are_malformed() -> None:
    message = call(training_datum(weights=pb.Tensor()))
    assert read_head(message.SerializeToString()).number == 3
    with pytest.raises(Malformed, match="datum 0, input 'weights'"):
        read(message)


def python_calls(work: Callable[[], object]) -> int:
    """How many functions were called."""
    called = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal called
        called += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


def test_reading_the_head_takes_the_same_calls_with_any_data() -> None:
    one = training_datum(weights=tensor(np.ones(3, np.float32)))
    small, large = (call(*[one] * n).SerializeToString() for n in (1, 1024))
    read_head(small)
    assert python_calls(lambda: read_head(large)) == python_calls(lambda: read_head(small)) < 20


def test_fields_of_newer_clients_are_ignored() -> None:
    newer = call(training_datum()).SerializeToString() + b"\x9a\x06\x02hi"  # field 99
    assert read_head(newer) == read_forward_backward(newer).head == read(call()).head


def test_the_old_form_of_the_settings_is_read() -> None:
    message = call(old_config={"beta": 0.05, "low": 0.8})
    message.config["low"].number = 0.9
    assert read(message).config == {"beta": 0.05, "low": 0.9}


def test_an_input_without_a_shape_is_flat() -> None:
    flat = pb.Tensor(element=pb.ELEMENT_INT64, dense=int64(4, 5))
    (found,) = read(call(training_datum(target_tokens=flat))).data
    assert found.inputs["target_tokens"].tolist() == [4, 5]


def matrix(*, shape: tuple[int, ...] = (2, 3), **changed: bytes) -> pb.Tensor:
    """[[7, 0, 8], [0, 9, 0]] in the sparse form, with these parts changed."""
    whole = {"row_starts": int64(0, 2, 3), "columns": int64(0, 2, 1), "entries": int64(7, 8, 9)}
    sparse = pb.SparseRows(**{**whole, **changed})
    return pb.Tensor(element=pb.ELEMENT_INT64, shape=shape, sparse=sparse)


def test_sparse_rows_become_dense() -> None:
    found = read(call(training_datum(target_tokens=matrix()))).data[0].inputs["target_tokens"]
    assert found.tolist() == [[7, 0, 8], [0, 9, 0]]


HUGE, F32 = 2**62, pb.ELEMENT_FLOAT32
MALFORMED_INPUTS = {
    "no element": (pb.Tensor(dense=b""), "expected float32 or int64; found element 0"),
    "int32": (pb.Tensor(element=pb.ELEMENT_INT32), "found element 3"),
    "bfloat16": (pb.Tensor(element=pb.ELEMENT_BFLOAT16), "found element 4"),
    "an unknown element": (pb.Tensor.FromString(b"\x18\x09"), "found element 9"),
    "no values": (pb.Tensor(element=F32, shape=[0]), "expected dense or sparse_csr values"),
    "bytes without a shape": (
        pb.Tensor(element=F32, dense=b"abc"),
        "expected 0 bytes for 0 numbers",
    ),
    "too few bytes": (pb.Tensor(element=F32, shape=[2], dense=b"1234"), "expected 8 bytes for 2"),
    "too many bytes": (
        pb.Tensor(element=pb.ELEMENT_INT64, shape=[0], dense=int64(1)),
        "expected 0 bytes for 0",
    ),
    "a negative axis": (pb.Tensor(element=F32, shape=[-1], dense=b""), "axes of 0 to"),
    "two negative axes": (pb.Tensor(element=F32, shape=[-1, -1], dense=b"1234"), "axes of 0 to"),
    "a huge axis beside none": (pb.Tensor(element=F32, shape=[HUGE, 0], dense=b""), "axes of 0 to"),
    "three axes": (pb.Tensor(element=F32, shape=[1, 1, 1], dense=b"1234"), "at most 2 axes"),
    "many axes": (pb.Tensor(element=F32, shape=[1] * 10_000, dense=b"1234"), r"shape \[1, 1, 1\]$"),
    "sparse and flat": (matrix(shape=(3,)), r"expected two axes for sparse_csr; found .* \[3\]"),
    "sparse without a shape": (matrix(shape=()), "expected two axes for sparse_csr"),
    "no row starts": (matrix(row_starts=b""), "crow_indices: expected 24 bytes"),
    "a row start is missing": (matrix(row_starts=int64(0, 3)), "crow_indices: expected 24 bytes"),
    "rows start late": (matrix(row_starts=int64(1, 2, 3)), "crow_indices: expected 0 and then"),
    "rows go back": (matrix(row_starts=int64(0, 4, 3)), "crow_indices: expected 0 and then"),
    "rows wrap around": (matrix(row_starts=int64(0, HUGE, -HUGE)), "crow_indices: expected 0"),
    "rows end beyond": (matrix(row_starts=int64(0, 2, HUGE)), "col_indices: expected"),
    "a column is missing": (matrix(columns=int64(0, 2)), "col_indices: expected 24 bytes"),
    "half a column": (matrix(columns=int64(0, 2, 1)[:-1]), "col_indices: expected 24 bytes"),
    "a column beyond": (matrix(columns=int64(0, 3, 1)), "expected 0 to 2; found one outside"),
    "a negative column": (matrix(columns=int64(0, -1, 1)), "expected 0 to 2; found one outside"),
    "columns go back": (matrix(columns=int64(2, 0, 1)), "expected an increase in each row"),
    "a column twice": (matrix(columns=int64(2, 2, 1)), "expected an increase in each row"),
    "an entry is missing": (matrix(entries=int64(7, 8)), "values: expected 24 bytes"),
    "no columns": (matrix(shape=(2, 0)), "expected 0 to -1; found one outside"),
    "huge rows": (matrix(shape=(HUGE, 3)), "axes of 0 to"),
    "huge columns": (matrix(shape=(2, HUGE)), "axes of 0 to"),
    "too many cells": (matrix(shape=(2, CELLS_MAX)), f"at most {CELLS_MAX} numbers"),
}


@pytest.mark.parametrize(
    ("given_tensor", "said"), MALFORMED_INPUTS.values(), ids=MALFORMED_INPUTS.keys()
)
def test_a_malformed_input_is_refused(given_tensor: pb.Tensor, said: str) -> None:
    message = call(training_datum(), training_datum(weights=given_tensor))
    with pytest.raises(Malformed, match=said):
        read(message)


def with_chunk(chunk: pb.InputChunk) -> pb.ForwardBackwardCall:
    return call(pb.TrainingDatum(chunks=[chunk]))


def with_span(span: pb.OriginSpan) -> pb.ForwardBackwardCall:
    return call(pb.TrainingDatum(target_spans=[span]))


MALFORMED = {
    "an image": (with_chunk(pb.InputChunk(image=pb.Image())), "expected text; found image"),
    "sound": (with_chunk(pb.InputChunk(sound=pb.Sound())), "expected text; found sound"),
    "an empty chunk": (with_chunk(pb.InputChunk()), "expected text; found an unknown kind"),
    "half a token": (with_chunk(pb.InputChunk(text=pb.Text(tokens=b"123"))), "found 3 bytes"),
    "a negative token": (with_chunk(text(5, -1)), "expected tokens from 0 on; found -1"),
    "a span of nothing": (with_span(pb.OriginSpan()), "expected prompt or sampled; found neither"),
    "a negative offset": (
        with_span(origin(SequenceSpan("a", -1, 2, sampled=True))),
        "found -1 and",
    ),
    "a negative length": (with_span(origin(SequenceSpan("a", 1, -2, sampled=False))), "and -2"),
    "an empty setting": (call(config={"beta": pb.Setting()}), "'beta': expected a number or a"),
    "a negative number": (call(number=-1), "expected a number from 1 on; found -1"),
    "many datums": (
        call(*[pb.TrainingDatum()] * (DATUMS_MAX + 1)),
        f"at most {DATUMS_MAX} datums; found {DATUMS_MAX + 1}",
    ),
    "many chunks": (
        call(pb.TrainingDatum(chunks=[pb.InputChunk()] * (PARTS_MAX + 1))),
        f"at most {PARTS_MAX} chunks, inputs, spans and settings; found {PARTS_MAX + 1}",
    ),
}


@pytest.mark.parametrize(("message", "said"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_is_refused(message: pb.ForwardBackwardCall, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        read(message)


@pytest.mark.parametrize("reader", [read_head, read_forward_backward])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xff", "expected a protobuf message; found 1 other bytes"),
        (b"\x0a\x05tru", "expected a protobuf message"),
        (b"\x0a\x01\xff", "expected a protobuf message"),  # no UTF-8
        (b"\x9b\x06" * 1000, "expected a protobuf message"),  # groups in groups
        (
            bytes(FORWARD_BACKWARD_BYTES_MAX + 1),
            f"expected at most {FORWARD_BACKWARD_BYTES_MAX} bytes",
        ),
    ],
    ids=["a broken tag", "cut off", "no text", "deep groups", "too large"],
)
def test_other_bytes_are_refused(reader: Callable[[bytes], object], body: bytes, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        reader(body)


def test_as_many_datums_as_the_limit_are_read() -> None:
    assert len(read(call(*[training_datum()] * DATUMS_MAX)).data) == DATUMS_MAX


@pytest.mark.parametrize("datums", [1, 3], ids=["in one input", "in all inputs"])
def test_a_large_shape_of_few_bytes_takes_no_memory(datums: int) -> None:
    empty = pb.SparseRows(row_starts=int64(0, 0, 0))
    wide = CELLS_MAX // (2 * datums) + 1
    bomb = pb.Tensor(element=pb.ELEMENT_INT64, shape=[2, wide], sparse=empty)
    body = call(*[training_datum(weights=bomb)] * datums).SerializeToString()
    tracemalloc.start()
    with pytest.raises(Malformed, match=f"at most {CELLS_MAX} numbers"):
        read_forward_backward(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEMORY_MAX


logprobs = st.lists(
    arrays.arrays(np.float32, shapes, elements=st.floats(width=32, allow_nan=False)), max_size=6
)
metrics = st.dictionaries(names, st.floats(allow_nan=False), max_size=3)


@given(logprobs, metrics)
def test_a_result_has_each_array_in_its_place(
    written: list[NDArray[np.float32]], figures: dict[str, float]
) -> None:
    body = write_forward_backward_output(written, figures)
    result = pb.ForwardBackwardResult.FromString(body)
    found = []
    for record in result.records:
        field = record.fields["logprobs"]
        offsets = np.frombuffer(field.offsets, "<i8")
        assert (len(offsets), offsets[-1]) == (record.datums + 1, len(field.data))
        for start, end in itertools.pairwise(offsets):
            numbers = np.frombuffer(field.data[start:end], "<f4")
            rows = len(numbers) // max(1, int(np.prod(field.other_axes)))
            found.append(numbers.reshape(rows, *field.other_axes) if numbers.size else numbers)
    assert result.metrics == figures
    assert len(found) == len(written)
    for one, other in zip(found, written, strict=True):
        assert np.array_equal(one, other) if other.size else not one.size
    assert write_forward_backward_output(written, figures) == body


def test_the_records_of_a_result_are_runs_of_the_same_width() -> None:
    widths = [(2,), (3,), (2, 4), (1, 4), (2, 5), (1,)]
    body = write_forward_backward_output([np.zeros(each, np.float32) for each in widths], {})
    records = pb.ForwardBackwardResult.FromString(body).records
    assert [each.datums for each in records] == [2, 2, 1, 1]
    assert [list(each.fields["logprobs"].other_axes) for each in records] == [[], [4], [5], []]
    assert {each.record_type for each in records} == {"ArrayRecord"}


@st.composite
def sampled(draw: st.DrawFn) -> SampledTokens:
    tokens, top = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    numbers = arrays.arrays(np.float32, (tokens, top), elements=st.floats(-9, 0, width=32))
    ids = arrays.arrays(np.int32, (tokens, top), elements=st.integers(0, 2**31 - 1))
    likely = st.builds(MostLikely, ids, numbers)
    data = st.binary(min_size=4 * tokens, max_size=4 * tokens)
    return SampledTokens(
        draw(data), draw(data), draw(st.booleans()), draw(st.none() | likely if top else st.none())
    )


@given(st.lists(sampled(), max_size=4), st.data())
def test_sampled_sequences_are_read_as_they_were(
    drawn: list[SampledTokens], chance: st.DataObject
) -> None:
    body = write_sample_result(drawn)
    assert read_sample_result(body) == [replace(each, top=None) for each in drawn]
    for each, found in zip(drawn, pb.SampleResult.FromString(body).sequences, strict=True):
        top = found.top_tokens
        assert found.HasField("top_tokens") == (each.top is not None)
        if each.top is not None:
            assert (top.positions, top.kept) == each.top.tokens_nk.shape
            assert top.tokens == each.top.tokens_nk.tobytes()
            assert top.logprobs == each.top.logprobs_nk.tobytes()
    changed = bytearray(body)
    if changed:
        changed[chance.draw(st.integers(0, len(body) - 1))] = chance.draw(st.integers(0, 255))
    tried(read_sample_result, bytes(changed))


@st.composite
def prompt_calls(draw: st.DrawFn) -> PromptCall:
    tokens = draw(st.integers(1, 6))
    shape = tokens - 1, draw(st.integers(0, 4))
    listed = draw(arrays.arrays(np.bool_, shape))
    sparse = draw(st.booleans())
    cells = int(listed.sum()) if sparse else listed.size
    tokens_c = draw(arrays.arrays(np.int64, cells, elements=st.integers(-1, 99)))
    rows, columns = np.nonzero(listed)
    layout = (np.searchsorted(rows, np.arange(tokens)), columns) if sparse else ()
    return PromptCall(
        tokens_t=draw(arrays.arrays(np.int64, tokens, elements=st.integers(0, 2**31 - 1))),
        logprobs=draw(st.booleans()),
        last=draw(st.integers(0, 9)),
        top_tokens=draw(st.integers(0, 9)),
        targets=draw(st.sampled_from([None, PromptTargets(shape, tokens_c, *layout)])),
        alternatives=draw(st.integers(0, 9)),
        temperature=draw(st.floats(0, 9)),
        rng_seed=draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
    )


@given(prompt_calls())
def test_a_call_about_a_prompt_is_read_as_it_was(call: PromptCall) -> None:
    found = read_prompt_call(write_prompt_call(call))
    for name in ("logprobs", "last", "top_tokens", "alternatives", "temperature", "rng_seed"):
        assert getattr(found, name) == getattr(call, name)
    assert np.array_equal(found.tokens_t, call.tokens_t)
    assert (found.targets is None) == (call.targets is None)
    if found.targets is not None and call.targets is not None:
        assert found.targets.shape == call.targets.shape
        assert np.array_equal(found.targets.tokens_c, call.targets.tokens_c)
        assert np.array_equal(found.targets.rows_c, call.targets.rows_c)
        assert (found.targets.columns_c is None) == (call.targets.columns_c is None)


@given(prompt_calls(), st.data())
def test_changed_bytes_of_a_call_about_a_prompt_are_read_or_malformed(
    call: PromptCall, chance: st.DataObject
) -> None:
    body = bytearray(write_prompt_call(call))
    if body:
        body[chance.draw(st.integers(0, len(body) - 1))] = chance.draw(st.integers(0, 255))
    tried(read_prompt_call, bytes(body))
