"""Membership: joins, silence, rivals for one peer id, limits."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from echo2d.core.base.ids import PeerId, RunId, SessionId
from echo2d.core.cluster.events import CloseSession, PeerConnected, Send
from echo2d.core.cluster.membership import (
    HEARTBEATS_MISSED_MAX,
    PEER_GONE_S,
    PEERS_MAX,
    SLOTS_MAX,
    Joined,
    Membership,
)
from echo2d.core.cluster.peer import FLIP_WINDOW_S
from echo2d.core.coordinator.events import CoordinatorAction
from echo2d.core.protocol.builds import Build
from echo2d.core.protocol.control_messages import Hello, Refused
from tests.support.coordinator_world import version_key
from tests.support.hello import HELLO

SILENCE_S = HEARTBEATS_MISSED_MAX * 2.0


class Club:
    """A membership with numbered sessions."""

    def __init__(self, *, quantized: bool = False, versions_held: int = 1) -> None:
        self.members = Membership(
            "r", heartbeat_s=2.0, quantized=quantized, versions_held=versions_held
        )
        self.sessions = 0

    def hello(
        self, name: str = "a", hello: Hello = HELLO, *, now: float = 0.0
    ) -> tuple[Joined | None, Sequence[CoordinatorAction]]:
        self.sessions += 1
        result = self.members.connected(
            PeerConnected(SessionId(self.sessions), PeerId(name), hello), now=now
        )
        self.members.check()
        return result


def refusals(actions: Sequence[CoordinatorAction]) -> list[tuple[int, str]]:
    return [
        (a.session, a.message.reason)
        for a in actions
        if isinstance(a, Send) and isinstance(a.message, Refused)
    ]


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (replace(HELLO, build=Build(99, 99)), "build"),
        (replace(HELLO, run_id=RunId("other")), "run"),
    ],
)
def test_a_wrong_hello_is_refused(hello: Hello, reason: str) -> None:
    joined, actions = Club().hello(hello=hello)
    assert joined is None
    assert refusals(actions) == [(1, reason)]
    assert actions[-1] == CloseSession(SessionId(1))


def test_a_run_accepts_quantized_workers_only_if_its_operator_allows_them() -> None:
    hello = replace(HELLO, quantization="int8")
    joined, actions = Club().hello(hello=hello)
    assert joined is None
    assert refusals(actions) == [(1, "run")]
    (told,) = (a.message for a in actions if isinstance(a, Send))
    assert isinstance(told, Refused)
    assert told.permanent
    assert "computes in int8" in told.detail
    assert "policy.quantized_workers = true" in told.detail
    club = Club(quantized=True)
    joined, _ = club.hello(hello=hello)
    assert joined is not None
    assert joined.peer.quantization == "int8"
    named = replace(hello, quantization="mixed KV, logprobs off")
    joined, _ = Club(quantized=True).hello(hello=named)
    assert joined is not None
    assert joined.peer.quantization == "mixedKVlogprobsoff", "it borrows no other class's limits"


def test_the_name_of_a_worker_is_short_and_printable() -> None:
    joined, _ = Club().hello(hello=replace(HELLO, name="box\n\x1b[31m" + "x" * 4000))
    assert joined is not None
    assert joined.peer.name == ("box  [31m" + "x" * 4000)[:64]


def test_a_first_hello_need_not_know_the_run_and_slots_are_bounded() -> None:
    joined, actions = Club().hello(hello=replace(HELLO, run_id=None, slots=10**9))
    assert joined is not None
    assert (joined.renewed, actions) == (True, [])
    assert joined.peer.slots == SLOTS_MAX


def test_silence_makes_a_peer_suspect_a_message_clears_it_and_long_silence_ends_it() -> None:
    club = Club()
    club.hello()
    assert club.members.deadlines(now=SILENCE_S - 0.1) == ([], [])
    suspected, _ = club.members.deadlines(now=SILENCE_S)
    assert [peer.peer for peer in suspected] == ["a"]
    assert not club.members.workers()
    peer, returned = club.members.heard(SessionId(1), now=SILENCE_S + 1)
    assert returned
    assert club.members.workers() == [peer]
    suspected, actions = club.members.deadlines(now=SILENCE_S + 1 + PEER_GONE_S)
    assert len(suspected) == 1
    assert actions == [CloseSession(SessionId(1))]
    assert club.members.wake_at() is None
    club.members.check()


def test_a_cut_connection_is_not_alive_but_may_come_back_unnoticed() -> None:
    club = Club()
    club.hello()
    club.members.disconnected(SessionId(1))
    assert not club.members.workers()
    joined, actions = club.hello(now=1.0)
    assert joined is not None
    assert (joined.renewed, actions) == (False, [])
    assert club.members.deadlines(now=SILENCE_S) == ([], [])


def test_the_newer_of_two_sessions_wins_and_three_changes_a_minute_refuse_both() -> None:
    club = Club()
    club.hello()
    for now, old in ((1.0, 1), (2.0, 2)):
        joined, actions = club.hello(now=now)
        assert joined is not None
        assert refusals(actions) == [(old, "superseded")]
    joined, actions = club.hello(now=3.0)
    assert joined is None
    assert refusals(actions) == [(3, "flapping"), (4, "flapping")]
    assert club.members.of_session(SessionId(3)) is None


def test_rare_changes_of_session_are_not_refused() -> None:
    club = Club()
    for number in range(6):
        joined, _ = club.hello(now=number * FLIP_WINDOW_S / 2)
        assert joined is not None


def test_a_new_start_of_the_daemon_forgets_what_it_served() -> None:
    club = Club()
    joined, _ = club.hello(hello=replace(HELLO, serving=version_key(1)))
    assert joined is not None
    assert list(joined.peer.engine.acknowledged) == [version_key(1)]
    joined, _ = club.hello(hello=replace(HELLO, boot_id="next"), now=9.0)
    assert joined is not None
    assert joined.renewed
    assert (joined.peer.engine.serving, list(joined.peer.engine.acknowledged)) == (None, [])


@pytest.mark.parametrize("versions_held", [1, 3])
def test_a_hello_names_what_the_engines_hold(versions_held: int) -> None:
    club = Club(versions_held=versions_held)
    keys = tuple(map(version_key, (4, 3, 2, 1)))
    joined, _ = club.hello(hello=replace(HELLO, serving=keys[0], held=keys))
    assert joined is not None
    assert joined.peer.engine.held == {*keys[:versions_held]}
    # A worker that does not name what it serves holds no more than others.
    joined, _ = club.hello(hello=replace(HELLO, serving=version_key(9), held=keys), now=99.0)
    assert joined is not None
    assert len(joined.peer.engine.held) == versions_held
    joined, _ = club.hello(hello=replace(HELLO, held=keys), now=199.0)
    assert joined is not None
    assert joined.peer.engine.held == set()


def test_only_one_seed_can_be_joined_at_a_time() -> None:
    club = Club()
    seed = replace(HELLO, kind="seed")
    club.hello("s", seed)
    assert refusals(club.hello("t", seed)[1]) == [(2, "busy")]
    club.members.deadlines(now=SILENCE_S)
    joined, actions = club.hello("t", seed, now=SILENCE_S)
    assert joined is not None
    assert actions == [CloseSession(SessionId(1))]
    assert club.members.seed is joined.peer


def test_a_revoked_peer_gets_the_reason_of_its_refusal() -> None:
    club = Club()
    joined, _ = club.hello()
    assert joined is not None
    assert refusals(club.members.revoked(joined.peer)) == [(1, "revoked")]
    assert joined.peer.state == "gone"
    club.members.check()


def test_the_number_of_peers_is_limited_and_gone_peers_make_room() -> None:
    club = Club()
    for number in range(PEERS_MAX):
        club.sessions += 1
        club.members.connected(
            PeerConnected(SessionId(club.sessions), PeerId(str(number)), HELLO), now=0.0
        )
    assert refusals(club.hello("late")[1]) == [(PEERS_MAX + 1, "busy")]
    first = club.members.get(PeerId("0"))
    assert first is not None
    club.members.left(first)
    assert club.hello("late")[0] is not None
    assert club.members.get(PeerId("0")) is None
