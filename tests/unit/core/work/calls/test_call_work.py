"""The order of calls: callers share the slots for calls, run and calls take turns, and waiting costs nothing."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import PeerSaid
from echo2d.core.coordinator.events import CoordinatorEvent, DeadlinePassed
from echo2d.core.coordinator.state import CoordinatorState
from echo2d.core.protocol.control_messages import Heartbeat
from echo2d.core.work.calls.call_work import CALL_PATIENCE_S
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.coordinator_world import World
from tests.support.gateway import call, gateway_world, key_of, of_calls


def finish_one(world: World, worker: FakePeer, *, calls: bool) -> None:
    """Of the run's samples the oldest, or of the calls'."""
    mine = {key_of(lease) for lease in of_calls(worker)}
    world.say(
        worker, worker.finish(*next(each for each in worker.open if (each[0] in mine) == calls))
    )
    world.drain()


def callers_of(worker: FakePeer, numbers: dict[int, str]) -> list[str]:
    return [numbers[lease.group & 0xFFFF] for lease in of_calls(worker)]


def test_callers_take_turns_at_a_single_slot() -> None:
    """However much one of them asks for, and however often."""
    world, (worker,) = gateway_world(2, share=0.5)
    numbers = {number: "abc"[min(number // 6, 2)] for number in range(14)}
    for number, caller in numbers.items():
        world.handle(call(number, caller=caller))
    for _ in range(6):
        finish_one(world, worker, calls=True)
    assert callers_of(worker, numbers) == ["a", "b", "c", "a", "b", "c", "a"]


def test_the_caller_that_holds_least_is_next() -> None:
    world, (worker,) = gateway_world(9, share=0.5)
    numbers = {number: "a" if number < 8 else "b" for number in range(12)}
    for number, caller in numbers.items():
        world.handle(call(number, caller=caller))
    assert callers_of(worker, numbers) == ["a"] * 4
    for _ in range(4):
        finish_one(world, worker, calls=True)
    assert Counter(callers_of(worker, numbers)[4:]) == {"a": 2, "b": 2}


def test_a_call_of_many_choices_leaves_slots_to_others() -> None:
    world, (worker,) = gateway_world(1, share=1.0, staleness_max=8)
    world.handle(call(1, choices=32, caller="a"))
    world.handle(call(2, caller="b"))
    world.handle(call(3, caller="c"))
    world.connect("more", slots=7)
    more = world.peers["more"]
    world.now += CALL_PATIENCE_S
    more.serving = worker.serving
    world.connect("more", slots=7)
    assert sorted(len(lease.samples) for lease in of_calls(more)) in ([1, 1, 5], [1, 1, 2, 3])


def test_the_run_and_calls_take_turns_at_a_single_slot() -> None:
    """Both always want it; calls wait for CALL_PATIENCE_S, and so does the run."""
    world, (worker,) = gateway_world(1, trajectories_per_step=64)
    for number in range(40):
        world.handle(call(number, caller=f"caller {number % 5}"))
    seen = []
    for _ in range(12):
        before = len(of_calls(worker))
        world.now += 1.0
        world.handle(DeadlinePassed())
        finish_one(
            world,
            worker,
            calls=bool(worker.leases.keys() & {key_of(lease) for lease in of_calls(worker)}),
        )
        seen.append(len(of_calls(worker)) > before)
    assert seen.count(True) in (2, 3)
    assert "TrueTrue" not in "".join(map(str, seen))


def test_every_caller_is_served_in_the_end() -> None:
    world, (worker,) = gateway_world(2, share=0.5)
    numbers = {number: f"caller {number}" for number in range(60)}
    for number, caller in numbers.items():
        world.handle(call(number, caller=caller))
    world.handle(call(60, caller="caller 0"))
    numbers[60] = "caller 0"
    for _ in range(60):
        finish_one(world, worker, calls=True)
    assert callers_of(worker, numbers) == [
        *(f"caller {number}" for number in range(60)),
        "caller 0",
    ]


def functions_called(what: Callable[[], Any]) -> int:
    """A measure of work that is the same on every machine."""
    count = 0

    def note(_: FrameType, kind: str, __: object) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(None)
    return count


def costs(waiting: int, *, unserved: bool) -> dict[str, int]:
    """Of the events that come most often, while so many choices of several callers wait: for slots, or for a version
    that nobody serves, though there are free slots."""
    world, (worker,) = gateway_world(8, share=0.25)
    for number in range(1 if unserved else 2):
        world.handle(call(1000 + number, caller="first"))
    if unserved:
        publish_next(world, worker)
    for number in range(waiting // 8):
        world.handle(
            call(number, choices=8, caller=f"caller {number % 4}", min_version=Version(unserved))
        )
    assert world.state.status().gateway.waiting == waiting // 8 * 8
    one, last = of_calls(worker)[0], of_calls(worker)[-1]
    events: dict[str, CoordinatorEvent] = {
        "a choice grew": PeerSaid(worker.session, worker.wrote(key_of(one), 0, 7)),
        "a heartbeat": PeerSaid(worker.session, Heartbeat(3)),
        "a deadline": DeadlinePassed(),
        **(
            {}
            if unserved
            else {
                "a slot is free": PeerSaid(
                    worker.session, worker.finish(key_of(last), 0, tokens=(7,))
                )
            }
        ),
    }
    spent = {
        name: functions_called(lambda event=event: world.state.handle(event, now=world.now))  # type: ignore[misc]
        for name, event in events.items()
    }
    return {**spent, "when to wake": functions_called(world.state.wake_at)}


def publish_next(world: World, worker: FakePeer) -> None:
    """Version 1, which nobody serves yet."""
    finish_one(world, worker, calls=False)
    request = world.ask_batch(1)
    world.drain()
    digest = world.replies[request].digest
    assert digest is not None
    world.commit(1, digest)
    world.publish(1)


@pytest.mark.parametrize("unserved", [False, True])
def test_an_event_costs_the_same_however_many_choices_wait(unserved: bool) -> None:
    few, many = costs(40, unserved=unserved), costs(400, unserved=unserved)
    for name, count in few.items():
        assert many[name] < 1.2 * count + 5, (name, count, many[name])


def test_a_choice_that_grew_moves_no_other_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    world, (worker,) = gateway_world(4, share=0.5)
    world.handle(call(1))
    [lease] = of_calls(worker)
    monkeypatch.setattr(CoordinatorState, "_advance", None)
    world.say(worker, worker.wrote(key_of(lease), 0, 7))
    assert len(world.actions) == 1
