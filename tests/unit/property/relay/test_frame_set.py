"""Any order of learning, asking and holding keeps a frame set in agreement with a plain model."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echo2d.core.base.ids import FrameId, PeerId, SegmentId, frame_id
from echo2d.core.relay.frame_set import FrameSet

SEGMENTS = 4
PEERS = [PeerId("a"), PeerId("b")]


class Books(RuleBasedStateMachine):
    """The model: sets of known, held and asked frames."""

    def __init__(self) -> None:
        super().__init__()
        self.transfer = FrameSet()
        self.sizes: dict[FrameId, int] = {}
        self.held: set[FrameId] = set()
        self.asked: dict[FrameId, tuple[PeerId, float]] = {}
        self.total: int | None = None

    @rule(segment=st.integers(0, SEGMENTS - 1), sizes=st.lists(st.integers(1, 9), max_size=5))
    def learn(self, segment: int, sizes: list[int]) -> None:
        table = frame_id(SegmentId(segment), 0)
        assert self.transfer.learn(SegmentId(segment), sizes) == (table not in self.held)
        if table not in self.held:
            self.sizes.update(
                {frame_id(SegmentId(segment), i): size for i, size in enumerate([0, *sizes])}
            )
            self.held.add(table)
            self.asked.pop(table, None)

    @rule()
    def finish(self) -> None:
        self.transfer.finish(SEGMENTS)
        self.total = SEGMENTS

    @precondition(lambda self: bool(self.sizes))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        frame = data.draw(st.sampled_from(sorted(self.sizes)))
        assert self.transfer.hold(frame) == (frame not in self.held)
        self.held.add(frame)
        self.asked.pop(frame, None)

    @precondition(lambda self: any(True for _ in self.transfer.unasked()))
    @rule(data=st.data(), peer=st.sampled_from(PEERS), until=st.floats(0, 9))
    def ask(self, data: st.DataObject, peer: PeerId, until: float) -> None:
        frame = data.draw(st.sampled_from(list(self.transfer.unasked())))
        self.transfer.ask(frame, peer, until)
        self.asked[frame] = (peer, until)

    @rule(now=st.floats(0, 9))
    def give_back(self, now: float) -> None:
        late = self.transfer.overdue(now)
        assert dict(late) == {
            frame: peer for frame, (peer, until) in self.asked.items() if until <= now
        }
        for frame, peer in late:
            assert self.transfer.give_back(frame, peer)
            del self.asked[frame]

    @invariant()
    def books_agree(self) -> None:
        self.transfer.check()
        tables = {frame_id(SegmentId(segment), 0) for segment in range(self.total or 0)}
        missing = (set(self.sizes) | tables) - self.held
        assert set(self.transfer.unasked()) == missing - set(self.asked)
        assert self.transfer.missing_count == len(missing)
        assert self.transfer.complete == (self.total is not None and not missing)
        assert set(self.transfer.arrivals) == self.held
        assert self.transfer.held_bytes == sum(self.sizes[frame] for frame in self.held)
        assert all(set(self.transfer.asked_of(peer)) == self._asked_of(peer) for peer in PEERS)

    def _asked_of(self, peer: PeerId) -> set[FrameId]:
        return {frame for frame, (asked, _) in self.asked.items() if asked == peer}


Books.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestBooks = Books.TestCase
