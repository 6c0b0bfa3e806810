"""Encode messages as msgpack, and decode and check what arrives.

A message is a frozen dataclass. On the wire it is the array `[tag, field, field, ...]` in field
order; nested dataclasses and NamedTuples are arrays without a tag. A codec maps tags to classes, so
that classes can be renamed freely. Checks are built once from the annotations of the fields, which
may be:

- int (0 <= x < 2**63), float, bool, bytes, str (at most TEXT_CHARS_MAX characters), Literal of
  strings;
- a Digest (DIGEST_BYTES bytes), and any other NewType of these;
- a nested message class or NamedTuple, `tuple[X, ...]` (at most ITEMS_MAX items), and `X | None`.

Everything else is a `PeerFault` that names the field: an unknown tag, a wrong type, too few fields,
a negative or huge integer, a message that is too long.

A message may grow from one release to the next: a codec ignores what follows the fields that it
knows, and fields that have a default may be missing at the end. The same holds for records in a
message. A record that is stored, signed or hashed (`unpacker`, `plain_reader`) must have exactly its
fields, unless it may `grow`.

Strangers send these bytes, so the cost of decoding is bounded before they are decoded: a limit of
bytes for each tag, at most VALUES_MAX values however they are nested, no maps and no extensions.
"""

import dataclasses
import operator
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Union

import msgpack

from echo2d.core.base.ids import DIGEST_BYTES, Digest
from echo2d.errors import PeerFault

# One control message. A lease with 32k prompt tokens takes 128 KiB, a result 8 bytes a token.
MESSAGE_BYTES_MAX = 4 << 20
# One control message that carries no tokens, no frames and no long lists.
SMALL_BYTES_MAX = 64 << 10
TEXT_CHARS_MAX = 4096  # reasons and names, which people read
# Items of one list in a message: twice the longest honest list, which names revoked versions. The
# limit bounds the number of objects that a message makes.
ITEMS_MAX = 8192
# Values of one message, lists included: twice as many as the longest honest report has spans. Unpacking
# this many takes 10 ms at most, and checking them 30 ms
# (tests/unit/property/protocol/test_costly_messages.py).
VALUES_MAX = 1 << 16
TAG_CHARS_MAX = 31  # so that a tag follows the head of the message as one short string
INT_MAX = (1 << 63) - 1

_Check = Callable[[Any], Any]


def _wrong(expected: str, value: object) -> PeerFault:
    return PeerFault(f"expected {expected}, got {type(value).__name__}")


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= INT_MAX:
        raise _wrong("a non-negative integer", value)
    return value


def _float(value: Any) -> float:
    if type(value) not in (float, int):
        raise _wrong("a number", value)
    return float(value)


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _wrong("a boolean", value)
    return value


def _str(value: Any) -> str:
    if type(value) is not str or len(value) > TEXT_CHARS_MAX:
        raise _wrong(f"text of at most {TEXT_CHARS_MAX} characters", value)
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise _wrong("bytes", value)
    return value


def _digest(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != DIGEST_BYTES:
        raise _wrong(f"a digest of {DIGEST_BYTES} bytes", value)
    return value


_SCALARS: dict[Any, _Check] = {int: _int, float: _float, bool: _bool, str: _str, bytes: _bytes}


def _literal(choices: tuple[Any, ...]) -> _Check:
    def check(value: Any) -> Any:
        if value not in choices:
            found = repr(value[:64]) if type(value) is str else type(value).__name__
            raise PeerFault(f"expected one of {', '.join(map(str, choices))}, got {found}")
        return value

    return check


def _optional(inner: _Check) -> _Check:
    return lambda value: None if value is None else inner(value)


def _sequence(inner: _Check) -> _Check:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _wrong("a list", value)
        return tuple(map(inner, value))

    return check


def _record(cls: type, *, grows: bool) -> _Check:
    """grows: fields with a default may be missing at the end, and unknown ones may follow."""
    names, hints = _names(cls), typing.get_type_hints(cls)
    checks = [_check_for(hints[name], grows=grows) for name in names]
    least = len(names) - _defaults(cls) if grows else len(names)

    def check(value: Any) -> Any:
        if type(value) is not list or (
            len(value) != len(checks) and not (grows and len(value) >= least)
        ):
            found = len(value) if type(value) is list else type(value).__name__
            raise PeerFault(f"{cls.__name__}: expected {least} fields, got {found}")
        try:
            fields = [field_check(item) for field_check, item in zip(checks, value, strict=False)]
        except PeerFault as fault:
            raise PeerFault(
                f"{cls.__name__}.{_first_wrong(names, checks, value)}: {fault}"
            ) from None
        return cls(*fields)

    return check


def _first_wrong(names: Sequence[str], checks: Sequence[_Check], values: Sequence[Any]) -> str:
    """The name of the first field whose check fails; looked up only once one has failed."""
    for name, field_check, item in zip(names, checks, values, strict=False):
        try:
            field_check(item)
        except PeerFault:
            return name
    raise AssertionError("no field is wrong")


def _check_for(hint: Any, *, grows: bool) -> _Check:
    if hint is Digest:
        return _digest
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(_check_for(arguments[0], grows=grows))
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        inner = arguments[0] if arguments[1] is type(None) else arguments[1]
        return _optional(_check_for(inner, grows=grows))
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, tuple)):
        return _record(hint, grows=grows)
    raise AssertionError(f"{hint!r} cannot be a message field")


