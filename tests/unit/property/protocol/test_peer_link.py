"""The peer link under any split of its bytes, any order of the two ends' messages, and any damage to arriving bytes."""

import itertools
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2d.core.base.ids import FrameId
from echo2d.core.protocol.peer_link import AHEAD_BYTES_MAX, PeerLink
from echo2d.core.protocol.peer_messages import (
    HANDSHAKE_BYTES_MAX,
    FrameReceived,
    FramesCancelled,
    FramesHeld,
    FramesWanted,
    LinkEvent,
    StreamEnded,
    StreamOpened,
    runs_of,
)
from echo2d.core.weights.form import FRAME_BYTES_MAX
from echo2d.errors import PeerFault
from tests.support.peer_link import ALICE, BOB, FORM, STRIPE, an_end, feed, joined, pieces, wire

FRAMES = st.lists(st.integers(0, 1 << 20).map(FrameId), min_size=1, max_size=5)
PAYLOADS = st.none() | st.binary(min_size=1, max_size=300)


def conversation(*, sealed: bool = False) -> tuple[PeerLink, bytes]:
    """Bob, just joined, and what Alice then sends him: frames of both kinds and every message."""
    alice, bob = joined(sealed=sealed)
    feed(
        alice,
        bob.tell(StreamOpened(2, *STRIPE, 0))
        + bob.tell(FramesWanted(4, FORM, (FrameId(9),)))
        + bob.tell(StreamOpened(6, *STRIPE, 0)),
    )
    said = [
        *alice.send_frame(2, FrameId(1), 0, memoryview(b"payload" * 20)),
        alice.tell(FramesHeld(FORM, runs_of([FrameId(1), FrameId(2), FrameId(9)]))),
        *alice.send_frame(4, FrameId(9), 0, memoryview(b"x")),
        *alice.send_frame(2, FrameId(2), 1, None),
        alice.tell(StreamOpened(1, *STRIPE, 7)),
        alice.tell(FramesWanted(3, FORM, (FrameId(5),))),
        alice.tell(FramesCancelled(FORM, (FrameId(5),))),
        alice.tell(StreamEnded(6, "done")),
        alice.tell(StreamEnded(1, "changed")),
        alice.end("goodbye"),
    ]
    return bob, wire(said)


@given(splits=st.lists(st.integers(1, 40) | st.integers(1, 1000)), sealed=st.booleans())
def test_any_split_of_the_bytes_gives_the_same_events(splits: list[int], *, sealed: bool) -> None:
    whole, data = conversation()
    split, said = conversation(sealed=sealed)
    assert feed(split, said, itertools.cycle(splits)) == feed(whole, data)
    assert split.ended


@given(st.data())
def test_a_sealed_link_delivers_nothing_that_was_not_sent(data: st.DataObject) -> None:
    whole, said = conversation(sealed=True)
    events = feed(whole, said)
    bob, _ = conversation(sealed=True)
    damaged = bytearray(said)
    position = data.draw(st.integers(0, len(said) - 1))
    damaged[position] ^= data.draw(st.integers(1, 255))
    heard: list[LinkEvent] = []
    with suppress(PeerFault):
        heard.extend(pieces(bob, bytes(damaged), itertools.repeat(16)))
    assert heard == events[: len(heard)]
    assert len(heard) < len(events)


def survive(link: PeerLink, data: bytes, bytes_max: int) -> None:
    """Whatever arrives: events or one PeerFault, and no buffer past the limit (`feed` checks the rest)."""
    with suppress(PeerFault):
        for _ in pieces(link, data, itertools.repeat(16)):
            assert len(link.get_buffer()) <= bytes_max
    assert len(link.get_buffer()) <= bytes_max


@given(st.data())
def test_damaged_bytes_are_a_fault_of_the_peer_or_harmless(data: st.DataObject) -> None:
    bob, said = conversation()
    damaged = bytearray(said)
    for position in data.draw(st.lists(st.integers(0, len(said) - 1), min_size=1, max_size=8)):
        damaged[position] = data.draw(st.integers(0, 255))
    start = data.draw(st.sampled_from([0, 0, 16, 17]))
    survive(bob, bytes(damaged[start:]), FRAME_BYTES_MAX + AHEAD_BYTES_MAX)


@given(st.binary(max_size=200))
def test_any_bytes_from_a_stranger_are_survived(noise: bytes) -> None:
    survive(an_end(BOB, ALICE, dials=False), noise, HANDSHAKE_BYTES_MAX)


@given(st.integers(0, 1 << 16), st.integers(0, 255))
def test_a_damaged_handshake_opens_nothing(position: int, value: int) -> None:
    alice, bob = an_end(ALICE, BOB, dials=True, nonce=1), an_end(BOB, ALICE, dials=False, nonce=2)
    hello = alice.start()
    damaged = bytearray(hello)
    damaged[position % len(hello)] = value
    with suppress(PeerFault):
        feed(bob, bytes(damaged))
        feed(alice, bob.take_replies())
        events = feed(bob, alice.take_replies())
        assert not events or damaged == hello


