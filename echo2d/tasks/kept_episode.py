"""The saved form of an episode in text between two turns: its environment's state, and all messages so far.

    length of the state, 4 bytes | state | messages and tools, compressed JSON, or nothing

The messages are needed when a conversation is rendered again, as a branch. If they do not fit beside
the state they are left out, and an episode that needs them ends.
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo2d.tasks.environment import STATE_BYTES_MAX, EpisodeLost

_HEAD = struct.Struct(">I")
KEPT_BYTES_MAX = _HEAD.size + STATE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Said:
    """All messages of an episode, the policy's answers among them, and the tools of its first turn."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()

    def plus(self, *messages: Mapping[str, Any]) -> "Said":
        return Said([*self.messages, *messages], self.tools)


def kept(state: bytes, said: Said | None) -> bytes:
    """The saved form. state: at most STATE_BYTES_MAX bytes."""
    packed = _HEAD.pack(len(state)) + state
    if said is None:
        return packed
    try:
        text = json.dumps([list(said.messages), list(said.tools)])
    # An environment's messages may hold anything.
    except (TypeError, ValueError, RecursionError):
        return packed
    # The fastest level: it is done after every turn.
    whole = packed + zlib.compress(text.encode(), 1)
    return whole if len(whole) <= KEPT_BYTES_MAX else packed


def read_kept(packed: bytes) -> tuple[bytes, Said | None]:
    """The state, and the messages if they were kept. EpisodeLost: `kept` did not make this."""
    head, rest = packed[: _HEAD.size], packed[_HEAD.size :]
    if len(head) < _HEAD.size or len(rest) < (size := _HEAD.unpack(head)[0]):
        raise EpisodeLost("its state was saved by another build of echo2d")
    state, text = rest[:size], rest[size:]
    return state, Said(*json.loads(zlib.decompress(text))) if text else None
