"""Protobuf bodies of the Tinker API as numpy arrays, and back: pure functions over `messages.proto`.

A client sends forward_backward in this form and takes its result only in this form. Fields that are unknown here are
ignored, so that newer clients are understood. All else that does not fit is Malformed. Not here: what a loss needs (the
learner), and the JSON bodies of all other routes (`net/tinker`).

Strangers send these bytes. A body has at most FORWARD_BACKWARD_BYTES_MAX bytes, and its parts are counted before
protobuf makes objects of them. Sparse inputs are made dense only after their size has been checked.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from echo2d.tinker import messages_pb2 as pb
from echo2d.tinker.parts import TooManyParts, check_parts
from echo2d.tinker.prompts import MostLikely, PromptCall, PromptScores, PromptTargets

# One forward_backward. The client sends at most 5 MB, or a single datum: 131,072 tokens with 5 targets and weights for
# each of them, in the sparse form, take 20 MB.
FORWARD_BACKWARD_BYTES_MAX = 32 << 20
# One forward_backward may have this many datums, twice as many as the client sends.
DATUMS_MAX = 2048
# Chunks, inputs and spans of all datums, and settings. Reading this many takes a second; a datum of text and a
# conversation of 20 turns has 1 to 50.
PARTS_MAX = 1 << 18
# The parts of a larger body are counted before they are parsed. Those of a smaller one take at most 30 MB.
COUNTED_BYTES_MIN = 1 << 20
AXES_MAX = 2  # of an input: [tokens], or [tokens, targets for each token]
# Numbers of all inputs of one forward_backward, the zeros of sparse ones included: twice as many as a body without
# sparse inputs can hold, and 128 MiB as int64.
CELLS_MAX = 1 << 24

CallT = TypeVar("CallT", pb.CallHead, pb.ForwardBackwardCall, pb.PromptCall, pb.SampleResult)
_DTYPES: Mapping[int, np.dtype[Any]] = {
    pb.ELEMENT_FLOAT32: np.dtype("<f4"),
    pb.ELEMENT_INT64: np.dtype("<i8"),
}


class Malformed(ValueError):  # noqa: N818 - it says what the body is
    """The body is no message of this API. The text is one line for the client."""


@dataclass(frozen=True, slots=True)
class Head:
    """What orders a forward_backward, without its data."""

    model: str
    # The client's number of this call, from 1 on. 0: none was sent.
    number: int
    loss: str
    # True: no gradient is wanted.
    forward_only: bool


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """Consecutive targets of a datum that are consecutive tokens of one sampled sequence or of its prompt."""

    sequence: str  # its id, which the answer to asample named
    offset: int  # of the first of them in the sequence or in the prompt, in tokens
    length: int  # in tokens
    sampled: bool  # False: they are tokens of the prompt


@dataclass(frozen=True, slots=True)
class Datum:
    """One row of tokens and what the loss needs for each of them. The arrays are the reader's own."""

    tokens_t: NDArray[np.int64]
    # float32 or int64, by name: [tokens], or [tokens, targets for each token].
    inputs: Mapping[str, NDArray[Any]]
    # Where the targets come from, in their order. Empty: the client did not say.
    spans: tuple[SequenceSpan, ...]


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A whole forward_backward."""

    head: Head
    # Settings of the loss, by name.
    config: Mapping[str, float | str]
    data: tuple[Datum, ...]


def read_head(body: bytes) -> Head:
    """The head of a forward_backward. Its data are not decoded and may be malformed."""
    return _head(_parse(pb.CallHead(), body))


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Decode and check a whole forward_backward. Sparse inputs become dense."""
    if COUNTED_BYTES_MIN < len(body) <= FORWARD_BACKWARD_BYTES_MAX:
        try:
            check_parts(body, DATUMS_MAX, PARTS_MAX)
        except TooManyParts as many:
            raise Malformed(str(many)) from None
    call = _parse(pb.ForwardBackwardCall(), body)
    head = _head(call)
    _check_size(call)
    data = tuple(map(_datum, itertools.count(), call.data))
    return ForwardBackward(head, _config(call), data)


