"""Decode bytes that are stored, hashed or signed: each value has one encoding, and no other is
accepted.

Built on the records of `codec`. Wrong bytes are an `IntegrityFault` here, not a `PeerFault`,
because a digest or a signature vouched for them.
"""

from collections.abc import Callable
from typing import TypeVar

from blake3 import blake3

from echo2d.core.base.codec import pack, unpacker
from echo2d.core.base.ids import Digest
from echo2d.errors import IntegrityFault, PeerFault

Buffer = bytes | bytearray | memoryview

_Record = TypeVar("_Record")


def digest_of(data: Buffer) -> Digest:
    """The blake3-256 digest."""
    return Digest(blake3(data).digest())


def require(condition: bool, complaint: str) -> None:  # noqa: FBT001 - reads like assert
    """Raise an IntegrityFault with the complaint unless the condition holds."""
    if not condition:
        raise IntegrityFault(complaint)


def canonical_unpacker(cls: type[_Record], *, bytes_max: int) -> Callable[[bytes], _Record]:
    """Make the strict inverse of `codec.pack`: IntegrityFault unless packing the result gives the
    same bytes again.
    """
    check = unpacker(cls, bytes_max=bytes_max)

    def unpack(data: bytes) -> _Record:
        try:
            record: _Record = check(data)
        except PeerFault as fault:
            raise IntegrityFault(f"not a {cls.__name__}: {fault}") from fault
        require(pack(record) == data, f"not the canonical encoding of a {cls.__name__}")
        return record

    return unpack
