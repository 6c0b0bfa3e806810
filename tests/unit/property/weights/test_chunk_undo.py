"""What undoes a chunk: it restores any mixture of the old and the new words, and never writes past its chunk."""

import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.weights.chunk_undo import apply_undo, encode_undo
from echo2d.errors import IntegrityFault

LENGTHS = st.integers(0, 3000)


def changed(old: bytes, share: float, rng: random.Random) -> bytes:
    return bytes(rng.randrange(256) if rng.random() < share else each for each in old)


@given(
    LENGTHS, st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0]), st.randoms(use_true_random=False)
)
def test_any_mixture_of_old_and_new_becomes_the_old(
    length: int, share: float, rng: random.Random
) -> None:
    old = rng.randbytes(length)
    new = changed(old, share, rng)
    record = encode_undo(new, old)
    assert (record is None) == (new == old)
    if record is None:
        return
    assert len(record) <= length
    cut = rng.randrange(length + 1)
    for mixture in (new, old, new[:cut] + old[cut:], old[:cut] + new[cut:]):
        chunk = bytearray(mixture)
        for _ in range(2):
            apply_undo(record, chunk)
            assert chunk == old


@given(st.binary(max_size=200), LENGTHS)
def test_a_wrong_record_is_refused_or_stays_within_its_chunk(record: bytes, length: int) -> None:
    chunk = bytearray(length)
    with suppress(IntegrityFault):
        apply_undo(record, chunk)
    assert len(chunk) == length


def test_few_changes_take_little_room() -> None:
    rng = random.Random(1)
    old = rng.randbytes(1 << 20)
    new = bytearray(old)
    for place in range(0, len(old), 200):
        new[place] ^= 1
    record = encode_undo(bytes(new), old)
    assert record is not None
    assert len(record) < 0.03 * len(old)


@pytest.mark.parametrize("length", [1, 7, 100])
def test_a_record_of_another_chunk_is_refused(length: int) -> None:
    old = bytes(1000)
    record = encode_undo(old[:500] + b"\1" + old[501:], old)
    assert record is not None
    with pytest.raises(IntegrityFault):
        apply_undo(record, bytearray(length))
