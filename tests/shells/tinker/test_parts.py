"""The parts of a large body are counted as protobuf would find them, and too many are refused before it does."""

import random
import resource

import pytest

from echo2d.tinker import messages_pb2 as pb
from echo2d.tinker.parts import TooManyParts, check_parts
from echo2d.tinker.wire import (
    DATUMS_MAX,
    FORWARD_BACKWARD_BYTES_MAX,
    PARTS_MAX,
    Malformed,
    read_forward_backward,
)

HEAD = pb.ForwardBackwardCall(model="m", number=1, loss="cross_entropy").SerializeToString()
DATUM, CHUNK, TOKEN_SPAN = b"\x1a", b"\x0a", b"\x1a"


def length(number: int) -> bytes:
    """As protobuf writes it."""
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def datum(inside: bytes) -> bytes:
    return DATUM + length(len(inside)) + inside


ROOM = (FORWARD_BACKWARD_BYTES_MAX - 64) // 2
EXPENSIVE = {
    "datums": ((DATUM + b"\0") * ROOM, f"at most {DATUMS_MAX} datums"),
    "chunks": (datum((CHUNK + b"\0") * (ROOM - 8)), f"at most {PARTS_MAX} chunks"),
    "spans of tokens": (datum((TOKEN_SPAN + b"\0") * (ROOM - 8)), f"at most {PARTS_MAX} chunks"),
    "chunks behind a group": (b"\x7b\x7c" + datum((CHUNK + b"\0") * (ROOM - 8)), "no groups"),
    "unknown fields": (b"\x78\x01" * ROOM, f"at most {PARTS_MAX} chunks"),
}


@pytest.mark.parametrize(("parts", "said"), EXPENSIVE.values(), ids=EXPENSIVE.keys())
def test_a_body_of_parts_alone_is_refused_before_it_takes_memory(parts: bytes, said: str) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Malformed, match=said):
        read_forward_backward(HEAD + parts)
    # With protobuf 900 MB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


@pytest.mark.parametrize("rng_seed", range(20))
def test_as_many_parts_as_the_limit_are_not_too_many(rng_seed: int) -> None:
    rng = random.Random(rng_seed)
    chunks = [rng.randint(1, 20) for _ in range(rng.randint(1, 9))]
    message = pb.ForwardBackwardCall(model="m", number=rng.randint(1, 1 << 31 - 1))
    for count in chunks:
        text = pb.Text(tokens=rng.randbytes(4 * rng.randint(0, 99)))
        message.data.append(pb.TrainingDatum(chunks=[pb.InputChunk(text=text)] * count))
    body = message.SerializeToString()
    parts = 2 + len(chunks) + sum(chunks)
    check_parts(body, len(chunks), parts)
    with pytest.raises(TooManyParts, match="datums"):
        check_parts(body, len(chunks) - 1, parts)
    with pytest.raises(TooManyParts, match="chunks"):
        check_parts(body, len(chunks), parts - 1)


def test_broken_bytes_are_left_to_protobuf() -> None:
    for broken in (b"\xff" * 20, b"\x1a\x05ab", b"\x09", b"\x0a"):
        check_parts(broken, 0, 0)


def test_a_large_body_of_few_parts_is_read() -> None:
    text = pb.InputChunk(text=pb.Text(tokens=bytes(2 << 20)))
    body = pb.ForwardBackwardCall(data=[pb.TrainingDatum(chunks=[text])]).SerializeToString()
    assert len(read_forward_backward(HEAD + body).data[0].tokens_t) == 1 << 19
