"""Builds and their protocol numbers: which programs understand each other, and what a person is
told if they do not.

Each end of a link first names its build, and our learner names its build with every call. A build
is the newest protocol number that a program speaks, the oldest number that it still understands,
and a name for people. Two builds understand each other if each speaks a number that the other still
understands.

Until 0.1.0 is released, every change raises both numbers: only equal builds understand each other.
After a release these changes need no new `oldest`, so that builds of two releases still understand
each other:

- A message, or a record in a message, gets new fields at its end. The default of each new field
  means what an older build meant. Older builds ignore new fields (`core/base/codec.py`).
- A new kind of message, or a new word of a `Literal`, is sent only to a build that speaks the number
  with which it was introduced.

Each of these changes raises the protocol number. Any other change raises `oldest`, too: then older
builds are refused, and the refusal names both builds. The first fields of a Hello (`hello_head`),
the fields of a Refused, and the way a peer enrols never change, so that any two builds can name
each other. docs/guide/upgrade.md says what this means for an operator.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgpack

from echo2d.core.base.codec import INT_MAX

# The control link.
PROTOCOL_VERSION = 19
PROTOCOL_OLDEST = 19
# The peer link. Two peers connect only if the coordinator understands both, so this `oldest` is
# raised together with the control link's `oldest`.
LINK_PROTOCOL_VERSION = 5
LINK_PROTOCOL_OLDEST = 5
# The HTTP API of learners, with the format of batches.
LEARNER_API_VERSION = 7
LEARNER_API_OLDEST = 7
# Our learners name their build in this header of every call. Other trainers need not.
BUILD_HEADER = "X-Echo2d-Build"
# The longest name of a build: a version, and a commit.
BUILD_CHARS_MAX = 48
# The head of a Hello is at most this long: a run's id and two names, all of a bounded length.
HEAD_BYTES_MAX = 1024
_HEAD_FIELDS = 4
_DIGITS = re.compile("[0-9]{1,9}")
_ALLOWED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.+-_")


@dataclass(frozen=True, slots=True)
class Build:
    """What one program speaks. Its three fields never change, see the module docstring."""

    protocol: int
    oldest: int
    name: str = ""

    def speaks_with(self, other: "Build") -> bool:
        return other.protocol >= self.oldest and self.protocol >= other.oldest

    @property
    def shown(self) -> str:
        """The name, cut and cleaned so that a log, a status and a terminal can show it."""
        cut = self.name[:BUILD_CHARS_MAX]
        return "".join(char if char in _ALLOWED else "?" for char in cut)


# What this program speaks; its links add its name.
OURS = Build(PROTOCOL_VERSION, PROTOCOL_OLDEST)
OURS_AS_LEARNER_API = Build(LEARNER_API_VERSION, LEARNER_API_OLDEST)
OURS_ON_PEER_LINKS = Build(LINK_PROTOCOL_VERSION, LINK_PROTOCOL_OLDEST)


@dataclass(frozen=True, slots=True)
class HelloHead:
    """The beginning of a Hello of any build: its build, its kind and the peer's name."""

    build: Build
    kind: str
    name: str


def hello_head(data: bytes) -> HelloHead | None:
    """Read the beginning of a Hello without its other fields. None: the bytes are no Hello.

    A Hello of any release is the msgpack array ["Hello", [protocol, oldest, build], run_id, kind,
    name, ...]. Later releases may append fields to both arrays, but put none between these.
    """
    unpacker = msgpack.Unpacker(
        max_buffer_size=HEAD_BYTES_MAX,
        max_str_len=HEAD_BYTES_MAX,
        max_array_len=8,
        max_map_len=0,
        max_bin_len=0,
        max_ext_len=0,
    )
    unpacker.feed(data[:HEAD_BYTES_MAX])
    try:
        if unpacker.read_array_header() <= _HEAD_FIELDS or unpacker.unpack() != "Hello":
            return None
        build, _, kind, name = (unpacker.unpack() for _ in range(_HEAD_FIELDS))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return None
    match build:
        case [int(protocol), int(oldest), str(words), *_]:
            found = Build(protocol, oldest, words)
        case _:
            return None
    right = _is_number(found.protocol) and _is_number(found.oldest)
    right = right and type(kind) is str and type(name) is str
    return HelloHead(found, kind, name) if right else None


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= INT_MAX


def to_header(build: Build) -> str:
    """The value of BUILD_HEADER, as in: 1 1 0.1.0."""
    return f"{build.protocol} {build.oldest} {build.shown}"


def from_header(value: str) -> Build | None:
    """The inverse of `to_header`. None: the value is not valid."""
    match value[:HEAD_BYTES_MAX].split(" ", 2):
        case [protocol, oldest, name] if _DIGITS.fullmatch(protocol) and _DIGITS.fullmatch(oldest):
            return Build(int(protocol), int(oldest), name)
    return None


def called(build: Build, protocol: str = "control protocol") -> str:
    """The name in a sentence, such as: echo2d 0.1.0 (control protocol 9)."""
    return f"echo2d {build.shown or 'of an unknown build'} ({protocol} {build.protocol})"


def not_understood(who: str, theirs: Build, ours: Build, protocol: str = "control protocol") -> str:
    """Why the coordinator refuses a program of another build, and what to install."""
    return (
        f"this {who} is {called(theirs, protocol)}; the coordinator is {called(ours, protocol)}: "
        f"install {to_install(ours, on_a_box=who != 'learner')}"
    )


def to_install(build: Build, *, on_a_box: bool) -> str:
    """What a person must install to get this build: a release has a name, a checkout only its commit."""
    release, plus, commit = build.shown.partition("+g")
    if release and not plus:
        return f"echo2d {release}"
    ways = ["a script of `echo2d join --print-script` fetches it"] if on_a_box else []
    ways += [f"check out commit {commit}"] if commit else []
    return f"the coordinator's own build{': ' if ways else ''}{', or '.join(ways)}"
