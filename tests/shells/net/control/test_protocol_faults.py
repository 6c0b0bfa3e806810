"""A peer that breaks the protocol again and again is refused for a while, by its key."""

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.net.control import protocol_faults
from echo2d.net.control.protocol_faults import (
    PROTOCOL_FAULTS_MAX,
    REFUSED_S,
    WINDOW_S,
    ProtocolFaults,
)

A, B = PeerId("a"), PeerId("b")


def test_three_faults_in_ten_minutes_and_it_is_refused_for_ten() -> None:
    faults = ProtocolFaults()
    for number in range(PROTOCOL_FAULTS_MAX):
        assert faults.refused_s(A, 10.0 * number) == 0.0
        faults.count(A, 10.0 * number)
    now = 10.0 * (PROTOCOL_FAULTS_MAX - 1)
    assert faults.refused_s(A, now) == REFUSED_S
    assert faults.refused_s(B, now) == 0.0
    assert [each.peer for each in faults.refused(now)] == [A]
    assert faults.refused_s(A, now + REFUSED_S) == 0.0
    assert faults.refused(now + REFUSED_S) == ()
    assert faults.total == PROTOCOL_FAULTS_MAX
    faults.check()


def test_a_fault_now_and_then_is_forgiven() -> None:
    faults = ProtocolFaults()
    for number in range(20):
        faults.count(A, number * (WINDOW_S / (PROTOCOL_FAULTS_MAX - 1) + 1.0))
    assert faults.refused(1e9) == ()


def test_after_its_time_a_peer_begins_anew() -> None:
    faults = ProtocolFaults()
    for _ in range(PROTOCOL_FAULTS_MAX):
        faults.count(A, 0.0)
    faults.count(A, REFUSED_S)
    assert faults.refused_s(A, REFUSED_S) == 0.0


def test_no_more_peers_are_kept_than_a_run_enrols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_faults, "_PEERS_MAX", 5)
    faults = ProtocolFaults()
    for number in range(100):
        for _ in range(1 + number % PROTOCOL_FAULTS_MAX):
            faults.count(PeerId(f"peer-{number}"), float(number))
        faults.check()
