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


def test_the_status_of_an_empty_run_has_every_key() -> None:
    facts = status_json(World().state.status())
    assert facts.keys() == {first_of(path) for path in pinned_for_the_machine()}
    assert facts["broadcast"] is None
    assert facts["newest_version"] is None


def test_a_version_that_is_being_encoded_is_shown_as_spreading_and_incomplete() -> None:
    world = World()
    world.connect("a")
    world.open_session()
    world.publish(0)
    broadcast = world.state.status().broadcast
    assert broadcast is not None
    assert broadcast.whole is False
    assert broadcast.wire_bytes is None


def test_every_key_of_rich_runs_is_listed_and_has_a_json_value() -> None:
    found = set[str]()
    for make in RICH:
        world = make()
        facts = json.loads(
            json.dumps(status_json(world.state.status(now=world.now)), allow_nan=False)
        )
        found |= key_paths(facts)
    assert found == pinned_for_the_machine()
