"""Records of chunks that are composed of several deltas."""

import random
from itertools import pairwise

import pytest

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import ChunkId
from echo2d.core.weights.delta import ChunkMode
from echo2d.core.weights.delta_chain import compose_record
from echo2d.core.weights.form import NO_BASE, ChunkRecord, decode_record, encode_record
from echo2d.errors import IntegrityFault

pytestmark = pytest.mark.usefixtures("codec")

CHUNK = ChunkId(3)


def versions(*words: int) -> list[bytes]:
    """Of a chunk: word 7 is this, one after the other."""
    start = bytes(range(256)) * 8
    return [start[:14] + word.to_bytes(2, "little") + start[16:] for word in words]


def chain_of(contents: list[bytes]) -> list[tuple[ChunkRecord, bytes]]:
    return [encode_record(CHUNK, new, base) for base, new in pairwise(contents)]


def test_a_composed_record_equals_the_one_made_from_the_base() -> None:
    contents = versions(5, 6, 0xFFFF, 9)
    record, payload = compose_record(
        CHUNK, chain_of(contents), len(contents[0]), lambda: b"not read"
    )
    assert (record, payload) == encode_record(CHUNK, contents[-1], contents[0])
    assert record.mode == ChunkMode.SPARSE
    assert decode_record(record, payload, len(contents[0]), contents[0]) == contents[-1]


def test_a_chain_that_begins_with_a_full_chunk_needs_no_base() -> None:
    contents = versions(5, 6, 7)
    chain = [encode_record(CHUNK, contents[1]), *chain_of(contents)[1:]]
    record, payload = compose_record(CHUNK, chain, len(contents[0]), lambda: b"not read")
    assert (record, payload) == encode_record(CHUNK, contents[2])
    assert record.base == NO_BASE


def test_a_chunk_that_is_larger_as_a_delta_is_sent_in_full() -> None:
    """Each of two changes half of the words by anything; together that is all of them."""
    rng = random.Random(1)
    first = rng.randbytes(4000)
    second = rng.randbytes(2000) + first[2000:]
    third = second[:2000] + rng.randbytes(2000)
    chain = chain_of([first, second, third])
    assert [record.mode for record, _ in chain] == [ChunkMode.DENSE, ChunkMode.DENSE]
    record, payload = compose_record(CHUNK, chain, 4000, lambda: third)
    assert (record, payload) == encode_record(CHUNK, third)
    with pytest.raises(IntegrityFault, match="chunk 3 is not what its deltas make"):
        compose_record(CHUNK, chain, 4000, lambda: first)
    assert record.result == digest_of(third)
