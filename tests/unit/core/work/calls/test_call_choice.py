"""One choice: text that its caller has received never changes, whichever worker continues."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import (
    Digest,
    PeerId,
    Version,
)
from echo2d.core.protocol.control_messages import SampleDelta, VersionSpan
from echo2d.core.protocol.trajectory import Partial
from echo2d.core.work.calls.call_choice import CALL_AVOID_S, CallChoice
from tests.support.gateway import call, gateway_world, key_of, of_calls

WORKER = PeerId("b" * 32)


def tokens(*ids: int) -> bytes:
    return b"".join(one.to_bytes(4, "little") for one in ids)


def delta(start: int, *ids: int, version: int = 0) -> SampleDelta:
    span = VersionSpan(start, start + len(ids), Version(version), Digest(bytes(32)))
    return SampleDelta(0, tokens(*ids), bytes(4 * len(ids)), (span,))


@pytest.fixture
def leased() -> CallChoice:
    """A choice with the lease that a coordinator makes for it, which nothing has come of."""
    world, (worker,) = gateway_world(4)
    world.handle(call(1))
    (granted,) = of_calls(worker)
    (choice,) = world.state._gateway._work.wanted(key_of(granted)).values()
    return replace(choice)


def grown(choice: CallChoice, said: SampleDelta) -> Partial | str:
    return choice.grown(said, PeerId("w"), vocab_size=16, believed=lambda _: True)


def test_tokens_are_appended_to_earlier_ones(leased: CallChoice) -> None:
    first = grown(leased, delta(0, 3, 4))
    assert isinstance(first, Partial)
    leased.told = first
    second = grown(leased, delta(2, 5))
    assert isinstance(second, Partial)
    assert (second.tokens, leased.room) == (tokens(3, 4, 5), leased.call.max_new_tokens - 2)


def test_a_worker_that_begins_again_must_write_the_same(leased: CallChoice) -> None:
    leased.told = told = grown(leased, delta(0, 3, 4))  # type: ignore[assignment]
    assert grown(leased, delta(0, 3, 4)) == told
    assert grown(leased, delta(0, 3)) != told
    assert grown(leased, delta(0, 3, 5, 6)) == "it reports other tokens than before"


def test_no_worker_continues_a_choice_with_an_older_version(leased: CallChoice) -> None:
    leased.told = grown(leased, delta(0, 3, version=2))  # type: ignore[assignment]
    assert leased.oldest == 2
    assert isinstance(grown(leased, delta(1, 4, version=1)), str)
    assert isinstance(grown(leased, delta(1, 4, version=2)), Partial)


def test_a_version_that_is_too_new_for_its_caller_may_not_write_a_choice(
    leased: CallChoice,
) -> None:
    whole = grown(leased, delta(0, 7, 8, version=1))
    assert isinstance(whole, Partial)
    assert [leased.may_be_written_by(Version(each)) for each in (0, 9)] == [True, True]
    assert not leased.too_new(whole)
    leased.call = replace(leased.call, max_version=Version(0))
    assert leased.too_new(whole)
    assert [leased.may_be_written_by(Version(each)) for each in (0, 1)] == [True, False]
    leased.told = whole
    assert not leased.may_be_written_by(Version(0))


def test_a_choice_avoids_for_a_moment_a_worker_that_failed_it() -> None:
    choice = CallChoice(call(1), 0, since=10.0, avoid=WORKER)
    assert choice.avoids(WORKER, 10.0 + CALL_AVOID_S / 2)
    assert not choice.avoids(WORKER, 10.0 + CALL_AVOID_S)
    assert not choice.avoids(PeerId("c" * 32), 10.0)