def write_forward_backward_output(
    logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]
) -> bytes:
    """The result of a forward_backward.

    logprobs: of the targets of each datum, in nats, in the shape of its `target_tokens`.
    metrics: the client merges them by the end of their names, so each name is `what:sum`, `what:mean` or the like.
    """
    result = pb.ForwardBackwardResult(record_type="ArrayRecord", metrics=metrics)
    for other_axes, arrays in itertools.groupby(logprobs, key=lambda each: each.shape[1:]):
        data = [each.astype("<f4").tobytes() for each in arrays]
        offsets = np.cumsum([0, *map(len, data)], dtype="<i8").tobytes()
        field = pb.Ragged(
            data=b"".join(data),
            offsets=offsets,
            element=pb.ELEMENT_FLOAT32,
            other_axes=other_axes,
        )
        result.records.add(record_type="ArrayRecord", datums=len(data), fields={"logprobs": field})
    body: bytes = result.SerializeToString(deterministic=True)
    return body


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sampled sequence."""

    tokens: bytes  # int32
    logprobs: bytes  # float32
    cut: bool  # it ended because it was long enough
    top: MostLikely | None = None  # at each token


def write_sample_result(sequences: Sequence[SampledTokens]) -> bytes:
    """The result of asample."""
    ends = {True: pb.END_LENGTH, False: pb.END_STOP}
    result = pb.SampleResult()
    for each in sequences:
        found = result.sequences.add(end=ends[each.cut], tokens=each.tokens, logprobs=each.logprobs)
        if each.top is not None:
            _write_top(found.top_tokens, each.top)
    body: bytes = result.SerializeToString(deterministic=True)
    return body


def read_sample_result(body: bytes) -> list[SampledTokens]:
    """What `write_sample_result` has written, without the most likely tokens. Malformed: it has not."""
    found = _parse(pb.SampleResult(), body).sequences
    return [SampledTokens(each.tokens, each.logprobs, each.end == pb.END_LENGTH) for each in found]


def write_prompt_call(call: PromptCall) -> bytes:
    """The body of the learner's order "score"."""
    message = pb.PromptCall(
        tokens=call.tokens_t.astype("<i4").tobytes(),
        logprobs=call.logprobs,
        last=call.last,
        top_tokens=call.top_tokens,
        targets=None
        if call.targets is None
        else _cells(call.targets, call.targets.tokens_c, pb.ELEMENT_INT64),
        alternatives=call.alternatives,
        temperature=call.temperature,
        rng_seed=call.rng_seed,
    )
    body: bytes = message.SerializeToString()
    return body


def read_prompt_call(body: bytes) -> PromptCall:
    """Malformed: the body is none that `write_prompt_call` has written."""
    call, place = _parse(pb.PromptCall(), body), "prompt"
    targets = None
    if call.HasField("targets"):
        given, int64 = call.targets, np.dtype("<i8")
        if len(given.shape) != 2:
            raise Malformed(f"{place}: expected two axes of targets; found {len(given.shape)}")
        shape = given.shape[0], given.shape[1]
        if given.WhichOneof("values") == "sparse":
            starts = _numbers(given.sparse.row_starts, shape[0] + 1, int64, place)
            columns = _numbers(given.sparse.columns, int(starts[-1]), int64, place)
            cells = _numbers(given.sparse.entries, int(starts[-1]), int64, place)
            targets = PromptTargets(shape, cells, starts, columns)
        else:
            targets = PromptTargets(shape, _numbers(given.dense, math.prod(shape), int64, place))
    return PromptCall(
        tokens_t=np.frombuffer(call.tokens, "<i4").astype(np.int64),
        logprobs=call.logprobs,
        last=call.last,
        top_tokens=call.top_tokens,
        targets=targets,
        alternatives=call.alternatives,
        temperature=call.temperature,
        rng_seed=call.rng_seed if call.HasField("rng_seed") else None,
    )


def write_prompt_scores(call: PromptCall, scores: PromptScores) -> bytes:
    """A part of the result of asample: what the client has asked of the prompt."""
    result = pb.SampleResult()
    if call.logprobs:
        result.prompt_logprobs = scores.logprobs_t.astype("<f4").tobytes()
    if call.top_tokens:
        top = MostLikely(scores.top_tokens_tk, scores.top_logprobs_tk)
        _write_top(result.prompt_top_tokens, top)
    if call.targets is not None:
        cells = _cells(call.targets, scores.targets_c, pb.ELEMENT_FLOAT32)
        result.target_prompt_logprobs.CopyFrom(cells)
    if call.alternatives:
        shape, found = scores.alternatives_tk.shape, result.prompt_alternatives
        found.tokens.CopyFrom(_dense_tensor(scores.alternatives_tk, shape, pb.ELEMENT_INT64))
        found.logprobs.CopyFrom(
            _dense_tensor(scores.alternative_logprobs_tk, shape, pb.ELEMENT_FLOAT32)
        )
    body: bytes = result.SerializeToString()
    return body


