"""A form that may partly be on this disk is requested only when the disk has been searched."""

import pytest

from echo2d.core.base.ids import SegmentId
from echo2d.core.protocol.peer_messages import FramesWanted, StreamOpened
from echo2d.core.relay.events import (
    FormForgotten,
    FormSearched,
    FramesFound,
    LinkUp,
    RelayDeadlinePassed,
    RepairRefused,
    ReportEdgeBroken,
    SendFrame,
    TableHeld,
    Tell,
)
from echo2d.core.relay.frame_repair import SOURCE_QUIET_S
from echo2d.core.relay.relay import SEARCH_S, Relay
from echo2d.core.relay.streams import LINK_S
from tests.support.relay_peer import (
    FORM,
    FRAMES,
    LEFT,
    ME,
    SIZES,
    TABLE,
    UP,
    Peer,
    frames_to,
    held,
    opened,
    told,
)


@pytest.fixture
def restarted(peer: Peer) -> Peer:
    """Something of the form lies on its disk."""
    peer.relay = Relay(ME, unsearched=[FORM])
    return peer


@pytest.fixture
def based(peer: Peer) -> Peer:
    """It has a base model."""
    peer.relay = Relay(ME, has_base=True)
    return peer


def test_a_restarted_peer_requests_nothing_before_its_disk_is_searched(restarted: Peer) -> None:
    restarted.plan((UP, ()))
    assert restarted(LinkUp(UP)) == []
    assert restarted(RelayDeadlinePassed(), after=2 * LINK_S) == [], "it is nobody's fault"
    restarted(TableHeld(FORM, SegmentId(0), SIZES))
    restarted(FramesFound(FORM, FRAMES[:5]))
    told = Tell(UP, held((TABLE, *FRAMES[:5])))
    assert restarted(FormSearched(FORM)) == [told, opened(UP, 2)]
    assert restarted(RelayDeadlinePassed(), after=0.5) == []


def test_the_search_may_end_before_the_plan_comes(restarted: Peer) -> None:
    restarted(FormSearched(FORM))
    restarted.plan((UP, ()))
    assert restarted(LinkUp(UP)) == [opened(UP, 2)]


def test_a_forgotten_form_is_treated_as_new(restarted: Peer) -> None:
    restarted(FormForgotten(FORM))
    restarted.plan((UP, ()))
    assert restarted(LinkUp(UP)) == [opened(UP, 2)]


def test_a_base_is_searched_when_the_first_table_arrives(based: Peer) -> None:
    based.plan((UP, ()))
    assert based(LinkUp(UP)) == [Tell(UP, FramesWanted(2, FORM, (TABLE,)))]
    based(TableHeld(FORM, SegmentId(0), SIZES))
    assert based(RelayDeadlinePassed(), after=2 * SEARCH_S) == [], "the search takes what it takes"
    based(FramesFound(FORM, FRAMES))
    actions = based(FormSearched(FORM))
    assert actions[0] == Tell(UP, held((TABLE, *FRAMES)))
    assert told(StreamOpened, actions[1:2])


def test_the_search_ends_if_the_table_does_not_arrive(based: Peer) -> None:
    based.plan((UP, ()))
    based(LinkUp(UP))
    assert based(RepairRefused(UP, FORM, TABLE)) == []
    assert based(RelayDeadlinePassed(), after=SOURCE_QUIET_S) == [
        Tell(UP, FramesWanted(2, FORM, (TABLE,)))
    ]
    assert based(RepairRefused(UP, FORM, TABLE)) == []
    actions = based(RelayDeadlinePassed(), after=SEARCH_S - SOURCE_QUIET_S)
    assert told(StreamOpened, actions)
    assert not any(isinstance(action, ReportEdgeBroken) for action in actions)


def test_a_first_table_is_sent_to_a_waiting_child_once_it_arrives(follower: Peer) -> None:
    assert follower.wanted(LEFT, 4, (TABLE,)) == []
    given = follower(TableHeld(FORM, SegmentId(0), SIZES))
    assert given == [SendFrame(LEFT, 4, FORM, TABLE, 0, header_only=False)]


def test_frames_found_later_are_reported_to_the_parent(follower: Peer) -> None:
    follower.comes(UP, 2, 0, TABLE)
    assert follower(FramesFound(FORM, FRAMES[:2])) == [Tell(UP, held(FRAMES[:2]))]
    assert frames_to(UP, follower(FramesFound(FORM, FRAMES[:2]))) == []
