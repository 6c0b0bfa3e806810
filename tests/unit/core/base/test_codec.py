"""The codec accepts values of the annotated types and nothing else."""

from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import pytest

from echo2d.core.base.codec import INT_MAX, TEXT_CHARS_MAX, Codec, pack, unpacker
from echo2d.core.base.ids import Digest, PeerId
from echo2d.errors import PeerFault


@dataclass(frozen=True, slots=True)
class Part:
    digest: Digest
    weight: float


@dataclass(frozen=True, slots=True)
class Everything:
    count: int
    ready: bool
    peer: PeerId | None
    kind: Literal["star", "chain"]
    parts: tuple[Part, ...]


CODEC = Codec({"Everything": Everything})
SAMPLE = Everything(7, True, None, "chain", (Part(Digest(b"x" * 32), 0.5),))
FIELDS: list[Any] = [7, True, None, "chain", [[b"x" * 32, 0.5]]]


def wire(*fields: Any, tag: Any = "Everything") -> bytes:
    packed: bytes = msgpack.packb([tag, *fields])
    return packed


def test_messages_round_trip() -> None:
    assert CODEC.decode(CODEC.encode(SAMPLE)) == SAMPLE
    assert CODEC.encode(SAMPLE) == wire(*FIELDS)


def test_records_without_a_tag_round_trip() -> None:
    unpack = unpacker(Everything, bytes_max=1000)
    assert unpack(pack(SAMPLE)) == SAMPLE
    with pytest.raises(PeerFault, match="at most 10"):
        unpacker(Everything, bytes_max=10)(pack(SAMPLE))


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, -1), (0, INT_MAX + 1), (0, True), (0, 1.0), (0, "7"), (0, None),
        (1, 1), (1, None),
        (2, 5), (2, "x" * (TEXT_CHARS_MAX + 1)), (2, b"peer"),
        (3, "ring"), (3, None), (3, ["star"]),
        (4, "parts"), (4, [[b"x" * 32]]), (4, [[b"x" * 32, "0.5"]]), (4, [{"digest": b""}]), (4, {}),
    ],
)  # fmt: skip
def test_a_message_with_wrong_fields_is_a_peer_fault(position: int, value: Any) -> None:
    fields = [*FIELDS]
    fields[position] = value
    with pytest.raises(PeerFault):
        CODEC.decode(wire(*fields))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\xff", wire(*FIELDS)[:-1], wire(*FIELDS) + b"\x00", wire(*FIELDS[:-1]),
        wire(*FIELDS, tag="Nothing"), wire(*FIELDS, tag=3), msgpack.packb([]), msgpack.packb({"a": 1}), b"\x91" * 2000,
        b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    ],
)  # fmt: skip
def test_malformed_messages_are_a_peer_fault(data: bytes) -> None:
    with pytest.raises(PeerFault):
        CODEC.decode(data)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ([-1, *FIELDS[1:]], "Everything.count: expected a non-negative integer, got int"),
        ([*FIELDS[:3], "ring", []], "Everything.kind: expected one of star, chain, got 'ring'"),
        (
            [*FIELDS[:4], [[b"x", 0.5]]],
            "Everything.parts: Part.digest: expected a digest of 32 bytes, got bytes",
        ),
        (FIELDS[:-1], "Everything: expected 5 fields, got 4"),
    ],
)
def test_a_fault_names_the_field(fields: list[Any], text: str) -> None:
    with pytest.raises(PeerFault) as fault:
        CODEC.decode(wire(*fields))
    assert str(fault.value) == text


@dataclass(frozen=True, slots=True)
class Grown:
    """`Everything` as a later release may have it."""

    count: int
    ready: bool
    peer: PeerId | None
    kind: Literal["star", "chain"]
    parts: tuple[Part, ...]
    disk_bytes: int | None = None
    tags: tuple[str, ...] = ()


def test_a_message_may_have_fields_that_this_build_does_not_know() -> None:
    part = [b"x" * 32, 0.5, "unknown", [1]]
    assert CODEC.decode(wire(*FIELDS[:4], [part], 7, ["new"])) == SAMPLE


@pytest.mark.parametrize("sent", [(), (7,), (7, ["new"])])
def test_a_message_may_lack_fields_that_an_older_build_did_not_know(sent: tuple[Any, ...]) -> None:
    grown = Codec({"Everything": Grown}).decode(wire(*FIELDS, *sent))
    assert (grown.disk_bytes, grown.tags) == ((None, ()), (7, ()), (7, ("new",)))[len(sent)]


def test_a_known_field_is_checked_also_where_it_may_be_missing() -> None:
    with pytest.raises(PeerFault, match="disk_bytes: expected a non-negative integer, got str"):
        Codec({"Everything": Grown}).decode(wire(*FIELDS, "much"))


@pytest.mark.parametrize("fields", [FIELDS, [*FIELDS, None, [], 1]], ids=["few", "many"])
def test_a_stored_message_has_exactly_its_fields(fields: list[Any]) -> None:
    packed = msgpack.packb(fields)
    with pytest.raises(PeerFault, match="Grown: expected 7 fields"):
        unpacker(Grown, bytes_max=1000)(packed)
    assert unpacker(Grown, bytes_max=1000, grows=True)(packed).disk_bytes is None


def test_a_message_that_is_too_long_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(PeerFault, match="at most 16"):
        Codec({"Everything": Everything}, bytes_max=16).decode(b"\xc1" * 17)


def test_encoding_a_message_in_the_wrong_direction_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="is not a message of this codec"):
        CODEC.encode(Part(Digest(b""), 1.0))