def _write_top(message: pb.TopTokens, top: MostLikely) -> None:
    message.positions, message.kept = top.tokens_nk.shape
    message.tokens = top.tokens_nk.astype("<i4").tobytes()
    message.logprobs = top.logprobs_nk.astype("<f4").tobytes()


def _cells(layout: PromptTargets, values_c: NDArray[Any], element: pb.Element) -> pb.Tensor:
    """These values in the client's layout."""
    if layout.row_starts is None or layout.columns_c is None:
        return _dense_tensor(values_c, layout.shape, element)
    rows = pb.SparseRows(
        entries=values_c.astype(_DTYPES[element]).tobytes(),
        row_starts=layout.row_starts.astype("<i8").tobytes(),
        columns=layout.columns_c.astype("<i8").tobytes(),
    )
    return pb.Tensor(sparse=rows, element=element, shape=layout.shape)


def _dense_tensor(values: NDArray[Any], shape: tuple[int, ...], element: pb.Element) -> pb.Tensor:
    data = values.astype(_DTYPES[element]).tobytes()
    return pb.Tensor(dense=data, element=element, shape=shape)


def _parse(call: CallT, body: bytes) -> CallT:
    """Fill the empty message with the body, and return it."""
    if len(body) > FORWARD_BACKWARD_BYTES_MAX:
        raise Malformed(
            f"body: expected at most {FORWARD_BACKWARD_BYTES_MAX} bytes; found {len(body)}"
        )
    try:
        call.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError, RecursionError):  # the last two: without its C code
        raise Malformed(
            f"body: expected a protobuf message; found {len(body)} other bytes"
        ) from None
    return call


def _head(call: pb.CallHead | pb.ForwardBackwardCall) -> Head:
    if call.number < 0:
        raise Malformed(f"seq_id: expected a number from 1 on; found {call.number}")
    return Head(call.model, call.number, call.loss, call.forward_only)


def _check_size(call: pb.ForwardBackwardCall) -> None:
    """Before the first array is made."""
    data = call.data
    if len(data) > DATUMS_MAX:
        raise Malformed(f"data: expected at most {DATUMS_MAX} datums; found {len(data)}")
    parts = sum([len(each.chunks) + len(each.inputs) + len(each.target_spans) for each in data])
    parts += len(call.old_config) + len(call.config)
    if parts > PARTS_MAX:
        raise Malformed(
            f"body: expected at most {PARTS_MAX} chunks, inputs, spans and settings; found {parts}"
        )
    cells = sum(
        math.prod(_shape(tensor, _place(index, name)))
        for index, datum in enumerate(data)
        for name, tensor in datum.inputs.items()
    )
    if cells > CELLS_MAX:
        raise Malformed(f"data: expected at most {CELLS_MAX} numbers in all inputs; found {cells}")


def _config(call: pb.ForwardBackwardCall) -> dict[str, float | str]:
    config: dict[str, float | str] = dict(call.old_config)
    for name, setting in call.config.items():
        kind = setting.WhichOneof("value")
        if kind is None:
            raise Malformed(
                f"loss_fn_config {name[:40]!r}: expected a number or a text; found neither"
            )
        config[name] = setting.number if kind == "number" else setting.text
    return config


def _datum(index: int, datum: pb.TrainingDatum) -> Datum:
    place = f"datum {index}"
    tokens = [_tokens(chunk, place) for chunk in datum.chunks]
    inputs = {name: _array(tensor, _place(index, name)) for name, tensor in datum.inputs.items()}
    spans = tuple([_span(span, place) for span in datum.target_spans])
    return Datum(np.concatenate([np.zeros(0, np.int64), *tokens]), inputs, spans)


def _place(index: int, name: str) -> str:
    """An input, for a line about it."""
    return f"datum {index}, input {name[:40]!r}"


