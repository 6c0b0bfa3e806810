"""Peers of other builds return one by one, and are named while they do. A peer that breaks the protocol again and again
is refused for a while, by its key.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.builds import BUILD_CHARS_MAX, Build, HelloHead
from echo2d.net.control import refusals
from echo2d.net.control.refusals import (
    HERE_S,
    PROTOCOL_FAULTS_MAX,
    REFUSED_S,
    RETRY_S_MAX,
    RETRY_S_MIN,
    SPACING_S,
    WINDOW_S,
    ComeAgain,
    OtherBuilds,
    ProtocolFaults,
)

HEAD = HelloHead(Build(12, 11, "0.9.1"), "worker", "gpu-7")


def test_refused_peers_return_one_after_the_other() -> None:
    builds = OtherBuilds(ComeAgain())
    waits = [builds.refuse(PeerId(f"p{number}"), "box", HEAD, 0.0)[0] for number in range(500)]
    assert waits == [RETRY_S_MIN + number * SPACING_S for number in range(500)]
    builds.check()


def test_a_peer_that_returns_too_early_gets_the_same_time_again() -> None:
    builds = OtherBuilds(ComeAgain())
    assert builds.refuse(PeerId("p"), "box", HEAD, 0.0) == (RETRY_S_MIN, True)
    assert builds.refuse(PeerId("p"), "box", HEAD, 20.0) == (RETRY_S_MIN - 20.0, False)
    assert builds.refuse(PeerId("p"), "box", HEAD, RETRY_S_MIN) == (RETRY_S_MIN, False)


def test_no_peer_waits_for_longer_than_the_limit() -> None:
    come_again = ComeAgain()
    waits = [come_again.after_s(PeerId(f"p{n}"), "box", 0.0, at_least_s=1.0) for n in range(2000)]
    assert max(waits) == RETRY_S_MAX


def test_a_token_with_hundreds_of_peers_makes_others_wait_no_longer() -> None:
    come_again = ComeAgain()
    for n in range(900):
        come_again.after_s(PeerId(f"p{n}"), "loud", 0.0, at_least_s=RETRY_S_MIN)
    waits = [
        come_again.after_s(PeerId(f"{name}{n}"), name, 0.0, at_least_s=RETRY_S_MIN)
        for n in range(3)
        for name in ("box-1", "box-2")
    ]
    assert max(waits) <= RETRY_S_MIN + 3 * 3 * SPACING_S, "three tokens, three peers of each"
    loud = come_again.after_s(PeerId("another"), "loud", 0.0, at_least_s=RETRY_S_MIN)
    assert loud == RETRY_S_MAX


def test_boxes_with_their_own_tokens_return_one_by_one_too() -> None:
    come_again = ComeAgain()

    def come(now: float) -> list[float]:
        return [
            come_again.after_s(PeerId(f"p{n}"), f"t{n}", now, at_least_s=RETRY_S_MIN)
            for n in range(100)
        ]

    assert come(0.0) == [RETRY_S_MIN + n * SPACING_S for n in range(100)]
    assert min(later - sooner for sooner, later in pairwise(come(1000.0))) == SPACING_S


def test_a_peer_that_invents_builds_is_logged_only_once() -> None:
    builds = OtherBuilds(ComeAgain())
    assert builds.refuse(PeerId("p"), "box", HEAD, 0.0)[1]
    assert not builds.refuse(PeerId("p"), "box", replace(HEAD, build=Build(13, 11, "0.9.2")), 1.0)[
        1
    ]
    [seen] = builds.here(1.0)
    assert seen.build.name == "0.9.2"


def test_the_text_that_a_peer_sends_about_itself_is_cut_and_made_harmless() -> None:
    builds = OtherBuilds(ComeAgain())
    builds.refuse(
        PeerId("p"), "box", HelloHead(Build(1, 1, "\x1b[31m" * 99), "worker", "a\nb" * 99), 0.0
    )
    [seen] = builds.here(0.0)
    assert seen.build.name == "??31m" * (BUILD_CHARS_MAX // 5) + "??3"
    assert seen.name.isprintable()
    assert len(seen.name) == 64


def test_refused_peers_are_forgotten_once_they_upgrade_or_stay_away() -> None:
    builds = OtherBuilds(ComeAgain())
    for name in ("upgraded", "away", "here"):
        builds.refuse(PeerId(name), "box", HEAD, 0.0)
    builds.understood(PeerId("upgraded"))
    builds.refuse(PeerId("here"), "box", HEAD, RETRY_S_MIN + HERE_S)
    assert [each.peer for each in builds.here(RETRY_S_MIN + HERE_S + 10.0)] == ["here"]


def test_no_more_refused_peers_are_remembered_than_a_run_enrols(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "_PEERS_MAX", 5)
    builds = OtherBuilds(ComeAgain())
    for number in range(20):
        builds.refuse(PeerId(f"p{number}"), "box", HEAD, float(number))
        builds.check()
    assert len(builds.here(20.0)) == 5


# --- protocol faults

A, B = PeerId("a"), PeerId("b")


def test_a_peer_with_three_faults_in_ten_minutes_is_refused_for_ten_minutes() -> None:
    faults = ProtocolFaults()
    for number in range(PROTOCOL_FAULTS_MAX):
        assert faults.refused_s(A, 10.0 * number) == 0.0
        faults.count(A, 10.0 * number)
    now = 10.0 * (PROTOCOL_FAULTS_MAX - 1)
    assert faults.refused_s(A, now) == REFUSED_S
    assert faults.refused_s(B, now) == 0.0
    assert [each.peer for each in faults.refused(now)] == [A]
    assert faults.refused_s(A, now + REFUSED_S) == 0.0
    assert faults.refused(now + REFUSED_S) == ()
    assert faults.total == PROTOCOL_FAULTS_MAX
    faults.check()


def test_a_fault_now_and_then_is_forgiven() -> None:
    faults = ProtocolFaults()
    for number in range(20):
        faults.count(A, number * (WINDOW_S / (PROTOCOL_FAULTS_MAX - 1) + 1.0))
    assert faults.refused(1e9) == ()


def test_a_refused_peer_starts_without_faults_after_its_time() -> None:
    faults = ProtocolFaults()
    for _ in range(PROTOCOL_FAULTS_MAX):
        faults.count(A, 0.0)
    faults.count(A, REFUSED_S)
    assert faults.refused_s(A, REFUSED_S) == 0.0


def test_faults_are_remembered_for_no_more_peers_than_a_run_enrols(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "_PEERS_MAX", 5)
    faults = ProtocolFaults()
    for number in range(100):
        for _ in range(1 + number % PROTOCOL_FAULTS_MAX):
            faults.count(PeerId(f"peer-{number}"), float(number))
        faults.check()
