"""The JSON of `GET /v1/status`: made from a `Status`, and read back into one.

A dataclass becomes an object with a key for each field, a mapping's keys become text, and a tuple
becomes a list. The fields of `Status.process` become keys beside those of `Status`, and `renting` is
left out if nothing is rented.

Readers and writers are built once from the annotations of `schema`.
"""

import dataclasses
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from echo2d.core.status.schema import AlertKind, OwnStatus, ProcessStatus, Status
from echo2d.errors import PeerFault

ADVICE = "run the same echo2d as the coordinator"

_Read = Callable[[Any, str], Any]  # a JSON value and its path, to the typed value


def status_json(status: Status) -> dict[str, Any]:
    """The object that `GET /v1/status` answers."""
    found: dict[str, Any] = plain(dataclasses.replace(status, process=None))
    del found["process"]
    if status.process is not None:
        found |= plain(status.process)
        if status.process.renting is None:
            del found["renting"]
    return found


def read_status(facts: Mapping[str, Any]) -> Status:
    """The inverse of `status_json`. Unknown keys are skipped, and a key whose field has a default may
    be missing, because a coordinator of an older build does not send it. PeerFault: another key is
    missing, or a value has the wrong type.
    """
    process = facts if "run_id" in facts else None
    found: Status = _STATUS({**facts, "process": process}, "")
    return found


def read_own_status(facts: Mapping[str, Any]) -> OwnStatus:
    """Read what `GET /v1/status/own` answers. PeerFault: a key is missing, or has the wrong type."""
    found: OwnStatus = _OWN_STATUS(facts, "")
    return found


# --- to JSON


_FIELDS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}  # of the dataclasses met so far
_NAMES: dict[type, tuple[str, ...]] = {}
_SCALARS = {int, float, str, bool, type(None)}


def plain(value: Any) -> Any:
    """The JSON form of a value of the schema."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is tuple:
        return [item if type(item) in _SCALARS else plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if kind not in _NAMES:
        _NAMES[kind] = names = tuple(field.name for field in dataclasses.fields(kind))
        _FIELDS[kind] = operator.attrgetter(*names)
    return {
        name: item if type(item) in _SCALARS else plain(item)
        for name, item in zip(_NAMES[kind], _FIELDS[kind](value), strict=True)
    }


# --- from JSON


def _wrong(path: str, expected: str, value: object) -> PeerFault:
    found = f"{type(value).__name__} {str(value)[:40]!r}"
    return PeerFault(f"status: {path or 'all of it'}: expected {expected}, found {found}; {ADVICE}")


def _scalar(kind: type, expected: str) -> _Read:
    def read(value: Any, path: str) -> Any:
        if type(value) is not kind:
            raise _wrong(path, expected, value)
        return value

    return read


def _number(value: Any, path: str) -> float:
    if type(value) not in (float, int):
        raise _wrong(path, "a number", value)
    return float(value)


_READERS: dict[Any, _Read] = {
    int: _scalar(int, "an integer"),
    float: _number,
    bool: _scalar(bool, "true or false"),
    str: _scalar(str, "text"),
    # A newer coordinator may have kinds that are unknown here.
    AlertKind: _scalar(str, "text"),
}


def _optional(inner: _Read) -> _Read:
    return lambda value, path: None if value is None else inner(value, path)


def _choice(choices: tuple[Any, ...]) -> _Read:
    def read(value: Any, path: str) -> Any:
        if value not in choices:
            raise _wrong(path, f"one of {', '.join(map(str, choices))}", value)
        return value

    return read


def _list(inner: _Read) -> _Read:
    def read(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _wrong(path, "a list", value)
        return tuple(inner(item, f"{path}[{at}]") for at, item in enumerate(value))

    return read


def _tuple(parts: tuple[_Read, ...]) -> _Read:
    def read(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(parts):
            raise _wrong(path, f"a list of {len(parts)}", value)
        pairs = zip(parts, value, strict=True)
        return tuple(part(item, f"{path}[{at}]") for at, (part, item) in enumerate(pairs))

    return read


def _mapping(key_of: Callable[[str], Any], inner: _Read) -> _Read:
    def read(value: Any, path: str) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(path, "an object", value)
        try:
            return {key_of(key): inner(item, f"{path}.{key}") for key, item in value.items()}
        except ValueError as error:
            raise _wrong(path, "whole numbers as keys", list(value)) from error

    return read


def _record(cls: type) -> _Read:
    hints = typing.get_type_hints(cls)
    readers = {name: _reader_for(hint) for name, hint in hints.items()}
    inside = "" if cls in (Status, OwnStatus) else "."
    needed = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING is field.default_factory
    }

    def read(value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            raise _wrong(path, "an object", value)
        found = {}
        for name, reader in readers.items():
            # In the JSON, the keys of the process are beside those of the status itself.
            place = name if cls is ProcessStatus else f"{path}{inside}{name}"
            if name in value:
                found[name] = reader(value[name], place)
            elif name in needed:
                raise PeerFault(f"status: the key {place} is missing; {ADVICE}")
        return cls(**found)

    return read


def _reader_for(hint: Any) -> _Read:
    if hint in _READERS:
        return _READERS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _choice(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return _list(_reader_for(arguments[0]))
        return _tuple(tuple(map(_reader_for, arguments)))
    if origin is Mapping:
        return _mapping(arguments[0], _reader_for(arguments[1]))
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not type(None))
        return _optional(_reader_for(inner))
    assert isinstance(hint, type), f"{hint!r} cannot be a field of the status"
    return _record(hint)


_STATUS = _record(Status)
_OWN_STATUS = _record(OwnStatus)
