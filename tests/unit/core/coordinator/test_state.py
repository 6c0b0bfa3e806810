"""The routes of the machine: which peer may send which message, and how a session begins."""

import json
import math
from dataclasses import replace

from echo2d.core.base.ids import Epoch, PublishSeq, SessionId
from echo2d.core.cluster.events import CloseSession, PeerRevoked, PeerSaid, Send
from echo2d.core.protocol.control_messages import (
    Heartbeat,
    RefitDone,
    RefitFailed,
    Refused,
    Welcome,
)
from echo2d.core.status.json_form import status_json
from tests.support.coordinator_world import World, rules, train, version_digest, version_key


def running() -> World:
    world = World()
    world.connect("seed", kind="seed", slots=0)
    world.connect("a")
    train(world, 2)
    world.work()
    return world


def test_a_session_begins_with_a_welcome() -> None:
    world = World()
    peer = world.connect("a")
    welcome = Welcome(
        peer.peer, world.rules.run_id, Epoch(0), PublishSeq(0), 2.0, (), (), staleness_max=2
    )
    assert world.actions[0] == Send(peer.session, welcome)


def test_a_started_machine_has_a_deadline_at_once() -> None:
    world = World()
    assert world.state.wake_at() == 0.0
    world.connect("a")
    wake_at = world.state.wake_at()
    assert wake_at is not None
    assert wake_at > 0.0


def test_events_of_ended_sessions_are_ignored() -> None:
    world = running()
    assert world.handle(PeerSaid(SessionId(99), Heartbeat(1))) == []


def test_the_session_of_a_peer_that_breaks_the_protocol_is_closed() -> None:
    world = running()
    peer, key = world.peers["a"], version_key(0)
    actions = world.say(peer, RefitDone(key.version, key.digest, math.nan, memory_ok=None))
    assert CloseSession(peer.session) in actions
    assert (
        Send(
            peer.session,
            Refused(
                "protocol",
                "pause_s, held_s and recompute_s must be finite and >= 0",
                permanent=False,
            ),
        )
        in actions
    )
    again = world.connect("a")
    actions = world.say(again, RefitDone(key.version, key.digest, 0.1, memory_ok=None, held_s=-1.0))
    assert CloseSession(again.session) in actions
    for wrong in (
        {"recompute_s": math.inf},
        {"recomputed_tokens": -1},
        {"recomputed_tokens": 1 << 40},
    ):
        again = world.connect("a")
        done = RefitDone(key.version, key.digest, 0.1, memory_ok=None)
        assert CloseSession(again.session) in world.say(again, replace(done, **wrong)), wrong
    second = world.connect("a")
    actions = world.say(second, second.hello())
    assert CloseSession(second.session) in actions


def test_a_revoked_peer_gets_the_reason_and_loses_its_work() -> None:
    world = running()
    peer = world.peers["a"]
    world.handle(PeerRevoked(peer.peer))
    refusal = next(m for m in peer.inbox[::-1] if isinstance(m, Refused))
    assert (refusal.reason, refusal.permanent) == ("revoked", True)
    assert world.state.status().groups.leases == 0


def test_the_served_version_of_a_worker_follows_its_refits() -> None:
    world = running()
    peer, key = world.peers["a"], version_key(1)
    (status,) = world.state.status().workers
    assert status.serving is not None
    assert (status.serving.version, status.lag, status.memory_ok) == (2, 0, True)
    world.say(peer, RefitFailed(key.version, key.digest, key, "out of memory"))
    assert world.state.status().workers[0].lag == 1
    world.say(peer, RefitFailed(key.version, key.digest, version_key(9), "out of memory"))
    assert world.state.status().workers[0].serving is None
    world.say(peer, RefitDone(key.version, version_digest(1, 7), 0.1, memory_ok=None))
    assert world.state.status().workers[0].serving is None
    assert "not published" in world.state.status().faults[-1].text


def test_the_load_of_the_first_version_does_not_count_as_a_pause() -> None:
    world = running()
    assert world.state.status().refit_pause_s == (0.1, 0.1), "versions 1 and 2, not 0"
    peer, key = world.peers["a"], version_key(2)
    world.say(peer, RefitFailed(key.version, key.digest, None, "its server ended"))
    world.say(peer, RefitDone(key.version, key.digest, 130.0, memory_ok=None))
    (status,) = world.state.status().workers
    assert (status.serving is not None, status.refit_pause_s) == (True, 0.1)


def test_equal_events_make_equal_actions() -> None:
    def trace() -> list[object]:
        world = World(rules(staleness_max=1))
        world.connect("seed", kind="seed", slots=0)
        world.connect("a")
        world.connect("b", slots=3)
        train(world, 3)
        return [world.peers[name].inbox for name in sorted(world.peers)]

    assert trace() == trace()


def test_the_status_is_plain_json() -> None:
    world = running()
    world.connect("r", kind="relay", slots=0)
    status = json.loads(json.dumps(status_json(world.state.status()), allow_nan=False))
    assert (
        status["groups"]["queued"] == status["groups"]["buffered"] + status["groups"]["in_flight"]
    )
    assert (status["newest_version"]["version"], status["committed_step"], status["open_step"]) == (
        2,
        2,
        3,
    )
    assert status["staleness"] == {"0": 4, "1": 4}
    assert status["rewards"] == [[1, 0.5], [2, 0.5]]
    assert [relay["name"] for relay in status["relays"]] == ["r"]
    assert status["broadcast"]["peers"][0]["verified"]
