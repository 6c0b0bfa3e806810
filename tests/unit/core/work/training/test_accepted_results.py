"""Results that arrive again: through the whole machine, and how many are remembered."""

from dataclasses import replace

import pytest

from echo2d.core.work.training import accepted_results
from echo2d.core.work.training.accepted_results import AcceptedResults
from tests.support.rollouts import answers, world_of


def test_the_first_accepted_result_wins() -> None:
    world, (worker,) = world_of(2)
    key, sample = worker.open[0]
    result = worker.finish(key, sample)
    for message in (result, result, replace(result, finish="length")):
        world.say(worker, message)
    assert answers(worker) == [
        (True, ""),
        (True, ""),
        (False, "a different result was accepted before"),
    ]
    assert sum(world.state.status().results_refused.values()) == 1


def test_only_the_newest_results_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepted_results, "ANSWERED_MAX", 2)
    world, (worker,) = world_of(2)
    peer = world.state._members.get(worker.peer)
    assert peer is not None
    result = worker.finish(*worker.open[0])
    results = [replace(result, sample=sample) for sample in range(3)]
    accepted = AcceptedResults([])
    for each in results:
        accepted.add(peer, each)
        accepted.check()
    assert [accepted.is_repeat(peer, each) for each in results] == [None, True, True]
    assert accepted.is_repeat(peer, replace(results[2], finish="length")) is False