def _tokens(chunk: pb.InputChunk, place: str) -> NDArray[np.int64]:
    kind = chunk.WhichOneof("content")
    if kind != "text":
        raise Malformed(f"{place}, model_input: expected text; found {kind or 'an unknown kind'}")
    data = chunk.text.tokens
    if len(data) % 4:
        raise Malformed(
            f"{place}, model_input: expected 4 bytes for each token; found {len(data)} bytes"
        )
    tokens = np.frombuffer(data, "<i4").astype(np.int64)
    if (tokens < 0).any():
        raise Malformed(f"{place}, model_input: expected tokens from 0 on; found {tokens.min()}")
    return tokens


def _shape(tensor: pb.Tensor, place: str) -> tuple[int, ...]:
    """The shape of an input. None was sent: it is flat."""
    dtype = _DTYPES.get(tensor.element)
    if dtype is None:
        raise Malformed(f"{place}: expected float32 or int64; found element {tensor.element}")
    if not tensor.shape:
        return (len(tensor.dense) // dtype.itemsize,)
    if len(tensor.shape) > AXES_MAX or not all(0 <= each <= CELLS_MAX for each in tensor.shape):
        raise Malformed(
            f"{place}: expected at most {AXES_MAX} axes of 0 to {CELLS_MAX}; "
            f"found the shape {list(tensor.shape[: AXES_MAX + 1])}"
        )
    return tuple(tensor.shape)


def _array(tensor: pb.Tensor, place: str) -> NDArray[Any]:
    """The dense array of an input whose shape has been checked."""
    shape, dtype = _shape(tensor, place), _DTYPES[tensor.element]
    match tensor.WhichOneof("values"):
        case "dense":
            return _numbers(tensor.dense, math.prod(shape), dtype, place).reshape(shape)
        case "sparse":
            return _dense(tensor.sparse, shape, dtype, place)
        case _:
            raise Malformed(f"{place}: expected dense or sparse_csr values; found neither")


def _numbers(data: bytes, count: int, dtype: np.dtype[Any], place: str) -> NDArray[Any]:
    """A writable flat array of exactly this many numbers."""
    if len(data) != count * dtype.itemsize:
        raise Malformed(
            f"{place}: expected {count * dtype.itemsize} bytes for {count} numbers; found {len(data)}"
        )
    return np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))


def _dense(
    sparse: pb.SparseRows, shape: tuple[int, ...], dtype: np.dtype[Any], place: str
) -> NDArray[Any]:
    """The matrix of these sparse rows, with zeros where they have no entry."""
    if len(shape) != 2:
        raise Malformed(f"{place}: expected two axes for sparse_csr; found the shape {list(shape)}")
    (rows, width), int64 = shape, np.dtype("<i8")
    starts = _numbers(sparse.row_starts, rows + 1, int64, f"{place}, crow_indices")
    count = int(starts[-1])
    if starts[0] != 0 or (starts[1:] < starts[:-1]).any():
        raise Malformed(f"{place}, crow_indices: expected 0 and then no decrease; found otherwise")
    columns = _numbers(sparse.columns, count, int64, f"{place}, col_indices")
    entries = _numbers(sparse.entries, count, dtype, f"{place}, values")
    if ((columns < 0) | (columns >= width)).any():
        raise Malformed(f"{place}, col_indices: expected 0 to {width - 1}; found one outside")
    cells = np.repeat(np.arange(rows) * width, np.diff(starts)) + columns
    if (cells[1:] <= cells[:-1]).any():
        raise Malformed(f"{place}, col_indices: expected an increase in each row; found otherwise")
    dense = np.zeros(rows * width, entries.dtype)
    dense[cells] = entries
    return dense.reshape(shape)


def _span(span: pb.OriginSpan, place: str) -> SequenceSpan:
    kind = span.WhichOneof("origin")
    if kind is None:
        raise Malformed(f"{place}, loss_fn_input_spans: expected prompt or sampled; found neither")
    part = span.sampled if kind == "sampled" else span.prompt
    if part.offset < 0 or part.length < 0:
        raise Malformed(
            f"{place}, loss_fn_input_spans: expected an offset and a length from 0 on; "
            f"found {part.offset} and {part.length}"
        )
    return SequenceSpan(part.sequence, part.offset, part.length, sampled=kind == "sampled")