class TwoEnds(RuleBasedStateMachine):
    """Both ends say anything that is allowed; bytes arrive later, in pieces. What arrives is what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = joined()
        self.wires = (bytearray(), bytearray())  # towards Alice, towards Bob
        self.said: tuple[list[LinkEvent], list[LinkEvent]] = (
            [],
            [],
        )  # that Alice must hear, that Bob must hear
        self.heard: tuple[list[LinkEvent], list[LinkEvent]] = ([], [])
        self.next_stream = [1, 2]
        self.stripes: dict[tuple[int, int], int] = {}  # (receiver, stream): next sequence
        self.left: set[tuple[int, int]] = set()  # streams that this end has ended

    def say(self, speaker: int, data: bytes, *events: LinkEvent) -> None:
        self.wires[1 - speaker].extend(data)
        self.said[1 - speaker].extend(events)

    def new_stream(self, end: int) -> int:
        self.next_stream[end] += 2
        return self.next_stream[end] - 2

    @rule(end=st.integers(0, 1), sequence=st.integers(0, 9))
    def open_stripe(self, end: int, sequence: int) -> None:
        stream = self.new_stream(end)
        self.stripes[end, stream] = sequence
        opened = StreamOpened(stream, *STRIPE, sequence)
        self.say(end, self.ends[end].tell(opened), opened)

    @rule(end=st.integers(0, 1), frames=FRAMES)
    def open_repair(self, end: int, frames: list[FrameId]) -> None:
        wanted = FramesWanted(self.new_stream(end), FORM, tuple(frames))
        self.say(end, self.ends[end].tell(wanted), wanted)

    @rule(end=st.integers(0, 1), stream=st.integers(1, 12), frames=FRAMES)
    def want_more(self, end: int, stream: int, frames: list[FrameId]) -> None:
        if (
            stream < self.next_stream[end]
            and (end, stream) not in self.stripes
            and stream % 2 != end
        ):
            wanted = FramesWanted(stream, FORM, tuple(frames))
            data = self.ends[end].tell(wanted)
            if data:
                self.say(end, data, wanted)

    @rule(end=st.integers(0, 1), frames=FRAMES)
    def tell(self, end: int, frames: list[FrameId]) -> None:
        for message in (FramesHeld(FORM, runs_of(frames)), FramesCancelled(FORM, tuple(frames))):
            self.say(end, self.ends[end].tell(message), message)

    @rule(end=st.integers(0, 1), choice=st.integers(0, 50), frame=FRAMES, payload=PAYLOADS)
    def send_frame(
        self, end: int, choice: int, frame: list[FrameId], payload: bytes | None
    ) -> None:
        streams = [
            stream for stream in range(1, max(self.next_stream)) if self.ends[end].serves(stream)
        ]
        if not streams:
            return
        stream = streams[choice % len(streams)]
        sequence = self.stripes.get((1 - end, stream), 0)
        if (1 - end, stream) in self.stripes:
            self.stripes[1 - end, stream] += 1
        view = None if payload is None else memoryview(payload)
        data = wire(self.ends[end].send_frame(stream, frame[0], sequence, view))
        self.say(end, data, FrameReceived(stream, FORM, frame[0], sequence, view))

    @rule(end=st.integers(0, 1), stream=st.integers(1, 12))
    def end_stream(self, end: int, stream: int) -> None:
        data = self.ends[end].tell(StreamEnded(stream, "enough"))
        if data:
            self.left.add((end, stream))
            self.say(end, data, StreamEnded(stream, "enough"))

    @precondition(lambda self: any(self.wires))
    @rule(end=st.integers(0, 1), count=st.integers(1, 200))
    def deliver(self, end: int, count: int) -> None:
        data = bytes(self.wires[end][:count])
        del self.wires[end][:count]
        self.heard[end].extend(feed(self.ends[end], data))
        self.wires[1 - end].extend(self.ends[end].take_replies())

    @invariant()
    def both_are_sound(self) -> None:
        for end in self.ends:
            end.check()
            assert not end.ended

    def teardown(self) -> None:
        while any(self.wires):
            self.deliver(0, 1 << 20)
            self.deliver(1, 1 << 20)
        for end, other in (self.ends, self.ends[::-1]):
            assert end._asked.keys() == other._serving.keys()
        for index in (0, 1):
            due = [event for event in self.said[index] if not self.may_be_dropped(index, event)]
            assert is_within(due, self.heard[index])
            assert is_within(self.heard[index], self.said[index])

    def may_be_dropped(self, end: int, event: LinkEvent) -> bool:
        kinds = FrameReceived | FramesWanted | StreamEnded
        return isinstance(event, kinds) and (end, event.stream) in self.left


def is_within(some: list[LinkEvent], others: list[LinkEvent]) -> bool:
    """Whether `some` come in this order among the others."""
    rest = iter(others)
    return all(event in rest for event in some)


TwoEnds.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_two_ends = TwoEnds.TestCase
