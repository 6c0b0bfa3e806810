"""Fixtures of the tests of dissemination at one peer (`relay_peer`)."""

import pytest

from echo2d.core.relay.events import LinkUp
from tests.support.relay_peer import LEFT, RIGHT, UP, Peer, fill


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def root(peer: Peer) -> Peer:
    """It holds the whole form; the children of its single stripe, LEFT and RIGHT, are linked."""
    peer.plan((None, (LEFT, RIGHT)))
    fill(peer)
    peer(LinkUp(LEFT))
    peer(LinkUp(RIGHT))
    return peer


@pytest.fixture
def follower(peer: Peer) -> Peer:
    """It follows UP on stream 2 and feeds LEFT on stream 2."""
    peer.plan((UP, (LEFT,)))
    peer(LinkUp(UP))
    peer(LinkUp(LEFT))
    peer.asked(LEFT, 2)
    return peer
