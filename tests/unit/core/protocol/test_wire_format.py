"""Every tag and field of every message is pinned in `wire_format.txt`: what an older peer says keeps its meaning.

A failure here means that the wire has changed. Raise PROTOCOL_VERSION (control link) or LINK_PROTOCOL_VERSION (peer
link) in the same commit, then write the new format down:
`python -m tests.unit.core.protocol.test_wire_format`. What may
change so that the last release is still understood is written in `echo2d/core/protocol/builds.py`; the last test here
and `tests/nightly/runs/test_other_builds.py` hold it.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union

import pytest

from echo2d.core.base.ids import Digest
from echo2d.core.protocol import builds, control_messages, peer_messages
from echo2d.net.security.auth import ANSWER, CHALLENGE

PINNED = Path(__file__).with_name("wire_format.txt")
# The oldest release that is still understood, and the protocol numbers that it speaks.
RELEASED, RELEASED_CONTROL, RELEASED_LINK = PINNED.with_name("wire_format_0.1.0.txt"), 9, 4
SCALARS = {int: "int", float: "float", bool: "bool", str: "text", bytes: "bytes"}
LINKS: dict[str, Mapping[Any, type]] = {
    "challenge": CHALLENGE.messages,
    "answer": ANSWER.messages,
    "to the coordinator": control_messages.TO_COORDINATOR.messages,
    "to a peer": control_messages.TO_PEER.messages,
    "peer link": {number: cls for cls, number in peer_messages.TYPE_OF.items()},
}


def described(hint: Any) -> str:
    """A field's type as the wire sees it: names of classes do not matter, their fields do."""
    if hint is Digest:
        return "digest"
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    if hint in SCALARS:
        return SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(arguments)
    if origin is tuple:
        return f"list of {described(arguments[0])}"
    if origin in (Union, types.UnionType):
        return f"{described(next(each for each in arguments if each is not type(None)))} or nil"
    return f"({', '.join(fields(hint))})"


def fields(cls: type) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    names = (
        [field.name for field in dataclasses.fields(cls)]
        if dataclasses.is_dataclass(cls)
        else list(hints)
    )
    return (f"{name} {described(hints[name])}" for name in names)


def defaults(cls: Any) -> int:
    """How many fields may be missing in what an older build says."""
    return sum(field.default is not dataclasses.MISSING for field in dataclasses.fields(cls))


def wire_format() -> str:
    """The text of `wire_format.txt`, made from the code."""
    lines = [f"control link {builds.PROTOCOL_VERSION}, peer link {builds.LINK_PROTOCOL_VERSION}"]
    for link, table in LINKS.items():
        lines += ["", link, *(f"  {tag}: {', '.join(fields(cls))}" for tag, cls in table.items())]
    return "\n".join(lines) + "\n"


def test_the_wire_is_as_it_was() -> None:
    assert wire_format().splitlines() == PINNED.read_text().splitlines()


def described_messages(text: str) -> dict[tuple[str, str], str]:
    """The fields of each message, by its link and tag."""
    found, link = {}, ""
    for line in text.splitlines()[1:]:
        if line.startswith("  "):
            tag, _, fields_ = line.strip().partition(":")
            found[link, tag] = fields_.strip()
        else:
            link = line
    return found


def split(text: str) -> list[str]:
    """Fields that stand side by side, those of inner records not divided."""
    depth, parts = 0, [""]
    for char in text:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def still_reads(old: str, new: str) -> bool:
    """Whether fields were only added at ends, and words only to choices."""
    olds, news = split(old), split(new)
    return len(olds) <= len(news) and all(map(same_field, olds, news))


def same_field(old: str, new: str) -> bool:
    if "(" in old and "(" in new:
        (head, _, inner), (head_now, _, inner_now) = old.partition("("), new.partition("(")
        (inside, _, tail), (inside_now, _, tail_now) = (
            inner.rpartition(")"),
            inner_now.rpartition(")"),
        )
        return (head, tail) == (head_now, tail_now) and still_reads(inside, inside_now)
    words, words_now = old.split("|"), new.split("|")
    return words == words_now or (len(words) > 1 and words == words_now[: len(words)])


@pytest.mark.parametrize(
    ("new", "reads"),
    [
        ("a int, b (c int, d x|y) or nil", True),
        ("a int, b (c int, d x|y) or nil, e text", True),
        ("a int, b (c int, d x|y, e text) or nil", True),
        ("a int, b (c int, d x|y|z) or nil", True),
        ("a int", False),
        ("b (c int, d x|y) or nil, a int", False),
        ("a float, b (c int, d x|y) or nil", False),
        ("a int, b (d x|y) or nil", False),
        ("a int, b (c int, d y) or nil", False),
        ("a int, b (c int, d x|y)", False),
    ],
)
def test_what_may_change(new: str, *, reads: bool) -> None:
    assert still_reads("a int, b (c int, d x|y) or nil", new) == reads


def test_the_last_release_is_still_understood() -> None:
    """A change that breaks this raises `oldest`, and a new release is frozen instead."""
    released, now = described_messages(RELEASED.read_text()), described_messages(wire_format())
    assert builds.PROTOCOL_OLDEST <= RELEASED_CONTROL
    assert builds.LINK_PROTOCOL_OLDEST <= RELEASED_LINK
    assert [key for key, old in released.items() if not still_reads(old, now[key])] == []
    added = {key: len(split(now[key])) - len(split(old)) for key, old in released.items()}
    records = {(link, str(tag)): cls for link, table in LINKS.items() for tag, cls in table.items()}
    assert [key for key, more in added.items() if more > defaults(records[key])] == []


if __name__ == "__main__":
    PINNED.write_text(wire_format())
