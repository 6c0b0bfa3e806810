"""Which samples workers draw next."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.tinker import samplers as module
from echo2d.core.tinker.draw_queue import BASE, DRAW_RETRY_S, AskedSample, WeightsSampler
from echo2d.core.tinker.events import (
    SampleOrder,
    SamplerName,
    SamplerOpened,
    SamplerOver,
    SessionName,
)
from echo2d.core.tinker.futures import FutureId
from echo2d.core.tinker.operations import ModelId
from echo2d.core.tinker.samplers import (
    CALLER_DRAWN_MAX,
    CALLER_WHOLE_SAMPLERS_MAX,
    DRAW_TRIES_MAX,
    DRAWN_MAX,
    Samplers,
)
from tests.support.tinker_samplers import ObedientWorkers, sample, sampler


def opened(of: WeightsSampler) -> SamplerOpened:
    return SamplerOpened(of.name, of.caller, of.session, of.folder, of.base, of.path)


def asked(
    samplers: Samplers, of: WeightsSampler, name: str, *, count: int = 1, now: float = 0.0
) -> None:
    samplers.ask(sample(of, name, count=count, now=now))


def begun(samplers: Samplers, now: float = 0.0) -> list[str]:
    found = [each.future for each in samplers.begin(now=now)]
    samplers.check()
    return list(found)


def published(samplers: Samplers, folder: str, version: int, now: float = 0.0) -> None:
    samplers.held.make_room(folder)
    samplers.held.published(folder, Version(version), now=now)


def serving() -> Samplers:
    """They hold f1, from which nothing is asked."""
    samplers = Samplers(ObedientWorkers())
    asked(samplers, sampler("f1"), "first")
    published(samplers, "f1", 1)
    samplers.drop(FutureId("first"))
    return samplers


def test_nothing_is_drawn_before_its_weights_are_held() -> None:
    samplers = Samplers(ObedientWorkers())
    asked(samplers, sampler("f1"), "a")
    assert begun(samplers) == []
    assert samplers.held.wanted(now=0.0) == "f1"
    published(samplers, "f1", 3, now=1.0)
    (draw,) = samplers.begin(now=1.0)
    assert (draw.future, draw.caller, draw.version) == ("a", "ann", 3)
    assert samplers.held.wanted(now=1.0) is None


def test_samples_of_several_weights_are_drawn_at_once_in_the_order_in_which_they_came() -> None:
    samplers = Samplers(ObedientWorkers())
    for number, name in enumerate("abcd"):
        asked(samplers, sampler("f1" if number % 2 else BASE), name, now=float(number))
    published(samplers, BASE, 1)
    published(samplers, "f1", 2)
    found = [(each.future, each.version) for each in samplers.begin(now=3.0)]
    assert found == [("a", 1), ("b", 2), ("c", 1), ("d", 2)]


def test_a_sample_that_waits_follows_its_sampler_to_newer_weights() -> None:
    samplers = Samplers(ObedientWorkers())
    name, session = SamplerName("s1:f1"), SessionName("s1")
    follower = SamplerOpened(
        name, "ann", session, "f1", "org/base", None, ModelId("m"), steps=1, follows=True
    )
    samplers.open(follower)
    of = samplers.get("ann", name)
    assert of is not None
    asked(samplers, of, "a")
    asked(samplers, sampler("f1", session="s2"), "b")
    newest = replace(follower, sampler=SamplerName("s1:f2"), folder="f2", steps=2)
    (moved,) = samplers.follow(newest)
    assert (moved.sampler, moved.folder) == ("s1:f1", "f2")
    published(samplers, "f2", 5)
    assert begun(samplers) == ["a"]


def test_a_caller_does_not_take_all_room_but_one_large_sample_is_drawn() -> None:
    samplers = serving()
    ann, bob = sampler("f1"), sampler("f1", "bob", "s2")
    asked(samplers, ann, "a", count=CALLER_DRAWN_MAX)
    asked(samplers, ann, "b")
    asked(samplers, bob, "c", count=DRAWN_MAX - CALLER_DRAWN_MAX)
    asked(samplers, bob, "d", count=2 * DRAWN_MAX)
    assert begun(samplers) == ["a", "c"]
    for name in ("a", "c"):
        samplers.ended(FutureId(name), again=False, now=0.0)
    assert begun(samplers) == ["b"]
    samplers.ended(FutureId("b"), again=False, now=0.0)
    assert begun(samplers) == ["d"]


def test_a_sample_that_workers_failed_is_drawn_again_a_few_times() -> None:
    samplers = serving()
    asked(samplers, sampler("f1"), "a")
    now = 0.0
    for _ in range(DRAW_TRIES_MAX - 1):
        assert begun(samplers, now=now) == ["a"]
        assert samplers.ended(FutureId("a"), again=True, now=now)
        assert begun(samplers, now=now) == []
        assert samplers.wake_at(now) == now + DRAW_RETRY_S
        now += DRAW_RETRY_S
    assert begun(samplers, now=now) == ["a"]
    assert not samplers.ended(FutureId("a"), again=True, now=now)
    assert begun(samplers) == []


def test_the_folders_of_samplers_and_of_what_is_drawn_are_kept() -> None:
    samplers = serving()
    one, two = sampler("f1"), sampler("f2", session="s2")
    for each in (one, two, sampler(BASE)):
        samplers.open(opened(each))
    asked(samplers, two, "b")
    assert samplers.folders() == {"f1", "f2"}
    (left,) = samplers.end_session(SessionName("s2"))
    assert left.future == "b"
    assert samplers.folders() == {"f1", "f2"}
    assert not samplers.drop(FutureId("b"))
    assert samplers.folders() == {"f1"}


def test_beyond_the_limit_the_oldest_sampler_of_its_caller_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CALLER_SAMPLERS_MAX", 2)
    samplers = Samplers(ObedientWorkers())
    for folder, caller in (("f1", "bob"), ("f2", "ann"), ("f3", "ann"), ("f4", "ann")):
        samplers.open(opened(sampler(folder, caller)))
    found = [samplers.get("ann", SamplerName(f"s1:{each}")) for each in ("f2", "f3", "f4")]
    assert [each is None for each in found] == [True, False, False]
    assert samplers.get("bob", SamplerName("s1:f1")) is not None
    assert samplers.get("ann", SamplerName("s1:f1")) is None, "it is another caller's"


def test_fewer_samplers_of_full_weights_are_kept() -> None:
    samplers, whole = Samplers(ObedientWorkers()), range(CALLER_WHOLE_SAMPLERS_MAX)
    samplers.open(opened(sampler("adapter")))
    for number in whole:
        assert samplers.open(replace(opened(sampler(f"w{number}")), whole=True)) == []
    samplers.open(replace(opened(sampler("w", "bob", "s2")), whole=True))
    samplers.open(opened(sampler("another")))
    over = samplers.open(replace(opened(sampler("one more")), whole=True))
    assert over == [SamplerOver(SamplerName("s1:w0"))]


def test_what_the_learner_finds_counts_as_long_as_its_sample_is_not_drawn() -> None:
    samplers, of = serving(), sampler("f1")
    order = SampleOrder(b"1234", 1, 10, WHOLE, (), (), None, b"asked", 100)
    scored = AskedSample(FutureId("a"), of, order, 0.0)
    samplers.ask(scored)
    assert samplers.waiting("ann") == (1, 109)
    assert samplers.next_to_score() is scored
    scored.scores = b"found"
    samplers.ask(scored)
    assert samplers.waiting("ann") == (1, 109)
    assert begun(samplers) == ["a"]
    assert (samplers.waiting("ann"), samplers.waiting("bob")) == ((0, 109), (0, 0))
    assert not samplers.ended(FutureId("a"), again=False, now=0.0)
    assert samplers.waiting("ann") == (0, 0)
    # The learner must find something of the sequences too.
    scored.drawn = b"sequences"
    samplers.ask(scored)
    assert samplers.waiting("ann") == (1, 109)
    assert samplers.next_to_score() is scored
    assert samplers.waiting("ann") == (0, 0)


def test_callers_take_turns_however_many_samples_one_of_them_asks_for() -> None:
    samplers = serving()
    for number in range(DRAWN_MAX):
        asked(samplers, sampler("f1", "ann"), f"a{number}")
    asked(samplers, sampler("f1", "bob"), "b")
    assert begun(samplers)[:2] == ["a0", "b"]
