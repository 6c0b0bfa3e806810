"""The JSON of a status: nothing is lost in both directions, and a missing key is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from echo2d.core.status.json_form import read_status, status_json
from echo2d.core.status.schema import (
    Alert,
    BoxStatus,
    DiskStatus,
    NamedTask,
    OtherBuildStatus,
    ProcessStatus,
    RefusedPeerStatus,
    RentingStatus,
    RunFacts,
    Status,
    TokenExpiry,
)
from echo2d.errors import PeerFault
from tests.support.coordinator_world import World
from tests.support.status import RICH, key_paths, pinned_keys

BOX = BoxStatus(
    label="x-1", provider="x", offer="y", ids=("i-1",), state="seen", why="", usd_per_h=0.5, age_s=1.0,
    life_left_s=9.0, cost_usd=0.1,
)  # fmt: skip
RENTING = RentingStatus(
    usd_per_h=0.5, usd_per_h_max=4.0, spent_usd=1.0, set_aside_usd=2.0, committed_usd=3.0, left_usd=7.0,
    usd_total_max=10.0, why="", blind=("x",), states={"seen": 1}, boxes=(BOX,),
    alerts=(Alert("renting_short", "renting: x"),),
)  # fmt: skip
PROCESS = ProcessStatus(
    run_id="run-1",
    peer_faults=1,
    learner_silent_s=None,
    run=RunFacts(name="digits", model="/m", tasks=(NamedTask("a", "rows"),), software="1.2"),
    disk=DiskStatus(5, 9),
    expiring_tokens=(TokenExpiry("box-1", "worker", 3.0),),
    refused_peers=(RefusedPeerStatus("a" * 32, "w1", 500.0),),
    other_builds=(OtherBuildStatus("b" * 32, "gpu-7", "0.9.1", 12),),
)


def of(make: Callable[[], World]) -> Status:
    world = make()
    return world.state.status(now=world.now)


@pytest.mark.parametrize("make", [World, *RICH])
@pytest.mark.parametrize("process", [None, PROCESS, replace(PROCESS, renting=RENTING)])
def test_a_status_that_is_read_equals_the_written_one(
    make: Callable[[], World], process: ProcessStatus | None
) -> None:
    status = replace(of(make), process=process)
    facts = json.loads(json.dumps(status_json(status), allow_nan=False))
    assert read_status(facts) == status
    assert facts == status_json(status), "mappings have text as keys, and tuples are lists"


def test_a_status_of_an_older_build_may_lack_newer_keys() -> None:
    facts = status_json(replace(of(World), process=PROCESS))
    del facts["other_builds"], facts["build"]
    process = read_status(facts).process
    assert process == replace(PROCESS, other_builds=(), build="")


def test_the_keys_of_the_process_are_beside_those_of_the_run() -> None:
    facts = status_json(replace(of(World), process=replace(PROCESS, renting=RENTING)))
    assert (facts["run_id"], facts["peer_faults"], facts["learner_silent_s"]) == ("run-1", 1, None)
    process = ("renting", "refused_peers", "other_builds", "run.", "disk", "expiring_tokens")
    found = {path for path in key_paths(facts) if path.startswith(process)}
    assert found == {path for path in pinned_keys() if path.startswith(process)}
    assert "renting" not in status_json(replace(of(World), process=PROCESS))
    assert "process" not in facts


def test_a_key_of_a_newer_coordinator_is_skipped() -> None:
    status = of(World)
    assert read_status({**status_json(status), "something_new": 1}) == status


def test_an_alert_of_a_newer_coordinator_may_have_another_kind() -> None:
    facts = status_json(of(World))
    facts["alerts"] = [{"kind": "something_new", "sentence": "look at it", "subject": "gpu-7"}]
    (alert,) = read_status(facts).alerts
    assert (alert.kind, alert.sentence, alert.subject) == ("something_new", "look at it", "gpu-7")


def broken(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    facts = status_json(replace(of(RICH[0]), process=PROCESS))
    change(facts)
    return facts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda facts: facts.pop("epoch"), "the key epoch is missing; run the same echo2d"),
        (lambda facts: facts.pop("peer_faults"), "the key peer_faults is missing"),
        (lambda facts: facts["workers"][1].pop("mu"), "the key workers[1].mu is missing"),
        (lambda facts: facts.update(workers={}), "workers: expected a list, found dict"),
        (lambda facts: facts.update(epoch="1"), "epoch: expected an integer, found str '1'"),
        (lambda facts: facts.update(seed_alive=1), "seed_alive: expected true or false"),
        (lambda facts: facts.update(learner_train_s=True), "learner_train_s: expected a number"),
        (lambda facts: facts.update(staleness={"x": 1}), "staleness: expected whole numbers as keys"),
        (lambda facts: facts.update(staleness=[]), "staleness: expected an object"),
        (lambda facts: facts.update(rewards=[[1]]), "rewards[0]: expected a list of 2"),
        (lambda facts: facts.update(groups=3), "groups: expected an object"),
        (lambda facts: facts["provision"].update(mode="x"), "provision.mode: expected one of background, exclusive"),
    ],
)  # fmt: skip
def test_a_malformed_status_is_reported_in_one_line(
    change: Callable[[dict[str, Any]], None], words: str
) -> None:
    with pytest.raises(PeerFault) as caught:
        read_status(broken(change))
    assert str(caught.value).startswith(f"status: {words}")
    assert "\n" not in str(caught.value)
