"""The effect of failures and results on a peer, and the number of versions that it may have served."""

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.peer import (
    ACKNOWLEDGED_MAX,
    FAILURES_MAX,
    FORGIVES,
    REST_S_MAX,
    WORKER_REST_S,
    Peer,
)
from tests.support.coordinator_world import version_key


def a_worker() -> Peer:
    return Peer(PeerId("a"), "a", "worker", "boot", 4, None, 0.0)


def test_one_neglected_sample_is_an_accident_and_many_are_failures() -> None:
    peer = a_worker()
    peer.service.rest(10.0)
    assert not peer.service.left_alone(1)
    assert not peer.service.left_alone(2)
    assert peer.service.left_alone(20)
    for _ in range(round(FAILURES_MAX / FORGIVES)):
        peer.succeeded()
    assert peer.service.failures == 0.0


def test_failures_make_a_peer_rest_and_successes_end_the_rest() -> None:
    peer = a_worker()
    peer.service.rest(10.0)
    assert peer.service.rest_until == 10.0 + WORKER_REST_S
    for _ in range(20):
        peer.service.rest(10.0)
    assert peer.service.rest_until == 10.0 + WORKER_REST_S  # all of one accident
    for _ in range(20):
        begins = peer.service.rest_until
        peer.service.rest(begins)
    assert peer.service.rest_until == begins + REST_S_MAX
    peer.succeeded()
    peer.service.rest(200.0 + begins)
    assert peer.service.rest_until == 200.0 + begins + REST_S_MAX, "one result is no excuse"
    for _ in range(round(FAILURES_MAX / FORGIVES)):
        peer.succeeded()
    begins += REST_S_MAX
    peer.service.rest(200.0 + begins)
    assert peer.service.rest_until == 200.0 + begins + WORKER_REST_S


def test_the_number_of_acknowledged_versions_is_limited() -> None:
    peer = a_worker()
    for version in range(2 * ACKNOWLEDGED_MAX):
        peer.engine.serves(version_key(version))
    assert len(peer.engine.acknowledged) == ACKNOWLEDGED_MAX


def test_a_version_that_is_held_when_a_worker_comes_back_is_acknowledged_although_it_is_old() -> (
    None
):
    peer = a_worker()
    keys = [*map(version_key, range(2 * ACKNOWLEDGED_MAX))]
    peer.engine.serves(keys[1], [keys[0]])
    peer.engine.serves(keys[1], [keys[0]], keys[ACKNOWLEDGED_MAX:])
    assert peer.engine.held == {keys[0], keys[1]}
    assert peer.engine.held <= peer.engine.acknowledged.keys()
    assert len(peer.engine.acknowledged) == ACKNOWLEDGED_MAX


def test_a_held_version_is_acknowledged_however_many_newer_ones_are_served() -> None:
    peer = a_worker()
    peer.engine.serves(version_key(0))
    for version in range(1, 2 * ACKNOWLEDGED_MAX):
        peer.engine.serves(version_key(version), [version_key(0)])
    assert peer.engine.held == {version_key(0), version_key(version)}
    assert peer.engine.held <= peer.engine.acknowledged.keys()
    assert len(peer.engine.acknowledged) == ACKNOWLEDGED_MAX
    peer.engine.serves(None, [version_key(0)])
    assert peer.engine.held == set()
