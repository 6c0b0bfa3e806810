"""The kept state of an episode in text."""

import random
from typing import Any

import pytest

from echo2d.tasks.environment import STATE_BYTES_MAX, EpisodeLost
from echo2d.tasks.kept_episode import KEPT_BYTES_MAX, Said, kept, read_kept


def test_state_and_messages_can_be_read_again() -> None:
    said = Said([{"role": "user", "content": "é\ud800"}], [{"name": "look"}])
    said = said.plus({"role": "assistant", "content": "", "tool_calls": [{"big": 1 << 80}]})
    for state in (b"", b"state", bytes(range(256))):
        assert read_kept(kept(state, said)) == (state, said)
        assert read_kept(kept(state, None)) == (state, None)


def noise(characters: int) -> Said:
    content = random.Random(0).randbytes(characters // 2).hex()
    return Said([{"role": "user", "content": content}], [])


@pytest.mark.parametrize(
    "said", [noise(200_000), Said([{"content": object()}]), Said([{"content": {1j: 1}}])]
)
def test_messages_that_are_too_large_are_not_kept(said: Said) -> None:
    assert read_kept(kept(b"state", said)) == (b"state", None)


def test_the_largest_state_is_kept_without_messages() -> None:
    state = bytes(STATE_BYTES_MAX)
    packed = kept(state, noise(100))
    assert len(packed) == KEPT_BYTES_MAX
    assert read_kept(packed) == (state, None)
    assert read_kept(kept(state[:-200], noise(100)))[1] == noise(100)


@pytest.mark.parametrize("packed", [b"", b"abc", b"\x80\x04\x95\x08pickle", b"\0\0\0\2x"])
def test_a_state_of_another_build_is_not_read(packed: Any) -> None:
    with pytest.raises(EpisodeLost, match="another build"):
        read_kept(packed)
