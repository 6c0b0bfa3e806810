"""Bytes that are stored, hashed or signed: one encoding per value, and nothing else is accepted.

Built on the records of `codec`; here the fault of wrong bytes is `IntegrityFault`, because they were promised by a
digest or a signature.
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
    """blake3-256."""
    return Digest(blake3(data).digest())


def require(condition: bool, complaint: str) -> None:  # noqa: FBT001 - reads as a sentence at every call
    """IntegrityFault unless the condition holds."""
    if not condition:
        raise IntegrityFault(complaint)


def canonical_unpacker(cls: type[_Record], *, bytes_max: int) -> Callable[[bytes], _Record]:
    """The strict inverse of `codec.pack`: IntegrityFault unless packing the result again gives the very same bytes."""
    check = unpacker(cls, bytes_max=bytes_max)

    def unpack(data: bytes) -> _Record:
        try:
            record: _Record = check(data)
        except PeerFault as fault:
            raise IntegrityFault(f"not a {cls.__name__}: {fault}") from fault
        require(pack(record) == data, f"not the canonical encoding of a {cls.__name__}")
        return record

    return unpack
