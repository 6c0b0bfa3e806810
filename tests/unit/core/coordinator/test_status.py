"""The machine's status: it has every key from the first moment on."""

import json

from echo2d.core.status.json_form import status_json
from tests.support.coordinator_world import World
from tests.support.status import RICH, key_paths, pinned_keys

# What the process around the machine says.
OF_THE_PROCESS = {
    "run", "disk", "expiring_tokens", "run_id", "peer_faults", "learner_silent_s", "renting",
    "refused_peers", "build", "protocol", "other_builds", "other_builds_total",
}  # fmt: skip


def pinned_for_the_machine() -> set[str]:
    return {path for path in pinned_keys() if first_of(path) not in OF_THE_PROCESS}


def first_of(path: str) -> str:
    return path.split(".")[0].removesuffix("[]")


def test_a_machine_in_which_nothing_has_happened_says_all_there_is_to_say_of_a_run() -> None:
    facts = status_json(World().state.status())
    assert facts.keys() == {first_of(path) for path in pinned_for_the_machine()}
    assert facts["broadcast"] is None
    assert facts["newest_version"] is None


def test_a_version_that_is_being_encoded_spreads_but_is_not_whole() -> None:
    world = World()
    world.connect("a")
    world.open_session()
    world.publish(0)
    broadcast = world.state.status().broadcast
    assert broadcast is not None
    assert broadcast.whole is False
    assert broadcast.wire_bytes is None


def test_every_key_of_rich_runs_is_pinned_and_json_can_hold_its_value() -> None:
    found = set[str]()
    for make in RICH:
        world = make()
        facts = json.loads(
            json.dumps(status_json(world.state.status(now=world.now)), allow_nan=False)
        )
        found |= key_paths(facts)
    assert found == pinned_for_the_machine()
