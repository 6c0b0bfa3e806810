"""Every tag and field of every message is listed in `wire_format.txt`, so that no change of one goes unnoticed.

A failure here means that the wire has changed. Raise PROTOCOL_VERSION (control link) or LINK_PROTOCOL_VERSION (peer
link) in the same commit, then write the new format down:
`python -m tests.unit.core.protocol.test_wire_format`.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union

from echo2d.core.base.ids import Digest
from echo2d.core.protocol import builds, control_messages, peer_messages
from echo2d.net.security.auth import ANSWER, CHALLENGE

PINNED = Path(__file__).with_name("wire_format.txt")
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


def wire_format() -> str:
    """The text of `wire_format.txt`, made from the code."""
    lines = [f"control link {builds.PROTOCOL_VERSION}, peer link {builds.LINK_PROTOCOL_VERSION}"]
    for link, table in LINKS.items():
        lines += ["", link, *(f"  {tag}: {', '.join(fields(cls))}" for tag, cls in table.items())]
    return "\n".join(lines) + "\n"


def test_the_wire_format_equals_the_recorded_one() -> None:
    assert wire_format().splitlines() == PINNED.read_text().splitlines()


if __name__ == "__main__":
    PINNED.write_text(wire_format())