# By class: a function from a record to its fields. Filled when a class is first encoded.
_FIELDS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def _fields(record: Any) -> tuple[Any, ...]:
    """The fields of a dataclass, for msgpack, which calls this for every type that it does not
    know.
    """
    getter = _FIELDS.get(type(record))
    if getter is None:
        if not dataclasses.is_dataclass(record):
            raise TypeError(f"{type(record).__name__} cannot be a message field")
        getter = _FIELDS[type(record)] = _getter(_names(type(record)))
    return getter(record)


def _names(cls: Any) -> tuple[str, ...]:
    """The field names of a dataclass or NamedTuple."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    names: tuple[str, ...] = cls._fields
    return names


def _defaults(cls: Any) -> int:
    """How many fields of a dataclass or NamedTuple have a default; they are the last ones."""
    if dataclasses.is_dataclass(cls):
        return sum(
            (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
            for field in dataclasses.fields(cls)
        )
    return len(cls._field_defaults)


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function from a record to the tuple of its fields. `attrgetter` returns a tuple only for two
    or more fields.
    """
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda record: tuple(getattr(record, name) for name in names)


def _unpack(
    data: bytes | memoryview, *, bytes_max: int, items_max: int, values_max: int | None = None
) -> Any:
    """values_max: how many values there may be in all; None: as many as fit into the bytes."""
    _require_short(data, bytes_max)
    # A value takes at least one byte, so a short message needs no counting.
    count = None if values_max is None or len(data) <= values_max else values_counter(values_max)
    try:
        return msgpack.unpackb(
            data,
            use_list=True,
            raw=False,
            max_array_len=items_max,
            max_map_len=0,
            max_ext_len=0,
            object_pairs_hook=_no_map,
            list_hook=count,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise PeerFault("malformed message") from error


def _require_short(data: bytes | memoryview, bytes_max: int) -> None:
    if len(data) > bytes_max:
        raise PeerFault(f"message of {len(data)} bytes; at most {bytes_max} are allowed")


def _no_map(_: object) -> None:
    raise ValueError("a map")


def values_counter(values_max: int) -> Callable[[list[Any]], list[Any]]:
    """Make a hook that is called with each list, once it is whole, and counts its items."""
    left = values_max

    def count(items: list[Any]) -> list[Any]:
        nonlocal left
        left -= len(items)
        if left < 0:
            raise ValueError("too many values")
        return items

    return count


def _tag_of(data: bytes | memoryview) -> str:
    """Read the tag of a message without unpacking it. PeerFault: it has none."""
    head = bytes(data[: TAG_CHARS_MAX + 4])
    # The head of a list takes one byte up to 15 items, else three. The head of a string of up to 31 bytes takes one.
    at = 1 if head[:1] and 0x91 <= head[0] <= 0x9F else 3
    if at == 3 and head[:1] != b"\xdc":
        raise PeerFault("malformed message: expected a tag first")
    length = head[at] - 0xA0 if len(head) > at else -1
    if not 0 <= length <= TAG_CHARS_MAX or len(head) < at + 1 + length:
        raise PeerFault("malformed message: expected a tag first")
    return head[at + 1 : at + 1 + length].decode(errors="replace")


class Codec:
    """The messages of one direction of one protocol, by tag. Tags are words, so that a capture can
    be read.

    large: the tags whose messages may have up to `bytes_max` bytes; others may have SMALL_BYTES_MAX.
    """

    def __init__(
        self,
        messages: Mapping[str, type],
        *,
        bytes_max: int = MESSAGE_BYTES_MAX,
        large: Collection[str] | None = None,
    ) -> None:
        self.messages = messages
        self._tags = {cls: tag for tag, cls in messages.items()}
        large = messages if large is None else large
        self._bytes_max = bytes_max
        self._kinds = {
            tag: (
                _record(cls, grows=True),
                bytes_max if tag in large else min(SMALL_BYTES_MAX, bytes_max),
            )
            for tag, cls in messages.items()
        }
        assert len(self._tags) == len(messages), "a message has one tag"
        assert all(len(tag) <= TAG_CHARS_MAX for tag in messages)
        assert set(large) <= set(messages)

    def encode(self, message: object) -> bytes:
        tag = self._tags.get(type(message))
        assert tag is not None, f"{type(message).__name__} is not a message of this codec"
        packed: bytes = msgpack.packb([tag, *_fields(message)], default=_fields)
        return packed

    def decode(self, data: bytes | memoryview) -> Any:
        """Decode a message. PeerFault says what is wrong with it."""
        _require_short(data, self._bytes_max)
        tag = _tag_of(data)
        kind = self._kinds.get(tag)
        if kind is None:
            raise PeerFault(f"unknown message {tag!r}")
        check, bytes_max = kind
        value = _unpack(data, bytes_max=bytes_max, items_max=ITEMS_MAX, values_max=VALUES_MAX)
        return check(value[1:])


def pack(record: object) -> bytes:
    """Encode one record without a tag, canonically: for storing and hashing."""
    packed: bytes = msgpack.packb(record, default=_fields)
    return packed


def plain_reader(cls: type) -> Callable[[Sequence[Any]], Any]:
    """Make a function from plain fields, with lists for tuples and nested records, to a record. It
    raises a PeerFault if they are wrong.
    """
    check = _record(cls, grows=False)
    return lambda values: check(list(values))


def unpacker(
    cls: type, *, bytes_max: int, grows: bool = False
) -> Callable[[bytes | memoryview], Any]:
    """Make the inverse of `pack` for records of `cls`; it raises a PeerFault on anything else.

    grows: the record may grow as a message may, see the module docstring.
    """
    check = _record(cls, grows=grows)
    return lambda data: check(_unpack(data, bytes_max=bytes_max, items_max=bytes_max))
