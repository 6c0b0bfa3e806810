"""Counts the parts of a large forward_backward before protobuf parses it.

A part of two bytes becomes an object of sixty. So a body that is nothing but parts would take thirty times its bytes
and a second of the learner, only to be refused.

    body --> its fields --> of each datum its fields --> too many: Malformed
"""

from collections.abc import Iterator

DATA = 3  # the field of ForwardBackwardCall
VARINT_BYTES_MAX = 10
# A field of a fixed size has as many bytes, by its wire type.
FIXED_BYTES = {1: 8, 5: 4}
VARINT, DELIMITED = 0, 2


class TooManyParts(ValueError):  # noqa: N818 - it says what the body has
    """The text names the limit."""


def check_parts(body: bytes, datums_max: int, parts_max: int) -> None:
    """TooManyParts: the body has more datums, or more parts of datums and settings. What is no message is not refused:
    protobuf does that, after as many parts.
    """
    datums = parts = 0
    for field, start, end in _fields(body, 0, len(body)):
        parts += 1
        if field == DATA:
            datums += 1
            if datums > datums_max:
                raise TooManyParts(f"data: expected at most {datums_max} datums; found more")
            for _ in _fields(body, start, end):
                parts += 1
                if parts > parts_max:
                    break
        if parts > parts_max:
            raise TooManyParts(
                f"body: expected at most {parts_max} chunks, inputs, spans and settings; found more"
            )


def _fields(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The number of each field of a message, and where its value begins and ends, up to the first that is broken."""
    while at < end:
        tag, at = _varint(body, at, end)
        kind = tag & 7
        if kind == DELIMITED:
            size, at = _varint(body, at, end)
            after = at + size
        elif kind == VARINT:
            _, after = _varint(body, at, end)
        elif kind in FIXED_BYTES:
            after = at + FIXED_BYTES[kind]
        else:
            # Fields in groups, which no client sends, would not be counted.
            raise TooManyParts("body: expected no groups")
        if after > end:
            return
        yield tag >> 3, at, after
        at = after


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """The number that begins here, and where it ends: beyond `end` if it is broken."""
    value = 0
    for place in range(min(VARINT_BYTES_MAX, end - at)):
        byte = body[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    return 0, end + 1
