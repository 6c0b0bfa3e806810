"""What one peer holds of every form: what may be believed about it (`FormIndex`) and its verified frames on disk.

Everything that arrives is judged here before anybody else hears of it; disk and long hashing happen in threads. A form
can be used from many tasks; forgetting one waits for its users. When the disk is full, spare files make room, then
older forms, but for that of the version being served; when that is not enough, the form that wanted the space is given
up (`fail`) and nothing else is lost. A frame that turns out damaged when it is read is not held any more, and comes
again.
Not here: links, slots, and the signatures of roots (the caller's).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import (
    ChunkId,
    FormId,
    FrameId,
    SegmentId,
    Version,
    frame_id,
    is_table,
    segment_of,
)
from echo2d.core.protocol.control_messages import SegmentPage, SegmentsWanted
from echo2d.core.relay import events as relay_events
from echo2d.core.weights.signed_index import Root
from echo2d.core.weights.verifier import FormIndex
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.runtime.peer.base_model import BaseModel
from echo2d.runtime.peer.frame_cache import FrameCache
from echo2d.runtime.peer.lost_frames import LostFrames
from echo2d.runtime.peer.write_behind import Frames, WriteBehind
from echo2d.store.frames import FramesDamaged, FrameStore

DROPPED_MAX = 64  # forms remembered as not wanted, so that their late frames are dropped at once
LOST_WAIT_S = 2.0  # for a damaged frame to come again before those that wait for it ask elsewhere
AT_ONCE_BYTES_MAX = 256 << 10  # hashed without another thread: 40 us, less than the change takes

T = TypeVar("T")

log = logging.getLogger("echo2d.peer")


class FrameHoldings:
    """`emit` takes relay events; `ask` sends SegmentsWanted; `fail(form, reason)` is told of forms given up.

    `serving`: the version whose frames do not make room for others. `base`: where chunks of a form may stand, too.
    """

    def __init__(
        self,
        store: FrameStore,
        *,
        emit: Callable[[relay_events.RelayEvent], None],
        ask: Callable[[SegmentsWanted], None],
        fail: Callable[[FormId, str], None],
        serving: Callable[[], Version | None],
        base: Callable[[FormId], BaseModel | None],
    ) -> None:
        self._store, self._emit, self._ask, self._fail = store, emit, ask, fail
        self._serving, self._base = serving, base
        self._indexes: dict[FormId, FormIndex] = {}
        self._held: dict[FormId, set[FrameId]] = {}
        self._payload_bytes: dict[FormId, int] = {}
        self._duplicates: dict[FormId, int] = {}
        self._recovered = {facts.form: frozenset[FrameId]() for facts in store.forms()}
        self._unread = set(self._recovered)  # on disk since before the start, not yet looked at
        self._complete: set[FormId] = set()
        self._first_searched: set[FormId] = set()  # their first segment was looked for in the base
        self._searched: set[FormId] = set()
        self._damage = LostFrames(emit, fail)
        self._pages_asked: dict[FormId, SegmentId] = {}
        self._users: dict[FormId, int] = {}
        self._storing: set[tuple[FormId, FrameId]] = set()
        self._dropped: dict[FormId, None] = {}
        self._deleted = 0  # forms so far: what found the disk full may try again
        self._unwritten = WriteBehind(self._write)
        self._recent = FrameCache()
        self._books = asyncio.Lock()  # roots, pages and forgetting are taken one after the other
        self._news = asyncio.Event()

    # --- what is known

    def index(self, form: FormId) -> FormIndex | None:
        return self._indexes.get(form)

    def held(self, form: FormId) -> Collection[FrameId]:
        """Tables and frames of the form that are verified and on disk."""
        return self._held.get(form, frozenset())

    def whole_forms(self) -> tuple[FormId, ...]:
        """Forms of which every frame is on disk."""
        return tuple(
            form
            for form, index in self._indexes.items()
            if index.complete and self._all_held(form, index)
        )

    def payload_bytes(self, form: FormId) -> int:
        """Payload of the form that is on disk."""
        return self._payload_bytes.get(form, 0)

    def duplicates(self, form: FormId) -> int:
        """Payload frames of the form that came although they were held."""
        return self._duplicates.get(form, 0)

    def knows(self, form: FormId, frame: FrameId) -> bool:
        """Whether the frame can be judged: a table by its signed digest, other frames by their table."""
        index = self._indexes.get(form)
        if index is None:
            return False
        segment = segment_of(frame)
        return (
            index.table_digest(segment) if is_table(frame) else index.table(segment)
        ) is not None

    def dropped(self, form: FormId) -> bool:
        """Whether the form was known and is not wanted any more."""
        return form in self._dropped

    async def changed(self) -> None:
        """Returns when something more is known or held than at the call, or a form is gone."""
        await self._news.wait()

    # --- what may be believed

    async def accept_root(self, root: Root) -> None:
        """A root that is signed and accepted; makes the form known."""
        await self._accept("root", root.form, lambda: self._take_root(root))

    async def accept_page(self, page: SegmentPage) -> None:
        """Answers SegmentsWanted; for unknown forms it is ignored."""
        await self._accept("page", page.form, lambda: self._take_page(page))

    def reconnected(self) -> None:
        """Pages asked for over an earlier control link do not come any more."""
        self._pages_asked.clear()
        for form, index in self._indexes.items():
            self._ask_page(form, index)

    async def _accept(
        self, what: str, form: FormId, take: Callable[[], Awaitable[FormIndex | None]]
    ) -> None:
        """Takes it; of what is signed now, some may be here already."""
        try:
            async with self._books:
                index = await take()
                if index is None:
                    return
                absorbed = await self._absorb(form, index)
            await self._search_base(form, index, absorbed)
        except IntegrityFault as fault:
            log.warning("%s refused form=%s reason=%s", what, form, fault)
        except StoreFault as fault:
            self._fail(form, str(fault))

    async def _take_root(self, root: Root) -> FormIndex:
        index = self._indexes.get(root.form)
        if index is None:
            return await self._begin(root)
        index.accept_root(root)
        return index

    async def _take_page(self, page: SegmentPage) -> FormIndex | None:
        self._pages_asked.pop(page.form, None)
        index = self._indexes.get(page.form)
        if index is not None:
            index.accept_page(page.start, page.digests)
        return index

    async def _begin(self, root: Root) -> FormIndex:
        form, index = root.form, FormIndex(root)
        self._dropped.pop(form, None)
        self._first_searched.discard(form)
        self._searched.discard(form)
        await asyncio.to_thread(self._store.begin, root.facts)
        if form in self._unread:
            self._unread.discard(form)
            self._recovered[form] = await asyncio.to_thread(self._store.recover, form)
        self._indexes[form] = index
        self._held[form] = set()
        self._payload_bytes[form] = self._duplicates[form] = 0
        return index

    async def _absorb(self, form: FormId, index: FormIndex) -> list[SegmentId]:
        """More digests are signed now: tables found on disk may prove right, and the form's end may be known.

        The segments whose tables did.
        """
        absorbed = []
        for segment in sorted({segment_of(frame) for frame in self._recovered.get(form, ())}):
            if index.table_digest(segment) is not None and index.table(segment) is None:
                await self._absorb_segment(form, index, segment)
                absorbed.append(segment)
        if index.totals is not None and form not in self._complete:
            self._complete.add(form)
            self._emit(relay_events.FormComplete(form, index.segment_count))
        self._ask_page(form, index)
        self._ring()
        return absorbed

    async def _absorb_segment(self, form: FormId, index: FormIndex, segment: SegmentId) -> None:
        try:
            index.accept_table(
                segment, await asyncio.to_thread(self._store.get_table, form, segment)
            )
        except IntegrityFault:
            return  # left over from another encoding: it is fetched anew
        if form not in self._held:
            return  # given up meanwhile
        found = tuple(
            sorted(frame for frame in self._recovered[form] if segment_of(frame) == segment)
        )
        self._held[form].update(found)
        self._payload_bytes[form] += sum(
            index.length(frame) or 0 for frame in found if not is_table(frame)
        )
        self._emit(relay_events.TableHeld(form, segment, frame_sizes(index, segment)))
        self._emit(relay_events.FramesFound(form, found))

    async def _search_base(
        self, form: FormId, index: FormIndex, segments: Iterable[SegmentId]
    ) -> None:
        """Frames of these segments that can be made here need not come over a link. Not while holding the books."""
        base = self._base(form) if index.facts.kind == "full" else None
        for segment in segments:
            if base is not None:
                await self._make_frames(form, index, segment, base)
            if segment == 0:
                self._first_searched.add(form)
        self._note_searched(form, index)

    async def _make_frames(
        self, form: FormId, index: FormIndex, segment: SegmentId, base: BaseModel
    ) -> None:
        found = 0
        chunks = base.frames(index, segment, missing=self._missing(form, index, segment))
        while (frames := await asyncio.to_thread(next, chunks, None)) is not None:
            bad = await self.put_frames(form, frames)
            good = tuple(frame for frame, _ in frames if frame not in bad)
            found += len(good)
            self._emit(relay_events.FramesFound(form, good))
        if found:
            log.info(
                "found in the base model version=%d segment=%d frames=%d",
                index.facts.version,
                segment,
                found,
            )

    def _missing(self, form: FormId, index: FormIndex, segment: SegmentId) -> set[ChunkId]:
        """Chunks of which not all frames are held."""
        held = self.held(form)
        return {span.chunk for span in index.spans(segment) if span.frame not in held}

    def _note_searched(self, form: FormId, index: FormIndex) -> None:
        """Says once that what was here has been told: all found on disk was judged, the first segment looked for."""
        unjudged = bool(self._recovered.get(form)) and index.missing_segment() is not None
        unread = (
            form not in self._first_searched
            and self._base(form) is not None
            and index.facts.kind == "full"
        )
        if form in self._indexes and form not in self._searched and not unjudged and not unread:
            self._searched.add(form)
            self._emit(relay_events.FormSearched(form))

    def _ask_page(self, form: FormId, index: FormIndex) -> None:
        start = index.missing_segment()
        if start is not None and self._pages_asked.get(form) != start:
            self._pages_asked[form] = start
            self._ask(SegmentsWanted(form, start))

    # --- frames that arrive

    async def put_table(self, form: FormId, segment: SegmentId, data: bytes) -> None:
        """Store the table of a segment whose digest is signed. IntegrityFault: these are not its bytes."""
        index, table = self._known(form), frame_id(segment, 0)
        if digest_of(data) != index.table_digest(segment):
            raise IntegrityFault(f"the table of segment {segment} has the wrong digest")
        async with self._storing_alone(form, {table}):
            if table in self.held(form):
                return
            try:
                index.accept_table(segment, data)
            except IntegrityFault as fault:  # signed, and yet wrong: no peer is to blame
                raise StoreFault(f"form {form} cannot be used: {fault}") from fault
            await self.with_room(form, lambda: self._store.put_table(form, segment, data))
            self._hold(form, table, memoryview(data))
        self._emit(relay_events.TableHeld(form, segment, frame_sizes(index, segment)))
        await self._search_base(form, index, [segment])

    async def put_frames(
        self, form: FormId, frames: Sequence[tuple[FrameId, memoryview]]
    ) -> set[FrameId]:
        """Verify and store payload frames of known segments; returns those that are not what was promised."""
        index = self._known(form)
        async with self._storing_alone(form, {frame for frame, _ in frames}):
            fresh = {frame: payload for frame, payload in frames if frame not in self.held(form)}
            self._count_duplicates(form, len(frames) - len(fresh))
            bad = await self.with_room(form, lambda: _put(self._store, form, index, fresh))
            for frame, payload in fresh.items():
                if frame not in bad:
                    self._hold(form, frame, payload)
        return bad

    def takes_at_once(self, form: FormId, frame: FrameId, payload_bytes: int) -> bool:
        """Whether `put_at_once` may have this payload frame: short, of a known segment, and not coming twice."""
        return (
            payload_bytes <= AT_ONCE_BYTES_MAX
            and not is_table(frame)
            and (form, frame) not in self._storing
            and self.knows(form, frame)
            and self._unwritten.has_room
        )

    def put_at_once(self, form: FormId, frame: FrameId, payload: memoryview) -> bool:
        """Verify a frame that `takes_at_once`, and hold it; it is written soon. False: not what was promised."""
        if frame in self.held(form):
            self._count_duplicates(form, 1)
            return True
        span = self._known(form).span(frame)
        if span is None or not span.is_made_of(payload):
            log.warning("frame refused form=%s frame=%d", form, frame)
            return False
        self._unwritten.put(form, span, payload)
        self._hold(form, frame, payload)
        return True

    def on_disk(self, form: FormId, frame: FrameId) -> bool:
        """Whether a table or frame is held and written; `changed` returns after it was."""
        return frame in self.held(form) and self._unwritten.get(form, frame) is None

    async def write_behind(self) -> None:
        """Writes what was put at once, until cancelled."""
        await self._unwritten.run()

    async def _write(self, form: FormId, frames: Frames) -> None:
        try:
            await self.with_room(form, lambda: self._store.put_verified(form, frames.values()))
        except StoreFault as fault:
            self._fail(form, str(fault))
        self._ring()

    @asynccontextmanager
    async def _storing_alone(self, form: FormId, frames: set[FrameId]) -> AsyncIterator[None]:
        """Nobody else stores any of these frames meanwhile: the same frame may come over two links at once."""
        mine = {(form, frame) for frame in frames}
        while not mine.isdisjoint(self._storing):
            await self.changed()
        self._storing |= mine
        try:
            yield
        finally:
            self._storing -= mine
            self._ring()

    async def with_room(self, form: FormId, store: Callable[[], T]) -> T:
        """Run it in a thread; when the disk is full, spare files make room, then forms older than this one in turn."""
        while True:
            freed = self._deleted + self._store.freed
            try:
                async with self.using(form):
                    return await asyncio.to_thread(store)
            except StoreFault as fault:
                if not fault.full:
                    raise
                async with self._books:  # a deletion under way makes room, too
                    await asyncio.to_thread(self._store.free_spares)
                    if self._deleted + self._store.freed != freed:
                        continue
                victim = self._oldest_before(form)
                if victim is None:
                    raise
                log.warning("frame store is full: forgetting form=%s for form=%s", victim, form)
                self._emit(relay_events.FormForgotten(victim))
                await self.forget(victim)

    def _oldest_before(self, form: FormId) -> FormId | None:
        mine, serving = self._known(form).facts, self._serving()
        older = (facts for facts in self._store.forms() if facts.publish_seq < mine.publish_seq)
        return next((facts.form for facts in older if facts.version != serving), None)

    # --- frames that are needed

    def in_memory(self, form: FormId, frame: FrameId) -> memoryview | None:
        """A frame that is held and need not be read."""
        return self._recent.get(form, frame) or self._unwritten.get(form, frame)

    async def load(self, form: FormId, frame: FrameId) -> memoryview:
        """A held frame. IntegrityFault or StoreFault: it is not to be had any more."""
        recent = self.in_memory(form, frame)
        if recent is not None:
            return recent
        async with self.using(form) as index:
            table, span = index.table(segment_of(frame)), index.span(frame)
            if is_table(frame) and table is not None:
                return memoryview(await asyncio.to_thread(table.encode))
            if span is None:
                raise StoreFault(f"frame {frame} of form {form} is not known")
            try:
                return memoryview(await asyncio.to_thread(self._store.get_frame, form, span))
            except FramesDamaged as fault:
                return await self._load_again(fault, frame, index)
            except StoreFault as fault:
                log.warning("%s", fault)
                return await self._load_again(FramesDamaged(form, [frame]), frame, index)

    async def _load_again(
        self, fault: FramesDamaged, frame: FrameId, index: FormIndex
    ) -> memoryview:
        """The frame, should it come again soon."""
        form = fault.form
        self.lose(fault)
        await self._search_base(form, index, [segment_of(frame)])
        try:
            async with asyncio.timeout(LOST_WAIT_S):
                while frame not in self.held(form):
                    await self.changed()
        except TimeoutError:
            raise fault from None
        return await self.load(form, frame)

    def lose(self, fault: FramesDamaged) -> None:
        """Frames that are not what they were: they are not held any more, and have to come again."""
        form, held = fault.form, self._held.get(fault.form, set())
        lost = tuple(frame for frame in fault.frames if frame in held)
        held.difference_update(lost)
        index = self._indexes.get(form)
        if not lost or index is None:
            return
        self._payload_bytes[form] -= sum(index.length(frame) or 0 for frame in lost)
        self._damage.note(form, lost)

    @asynccontextmanager
    async def using(self, form: FormId) -> AsyncIterator[FormIndex]:
        """The form is not deleted meanwhile. StoreFault: it is gone."""
        index = self._known(form)
        self._users[form] = self._users.get(form, 0) + 1
        try:
            yield index
        finally:
            self._users[form] -= 1
            self._ring()

    def give_up(self, form: FormId) -> bool:
        """From now on the form is unknown, until a new root of it comes. False: it was so already."""
        self._held.pop(form, None)
        self._payload_bytes.pop(form, None)
        self._duplicates.pop(form, None)
        self._unwritten.drop(form)
        fresh = form not in self._dropped
        self._dropped[form] = None
        keep_newest(self._dropped, DROPPED_MAX)
        self._ring()
        return self._indexes.pop(form, None) is not None or fresh

    async def forget(self, form: FormId) -> None:
        """Give the form up, and delete it once nobody uses it."""
        self.give_up(form)
        self._complete.discard(form)
        self._first_searched.discard(form)
        self._searched.discard(form)
        self._pages_asked.pop(form, None)
        self._recovered.pop(form, None)
        self._damage.forget(form)
        self._recent.forget(form)
        self._ring()
        while self._users.get(form):
            await self.changed()
        self._users.pop(form, None)
        async with self._books:
            self._unread.discard(form)
            if form not in self._indexes:
                await asyncio.to_thread(self._store.forget, form)
                self._deleted += 1

    # --- inside

    def _known(self, form: FormId) -> FormIndex:
        index = self._indexes.get(form)
        if index is None:
            raise StoreFault(f"form {form} was dropped")
        return index

    def _hold(self, form: FormId, frame: FrameId, payload: memoryview) -> None:
        if form not in self._held:
            return  # forgotten meanwhile
        if frame not in self._held[form]:
            self._held[form].add(frame)
            self._payload_bytes[form] += 0 if is_table(frame) else len(payload)
        self._recent.put(form, frame, payload)

    def _count_duplicates(self, form: FormId, frames: int) -> None:
        if form in self._duplicates:
            self._duplicates[form] += frames

    def _all_held(self, form: FormId, index: FormIndex) -> bool:
        payloads = sum(
            len(index.spans(SegmentId(segment))) for segment in range(index.segment_count)
        )
        return len(self._held[form]) == payloads + index.segment_count

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def frame_sizes(index: FormIndex, segment: SegmentId) -> tuple[int, ...]:
    """The sizes of a known segment's payload frames 1, 2, ..."""
    return tuple(span.length for span in index.spans(segment))


def _put(
    store: FrameStore, form: FormId, index: FormIndex, frames: dict[FrameId, memoryview]
) -> set[FrameId]:
    good, bad = [], set()
    for frame, payload in frames.items():
        span = index.span(frame)
        if span is not None and span.is_made_of(payload):
            good.append((span, payload))
        else:
            log.warning("frame refused form=%s frame=%d", form, frame)
            bad.add(frame)
    store.put_verified(form, good)
    return bad
