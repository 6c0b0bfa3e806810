"""Which samples workers draw, and which weights they serve."""

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.tinker import samplers as module
from echo2d.core.tinker.events import SampleOrder, SamplerName, SamplerOpened, SessionName
from echo2d.core.tinker.futures import FutureId
from echo2d.core.tinker.samplers import (
    BASE,
    CALLER_DRAWN_MAX,
    DRAW_RETRY_S,
    DRAW_TRIES_MAX,
    DRAWN_MAX,
    SNAPSHOT_SWITCH_S,
    AskedSample,
    Samplers,
    WeightsSampler,
)


def opened(of: WeightsSampler) -> SamplerOpened:
    return SamplerOpened(of.name, of.caller, of.session, of.folder, of.base, of.path)


def sampler(folder: str, caller: str = "ann", session: str = "s1") -> WeightsSampler:
    name = SamplerName(f"{session}:{folder}")
    return WeightsSampler(name, caller, SessionName(session), folder, "org/base", None)


def asked(
    samplers: Samplers, of: WeightsSampler, name: str, *, count: int = 1, now: float = 0.0
) -> None:
    order = SampleOrder(b"", count, 10, WHOLE, (), (), None)
    samplers.ask(AskedSample(FutureId(name), of, order, now))


def begun(samplers: Samplers, now: float = 0.0) -> list[str]:
    found = [each.future for each in samplers.begin(now=now)]
    samplers.check()
    return list(found)


def served(folder: str = "f1", version: int = 1, now: float = 0.0) -> Samplers:
    samplers = Samplers()
    samplers.published(folder, Version(version), now=now)
    return samplers


def test_nothing_is_drawn_before_its_weights_are_served() -> None:
    samplers = Samplers()
    asked(samplers, sampler("f1"), "a")
    assert begun(samplers) == []
    assert samplers.wanted(now=0.0) == "f1"
    samplers.published("f1", Version(3), now=1.0)
    (draw,) = samplers.begin(now=1.0)
    assert (draw.future, draw.caller, draw.version) == ("a", "ann", 3)
    assert samplers.wanted(now=1.0) is None


def test_the_present_weights_stay_while_something_is_drawn_by_them() -> None:
    samplers = served()
    asked(samplers, sampler("f1"), "a")
    asked(samplers, sampler(BASE), "b")
    assert begun(samplers) == ["a"]
    assert samplers.wanted(now=100.0) is None
    assert not samplers.ended(FutureId("a"), again=False, now=1.0)
    assert samplers.wanted(now=1.0) == BASE


def test_the_present_weights_go_on_for_a_while_although_others_wait() -> None:
    samplers = served()
    asked(samplers, sampler("f2"), "b")
    asked(samplers, sampler("f1"), "a")
    assert samplers.wanted(now=1.0) is None
    assert begun(samplers, now=1.0) == ["a"]
    samplers.ended(FutureId("a"), again=False, now=1.0)
    asked(samplers, sampler("f1"), "c", now=SNAPSHOT_SWITCH_S)
    assert samplers.wake_at(1.0) == SNAPSHOT_SWITCH_S
    assert samplers.wake_at(SNAPSHOT_SWITCH_S) is None, "nothing changes before another event"
    assert begun(samplers, now=SNAPSHOT_SWITCH_S) == []
    assert samplers.wanted(now=SNAPSHOT_SWITCH_S) == "f2"
    samplers.published("f2", Version(2), now=SNAPSHOT_SWITCH_S)
    # Those that wait for other weights have waited for long, but nothing would be drawn if the weights changed again.
    assert begun(samplers, now=SNAPSHOT_SWITCH_S) == ["b"]
    samplers.ended(FutureId("b"), again=False, now=SNAPSHOT_SWITCH_S)
    assert samplers.wanted(now=SNAPSHOT_SWITCH_S) == "f1"


def test_of_several_weights_those_that_were_waited_for_longest_come_next() -> None:
    samplers = served()
    asked(samplers, sampler("f3"), "late", now=2.0)
    asked(samplers, sampler("f2"), "early", now=1.0)
    assert samplers.wanted(now=3.0) == "f2"


def test_a_caller_does_not_take_all_room_but_one_large_sample_is_drawn() -> None:
    samplers = served()
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
    samplers = served()
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
    samplers = served()
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
    samplers = Samplers()
    for folder, caller in (("f1", "bob"), ("f2", "ann"), ("f3", "ann"), ("f4", "ann")):
        samplers.open(opened(sampler(folder, caller)))
    found = [samplers.get("ann", SamplerName(f"s1:{each}")) for each in ("f2", "f3", "f4")]
    assert [each is None for each in found] == [True, False, False]
    assert samplers.get("bob", SamplerName("s1:f1")) is not None
    assert samplers.get("ann", SamplerName("s1:f1")) is None, "it is another caller's"


def test_what_the_learner_finds_counts_as_long_as_its_sample_is_not_drawn() -> None:
    samplers, of = served(), sampler("f1")
    order = SampleOrder(b"1234", 1, 10, WHOLE, (), (), None, b"asked", 100)
    sample = AskedSample(FutureId("a"), of, order, 0.0)
    samplers.ask(sample)
    assert samplers.waiting("ann") == (1, 109)
    assert samplers.next_to_score() is sample
    sample.scores = b"found"
    samplers.ask(sample)
    assert samplers.waiting("ann") == (1, 109)
    assert begun(samplers) == ["a"]
    assert (samplers.waiting("ann"), samplers.waiting("bob")) == ((0, 109), (0, 0))
    assert not samplers.ended(FutureId("a"), again=False, now=0.0)
    assert samplers.waiting("ann") == (0, 0)


def test_callers_take_turns_however_many_samples_one_of_them_asks_for() -> None:
    samplers = served()
    for number in range(DRAWN_MAX):
        asked(samplers, sampler("f1", "ann"), f"a{number}")
    asked(samplers, sampler("f1", "bob"), "b")
    assert begun(samplers)[:2] == ["a0", "b"]


def test_callers_take_turns_with_their_snapshots() -> None:
    samplers = Samplers()
    for number, (folder, caller) in enumerate((("f1", "ann"), ("f2", "ann"), ("f3", "bob"))):
        asked(samplers, sampler(folder, caller), folder, now=float(number))
    turns = []
    while (wanted := samplers.wanted(now=9.0)) is not None:
        turns.append(wanted)
        samplers.published(wanted, Version(len(turns)), now=9.0)
        for name in begun(samplers, 9.0):
            samplers.ended(FutureId(name), again=False, now=9.0)
    assert turns == ["f1", "f3", "f2"]
