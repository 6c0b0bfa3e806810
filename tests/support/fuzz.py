"""Random hostile input: damaged bytes, messages of any content, and a measure of how much of them a machine keeps."""

import random
import types
import typing
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

INTERESTING_INTS = (
    0,
    1,
    2,
    3,
    7,
    255,
    4096,
    65535,
    65536,
    (1 << 31) - 1,
    1 << 32,
    (1 << 53) - 1,
    (1 << 63) - 1,
)
INTERESTING_FLOATS = (
    0.0,
    -0.0,
    0.5,
    1.0,
    -1.0,
    1e-300,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
)
INTERESTING_TEXTS = (
    "",
    "a",
    "..",
    "\x00",
    "\n\x1b[2J",
    "[bold]",
    "x" * 4096,
    "\u202e\U0001f600",
    "0" * 32,
    "f" * 32,
)


@dataclass(slots=True)
class Fuzz:
    """messages: their number in all fuzz tests together."""

    messages: int
    rng: random.Random

    def share(self, part: float) -> range:
        """A range over this test's part of the messages."""
        return range(max(1, int(self.messages * part)))


# --- bytes


def damaged(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """The bytes with one to four things wrong: bits, bytes, lengths, order, or a piece of something else."""
    wrong = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        rng.choice(_DAMAGES)(rng, wrong)
    if others and rng.random() < 0.2:
        piece = rng.choice(others)
        at = rng.randint(0, len(wrong))
        wrong[at:at] = piece[rng.randint(0, len(piece)) :][:64]
    return bytes(wrong)


def _flip(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice(
            (0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xDD, 0xFF, rng.randrange(256))
        )


def _number(rng: random.Random, data: bytearray) -> None:
    """Overwrite four bytes, which may be a length or a count, in either byte order."""
    if len(data) >= 4:
        at = rng.randrange(len(data) - 3)
        value = rng.choice(INTERESTING_INTS) & 0xFFFFFFFF
        data[at : at + 4] = value.to_bytes(4, rng.choice(("little", "big")))


def _cut(rng: random.Random, data: bytearray) -> None:
    start = rng.randint(0, len(data))
    del data[start : start + rng.choice((1, 4, 16, len(data)))]


def _repeat(rng: random.Random, data: bytearray) -> None:
    start = rng.randint(0, len(data))
    data[start:start] = data[start : start + rng.choice((1, 4, 16, 64))]


def _insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randint(0, len(data))
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))


_DAMAGES: tuple[Callable[[random.Random, bytearray], None], ...] = (
    _flip,
    _flip,
    _set,
    _number,
    _cut,
    _repeat,
    _insert,
)


# --- messages


@dataclass(slots=True)
class Invent:
    """Messages of any content that their codec allows. pools: by field name, values that are valid now."""

    rng: random.Random
    pools: Mapping[str, Collection[Any]] = field(default_factory=dict)

    def message(self, cls: type) -> Any:
        return cls(
            **{name: self._field(name, hint) for name, hint in typing.get_type_hints(cls).items()}
        )

    def _field(self, name: str, hint: Any) -> Any:
        pool = self.pools.get(name)
        if pool and self.rng.random() < 0.8:
            return self.rng.choice(list(pool))
        return self._value(name, hint)

    def _value(self, name: str, hint: Any) -> Any:
        rng = self.rng
        while hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is Literal:
            return rng.choice(arguments)
        if origin is tuple:
            return tuple(
                self._field(name, arguments[0]) for _ in range(rng.choice((0, 1, 1, 2, 3, 40)))
            )
        if origin in (Union, types.UnionType):
            some = next(each for each in arguments if each is not type(None))
            return None if rng.random() < 0.3 else self._field(name, some)
        return _SCALARS[hint](rng) if hint in _SCALARS else self.message(hint)


_SCALARS: dict[Any, Callable[[random.Random], Any]] = {
    int: lambda rng: rng.choice((rng.choice(INTERESTING_INTS), rng.randrange(8))),
    float: lambda rng: rng.choice((rng.choice(INTERESTING_FLOATS), rng.random())),
    bool: lambda rng: rng.random() < 0.5,
    str: lambda rng: rng.choice(INTERESTING_TEXTS),
    bytes: lambda rng: rng.randbytes(rng.choice((0, 3, 4, 12, 31, 32, 32, 33, 4096))),
}


# --- memory


def contents(machine: object) -> Iterator[tuple[str, int]]:
    """The path and the number of items (or bytes) of every container that can be reached from a machine."""
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(machine).__name__, machine)]
    while todo:
        path, value = todo.pop()
        if id(value) in seen or isinstance(
            value, type | types.FunctionType | types.MethodType | random.Random
        ):
            continue
        seen.add(id(value))
        if isinstance(
            value,
            str | bytes | bytearray | memoryview | dict | set | frozenset | list | tuple | deque,
        ):
            yield path, len(value)
        if isinstance(value, dict):
            todo += [(f"{path}[]", each) for pair in value.items() for each in pair]
        elif isinstance(value, set | frozenset | list | tuple | deque):
            todo += [(f"{path}[]", each) for each in value]
        else:
            names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
            todo += [
                (f"{path}.{name}", getattr(value, name)) for name in names if hasattr(value, name)
            ]
            todo += [
                (f"{path}.{name}", each) for name, each in getattr(value, "__dict__", {}).items()
            ]


def assert_bounded(machine: object, *, items_max: int, total_max: int) -> None:
    """Each container of the machine has at most items_max items (or bytes), and all together at most total_max."""
    total = 0
    for path, size in contents(machine):
        assert size <= items_max, f"{path} has {size} items"
        total += size
    assert total <= total_max, f"{total} items and bytes in all"
