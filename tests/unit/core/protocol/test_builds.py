"""Builds name each other before anything else, whatever else they send."""

from dataclasses import replace

import msgpack
import pytest

from echo2d.core.protocol.builds import (
    BUILD_CHARS_MAX,
    HEAD_BYTES_MAX,
    OURS,
    Build,
    HelloHead,
    called,
    from_header,
    hello_head,
    not_understood,
    to_header,
    to_install,
)
from echo2d.core.protocol.control_messages import TO_COORDINATOR, TO_PEER, Heartbeat, Refused
from tests.support.hello import HELLO


def test_this_build_understands_itself() -> None:
    assert OURS.speaks_with(OURS)
    assert OURS.oldest <= OURS.protocol


@pytest.mark.parametrize(
    ("a", "b", "understood"),
    [
        (Build(9, 9), Build(10, 9), True),
        (Build(9, 9), Build(10, 10), False),
        (Build(9, 7), Build(8, 8), True),
        (Build(9, 9), Build(8, 8), False),
        (Build(9, 9), Build(30, 9), True),
    ],
)
def test_two_builds_understand_each_other_if_each_knows_a_number_of_the_other(
    a: Build, b: Build, *, understood: bool
) -> None:
    assert a.speaks_with(b) == b.speaks_with(a) == understood


def test_the_head_of_our_hello_is_read() -> None:
    hello = replace(HELLO, build=Build(9, 8, "0.1.0+gabc"), name="gpu-7")
    assert hello_head(TO_COORDINATOR.encode(hello)) == HelloHead(hello.build, "worker", "gpu-7")


@pytest.mark.parametrize(
    "hello",
    [
        ["Hello", [12, 11, "0.9.1"], None, "worker", "gpu-7"],
        ["Hello", [12, 11, "0.9.1", "more"], "run", "worker", "gpu-7", {"a": 1}, b"x" * 9000],
        ["Hello", [12, 11, "0.9.1"], "run", "worker", "gpu-7", *range(40)],
    ],
)
def test_the_head_of_a_hello_of_any_later_build_is_read(hello: list[object]) -> None:
    assert hello_head(msgpack.packb(hello)) == HelloHead(Build(12, 11, "0.9.1"), "worker", "gpu-7")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        TO_COORDINATOR.encode(Heartbeat(1)),
        msgpack.packb(["Hello"]),
        msgpack.packb(["Hello", [9, 9, "x"], None, "worker"]),
        msgpack.packb(["Hello", [9, "9", "x"], None, "worker", "gpu-7"]),
        msgpack.packb(["Hello", [-1, 0, "x"], None, "worker", "gpu-7"]),
        msgpack.packb(["Hello", [True, True, "x"], None, "worker", "gpu-7"]),
        msgpack.packb(["Hello", [1 << 63, 0, "x"], None, "worker", "gpu-7"]),
        msgpack.packb(["Hello", [9, 9, "x" * HEAD_BYTES_MAX], None, "worker", "gpu-7"]),
        msgpack.packb(["Hello", [9, 9, "x"], None, "worker", 7]),
        msgpack.packb(["Hello", [9, 9, "x"], {"a": 1}, "worker", "gpu-7"]),
        msgpack.packb("Hello"),
    ],
)
def test_other_bytes_begin_no_hello(data: bytes) -> None:
    assert hello_head(data) is None


def test_the_fixed_part_of_the_protocol_has_not_changed() -> None:
    """These bytes are how builds of all releases name and refuse each other: never change them."""
    hello = replace(HELLO, build=Build(9, 9, "0.1.0"), name="gpu-7")
    head = msgpack.packb(["Hello", [9, 9, "0.1.0"], "r", "worker", "gpu-7"])
    assert TO_COORDINATOR.encode(hello)[3:].startswith(head[1:])
    refused = Refused("build", "install 0.2.0", permanent=False, retry_s=120.0)
    assert TO_PEER.encode(refused) == msgpack.packb(
        ["Refused", "build", "install 0.2.0", False, 120.0]
    )


@pytest.mark.parametrize("value", ["", "1", "1 1", "x 1 a", "1 -1 a", "1234567890 1 a", "1  1 a"])
def test_a_header_that_names_no_build_is_ignored(value: str) -> None:
    assert from_header(value) is None


def test_a_build_in_a_header_round_trips() -> None:
    build = Build(3, 2, "0.1.0+gabc")
    assert from_header(to_header(build)) == build


def test_the_refusal_names_both_builds_and_what_to_do() -> None:
    text = not_understood("worker", Build(9, 9, "0.1.0"), Build(12, 11, "0.9.1"))
    assert text == (
        "this worker is echo2d 0.1.0 (control protocol 9); the coordinator is echo2d 0.9.1 "
        "(control protocol 12): install echo2d 0.9.1"
    )


def test_a_build_of_a_checkout_is_installed_by_its_commit() -> None:
    ours = Build(9, 9, "0.1.0+g45e11598")
    assert not_understood("worker", Build(12, 11, "0.9.1"), ours).endswith(
        ": install the coordinator's own build: a script of `echo2d join --print-script` fetches it, "
        "or check out commit 45e11598"
    )
    assert not_understood("learner", Build(3, 3, "0.9.1"), ours, "learner API").endswith(
        ": install the coordinator's own build: check out commit 45e11598"
    )
    assert to_install(Build(9, 9), on_a_box=False) == "the coordinator's own build"


def test_a_hostile_name_stays_short_and_harmless() -> None:
    assert called(Build(1, 1, "evil \x1b[31m\n" * 20)).isprintable()
    assert len(Build(1, 1, "x" * 4096).shown) == BUILD_CHARS_MAX
