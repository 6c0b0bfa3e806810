"""Peers of other builds come again one by one, and are named while they come."""

from dataclasses import replace
from itertools import pairwise

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.builds import BUILD_CHARS_MAX, Build, HelloHead
from echo2d.net.control import other_builds
from echo2d.net.control.other_builds import (
    HERE_S,
    RETRY_S_MAX,
    RETRY_S_MIN,
    SPACING_S,
    ComeAgain,
    OtherBuilds,
)

HEAD = HelloHead(Build(12, 11, "0.9.1"), "worker", "gpu-7")


def test_peers_come_again_one_after_the_other() -> None:
    builds = OtherBuilds(ComeAgain())
    waits = [builds.refuse(PeerId(f"p{number}"), "box", HEAD, 0.0)[0] for number in range(500)]
    assert waits == [RETRY_S_MIN + number * SPACING_S for number in range(500)]
    builds.check()


def test_a_peer_that_comes_too_early_is_told_the_same_time() -> None:
    builds = OtherBuilds(ComeAgain())
    assert builds.refuse(PeerId("p"), "box", HEAD, 0.0) == (RETRY_S_MIN, True)
    assert builds.refuse(PeerId("p"), "box", HEAD, 20.0) == (RETRY_S_MIN - 20.0, False)
    assert builds.refuse(PeerId("p"), "box", HEAD, RETRY_S_MIN) == (RETRY_S_MIN, False)


def test_nobody_waits_for_longer_than_the_limit() -> None:
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


def test_a_fleet_whose_boxes_have_tokens_of_their_own_is_spread_alike() -> None:
    come_again = ComeAgain()

    def come(now: float) -> list[float]:
        return [
            come_again.after_s(PeerId(f"p{n}"), f"t{n}", now, at_least_s=RETRY_S_MIN)
            for n in range(100)
        ]

    assert come(0.0) == [RETRY_S_MIN + n * SPACING_S for n in range(100)]
    assert min(later - sooner for sooner, later in pairwise(come(1000.0))) == SPACING_S


def test_a_peer_that_makes_up_builds_is_news_only_once() -> None:
    builds = OtherBuilds(ComeAgain())
    assert builds.refuse(PeerId("p"), "box", HEAD, 0.0)[1]
    assert not builds.refuse(PeerId("p"), "box", replace(HEAD, build=Build(13, 11, "0.9.2")), 1.0)[
        1
    ]
    [seen] = builds.here(1.0)
    assert seen.build.name == "0.9.2"


def test_what_a_peer_says_of_itself_is_cut_and_made_harmless() -> None:
    builds = OtherBuilds(ComeAgain())
    builds.refuse(
        PeerId("p"), "box", HelloHead(Build(1, 1, "\x1b[31m" * 99), "worker", "a\nb" * 99), 0.0
    )
    [seen] = builds.here(0.0)
    assert seen.build.name == "??31m" * (BUILD_CHARS_MAX // 5) + "??3"
    assert seen.name.isprintable()
    assert len(seen.name) == 64


def test_peers_are_forgotten_when_they_are_upgraded_or_stay_away() -> None:
    builds = OtherBuilds(ComeAgain())
    for name in ("upgraded", "away", "here"):
        builds.refuse(PeerId(name), "box", HEAD, 0.0)
    builds.understood(PeerId("upgraded"))
    builds.refuse(PeerId("here"), "box", HEAD, RETRY_S_MIN + HERE_S)
    assert [each.peer for each in builds.here(RETRY_S_MIN + HERE_S + 10.0)] == ["here"]


def test_no_more_peers_are_kept_than_a_run_enrols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_builds, "_PEERS_MAX", 5)
    builds = OtherBuilds(ComeAgain())
    for number in range(20):
        builds.refuse(PeerId(f"p{number}"), "box", HEAD, float(number))
        builds.check()
    assert len(builds.here(20.0)) == 5
