"""Holds the frames of every form at one peer: verifies, stores and loads them.

Tables and frames are verified before they are reported. Tables and long frames are on disk before they
are held. A short frame is held in memory at once and written a moment later (`write_behind`), so it can
be sent and reported before it is on disk. If writing it fails, its form is given up. If the process ends
before the frame is written, the frame must be received again after the restart.

Disk access and long hashing happen in threads. Several tasks can use a form at the same time; deleting
the form waits for them. When the disk is full, spare files are deleted, then older forms, except the form
of the version being served. If that is not enough, the form that needed the space is given up
(`give_up`). If a frame turns out to be damaged when it is read, it is no longer held, and must be received
again.

Not here: links, slots, and checking the signatures of roots (the caller checks them).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import (
    FormId,
    FrameId,
    SegmentId,
    Version,
    frame_id,
    is_table,
    segment_of,
)
from echo2d.core.protocol.control_messages import SegmentPage, SegmentsWanted, TransferReport
from echo2d.core.relay import events as relay_events
from echo2d.core.weights.signed_index import Root
from echo2d.core.weights.verifier import FormIndex
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.logs import say
from echo2d.runtime.peer.base_model import BaseModel
from echo2d.runtime.peer.held_form import HeldForm
from echo2d.runtime.peer.write_behind import Frames, WriteBehind
from echo2d.store.frames import FramesDamaged, FrameStore

# A form that has lost more frames than this is given up: the disk seems to damage all that is written.
LOST_FRAMES_MAX = 256
# A damaged frame has this long to arrive again. Then the peers that wait for it must ask another peer.
LOST_WAIT_S = 2.0

T = TypeVar("T")

log = logging.getLogger("echo2d.peer")


class HoldingsOwner(Protocol):
    """The process that holds the forms."""

    def emit(self, event: relay_events.RelayEvent) -> None:
        """Queue an event for the relay."""

    def tell(self, message: SegmentsWanted | TransferReport) -> None:
        """Send a message over the control link."""

    def fail(self, form: FormId, reason: str) -> None:
        """Take note that the form was given up, because its frames cannot be kept here."""

    def serving_version(self) -> Version | None:
        """The version that the engines serve. Its frames are kept even when the disk is full."""

    def base_of(self, form: FormId) -> BaseModel | None:
        """The directories that may have chunks of the form. None: there are none."""


class FrameHoldings:
    """See the module docstring."""

    def __init__(
        self,
        store: FrameStore,
        owner: HoldingsOwner,
    ) -> None:
        self._store, self._owner, self._emit = store, owner, owner.emit
        self._forms: dict[FormId, HeldForm] = {}
        # The frames of each form that were on disk when the process started. None: not looked at yet.
        self._found: dict[FormId, frozenset[FrameId] | None] = {
            facts.form: None for facts in store.forms()
        }
        self._users: dict[FormId, int] = {}
        self._storing: set[tuple[FormId, FrameId]] = set()
        self._dropped: dict[FormId, None] = {}
        # Forms deleted so far. If it has changed, a write that found the disk full is tried again.
        self._deleted = 0
        self._unwritten = WriteBehind(self._write)
        self._recent = _RecentFrames()
        # Held while a root or page is accepted, or a form is deleted.
        self._books = asyncio.Lock()
        self._news = asyncio.Event()

    # --- what is held

    def index(self, form: FormId) -> FormIndex | None:
        here = self._forms.get(form)
        return None if here is None else here.index

    def held(self, form: FormId) -> Collection[FrameId]:
        """The tables and frames of the form that are held. Some may not be on disk yet (see `on_disk`)."""
        here = self._forms.get(form)
        return frozenset() if here is None else here.frames

    def whole_forms(self) -> tuple[FormId, ...]:
        """The forms of which every table and frame is held."""
        return tuple(form for form, here in self._forms.items() if here.whole)

    def payload_bytes(self, form: FormId) -> int:
        """How many payload bytes of the form are held."""
        here = self._forms.get(form)
        return 0 if here is None else here.payload_bytes

    def duplicates(self, form: FormId) -> int:
        """How many payload frames of the form arrived although they were held already."""
        here = self._forms.get(form)
        return 0 if here is None else here.duplicates

    def knows(self, form: FormId, frame: FrameId) -> bool:
        """Whether the frame can be verified (see `HeldForm.knows`)."""
        here = self._forms.get(form)
        return here is not None and here.knows(frame)

    def dropped(self, form: FormId) -> bool:
        """Whether the form was known once, and has been dropped."""
        return form in self._dropped

    async def changed(self) -> None:
        """Wait until more is known, held or written than at the call, or a form is dropped."""
        await self._news.wait()

    def ring(self) -> None:
        """Wake all tasks that wait in `changed`."""
        self._news.set()
        self._news = asyncio.Event()

    # --- roots and pages of digests

    async def accept_root(self, root: Root) -> None:
        """Take a root whose signature was checked and accepted. It makes the form known."""
        await self._accept("root", root.form, lambda: self._take_root(root))

    async def accept_page(self, page: SegmentPage) -> None:
        """Take a page of digests, the answer to SegmentsWanted. A page of an unknown form is ignored."""
        await self._accept("page", page.form, lambda: self._take_page(page))

    def reconnected(self) -> None:
        """Ask for pages again, because the answers to earlier requests are lost with the old control link."""
        for here in self._forms.values():
            here.page_asked = None
            self._ask_page(here)

    async def _accept(
        self, what: str, form: FormId, take: Callable[[], Awaitable[HeldForm | None]]
    ) -> None:
        """Take a root or page, and the frames found on disk whose tables it makes verifiable."""
        try:
            async with self._books:
                here = await take()
                if here is None:
                    return
                absorbed = await self._absorb(here)
            await self._search_base(here, absorbed)
        except IntegrityFault as fault:
            log.warning("%s refused form=%s reason=%s", what, form, fault)
        except StoreFault as fault:
            self.give_up(form, str(fault))

    async def _take_root(self, root: Root) -> HeldForm:
        here = self._forms.get(root.form)
        if here is None:
            return await self._begin(root)
        here.index.accept_root(root)
        return here

    async def _take_page(self, page: SegmentPage) -> HeldForm | None:
        here = self._forms.get(page.form)
        if here is not None:
            here.page_asked = None
            here.index.accept_page(page.start, page.digests)
        return here

    async def _begin(self, root: Root) -> HeldForm:
        form, index = root.form, FormIndex(root)
        self._dropped.pop(form, None)
        await asyncio.to_thread(self._store.begin, root.facts)
        if form in self._found and self._found[form] is None:
            self._found[form] = await asyncio.to_thread(self._store.recover, form)
        here = self._forms[form] = HeldForm(index, self._found.get(form) or frozenset())
        return here

    async def _absorb(self, here: HeldForm) -> list[SegmentId]:
        """Hold the frames found on disk whose tables' digests are signed now; returns their segments.

        Also emits FormComplete once the form's end is signed.
        """
        absorbed = []
        for segment in sorted({segment_of(frame) for frame in here.found}):
            if here.knows(frame_id(segment, 0)) and here.index.table(segment) is None:
                await self._absorb_segment(here, segment)
                absorbed.append(segment)
        if here.index.totals is not None and not here.end_told:
            here.end_told = True
            self._emit(relay_events.FormComplete(here.form, here.index.segment_count))
        self._ask_page(here)
        self.ring()
        return absorbed

    async def _absorb_segment(self, here: HeldForm, segment: SegmentId) -> None:
        try:
            table = await asyncio.to_thread(self._store.get_table, here.form, segment)
            here.index.accept_table(segment, table)
        except IntegrityFault:
            return  # the table on disk is of another form; the segment is received again
        if not self._is_current(here):
            return  # the form was given up meanwhile
        found = tuple(sorted(frame for frame in here.found if segment_of(frame) == segment))
        here.hold_found(found)
        self._emit(relay_events.TableHeld(here.form, segment, here.frame_sizes(segment)))
        self._emit(relay_events.FramesFound(here.form, found))

    async def _search_base(self, here: HeldForm, segments: Iterable[SegmentId]) -> None:
        """Make the frames of these segments that the base model's chunks give, so that no peer sends them.

        Do not await it while holding `_books`.
        """
        base = self._owner.base_of(here.form) if here.index.facts.kind == "full" else None
        for segment in segments:
            if base is not None:
                await self._make_frames(here, segment, base)
            if segment == 0:
                here.first_searched = True
        self._note_searched(here)

    async def _make_frames(self, here: HeldForm, segment: SegmentId, base: BaseModel) -> None:
        found, form, index = 0, here.form, here.index
        chunks = base.frames(index, segment, missing=here.missing_chunks(segment))
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

    def _note_searched(self, here: HeldForm) -> None:
        """Emit FormSearched once all frames found on disk were judged and the base was searched."""
        index = here.index
        unjudged = bool(here.found) and index.missing_segment() is not None
        unread = (
            not here.first_searched
            and index.facts.kind == "full"
            and self._owner.base_of(here.form) is not None
        )
        if self._is_current(here) and not here.searched and not unjudged and not unread:
            here.searched = True
            self._emit(relay_events.FormSearched(here.form))

    def _ask_page(self, here: HeldForm) -> None:
        start = here.index.missing_segment()
        if start is not None and here.page_asked != start:
            here.page_asked = start
            self._owner.tell(SegmentsWanted(here.form, start))

    # --- frames that arrive

    async def put_table(self, form: FormId, segment: SegmentId, data: bytes) -> None:
        """Store the table of a segment, whose digest is signed.

        IntegrityFault: the data do not have that digest.
        """
        here, table = self._known(form), frame_id(segment, 0)
        if digest_of(data) != here.index.table_digest(segment):
            raise IntegrityFault(f"the table of segment {segment} has the wrong digest")
        async with self._storing_alone(form, {table}):
            if table in self.held(form):
                return
            try:
                here.index.accept_table(segment, data)
            except IntegrityFault as fault:
                # The table is signed but malformed, so no peer is to blame.
                raise StoreFault(f"form {form} cannot be used: {fault}") from fault
            await self.with_room(form, lambda: self._store.put_table(form, segment, data))
            self._hold(form, table, memoryview(data))
        self._emit(relay_events.TableHeld(form, segment, here.frame_sizes(segment)))
        await self._search_base(here, [segment])

    async def put_frames(
        self, form: FormId, frames: Sequence[tuple[FrameId, memoryview]]
    ) -> set[FrameId]:
        """Verify and store payload frames of known segments; returns those that are bad."""
        index = self._known(form).index
        async with self._storing_alone(form, {frame for frame, _ in frames}):
            fresh = {frame: payload for frame, payload in frames if frame not in self.held(form)}
            self._count_duplicates(form, len(frames) - len(fresh))
            bad = await self.with_room(form, lambda: _put(self._store, form, index, fresh))
            for frame, payload in fresh.items():
                if frame not in bad:
                    self._hold(form, frame, payload)
        return bad

    def takes_at_once(self, form: FormId, frame: FrameId, payload_bytes: int) -> bool:
        """Whether `put_at_once` can take this payload frame: it is short and can be verified."""
        # Hashing 256 KiB takes 40 us, which is less than a change of threads takes.
        return (
            payload_bytes <= 256 << 10
            and not is_table(frame)
            and (form, frame) not in self._storing
            and self.knows(form, frame)
            and self._unwritten.has_room
        )

    def put_at_once(self, form: FormId, frame: FrameId, payload: memoryview) -> bool:
        """Verify and hold a frame that `takes_at_once` has accepted; it is written soon.

        False: the payload is not what the frame's table says.
        """
        if frame in self.held(form):
            self._count_duplicates(form, 1)
            return True
        span = self._known(form).index.span(frame)
        if span is None or not span.is_made_of(payload):
            log.warning("frame refused form=%s frame=%d", form, frame)
            return False
        self._unwritten.put(form, span, payload)
        self._hold(form, frame, payload)
        return True

    def on_disk(self, form: FormId, frame: FrameId) -> bool:
        """Whether a table or frame is held and on disk. `changed` returns after each write."""
        return frame in self.held(form) and self._unwritten.get(form, frame) is None

    async def write_behind(self) -> None:
        """Write the frames that `put_at_once` took, until cancelled."""
        await self._unwritten.run()

    async def _write(self, form: FormId, frames: Frames) -> None:
        try:
            await self.with_room(form, lambda: self._store.put_verified(form, frames.values()))
        except StoreFault as fault:
            self.give_up(form, str(fault))
        self.ring()

    @asynccontextmanager
    async def _storing_alone(self, form: FormId, frames: set[FrameId]) -> AsyncIterator[None]:
        """Keep other tasks from storing these frames meanwhile: a frame may arrive over two links at once."""
        mine = {(form, frame) for frame in frames}
        while not mine.isdisjoint(self._storing):
            await self.changed()
        self._storing |= mine
        try:
            yield
        finally:
            self._storing -= mine
            self.ring()

    async def with_room(self, form: FormId, store: Callable[[], T]) -> T:
        """Call `store` in a thread. While the disk is full, delete spare files, then older forms, and call it again."""
        while True:
            freed = self._deleted + self._store.freed
            try:
                async with self.using(form):
                    return await asyncio.to_thread(store)
            except StoreFault as fault:
                if not fault.full:
                    raise
                # Wait for a deletion that is under way: it makes room, too.
                async with self._books:
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
        mine, serving = self._known(form).index.facts, self._owner.serving_version()
        older = (facts for facts in self._store.forms() if facts.publish_seq < mine.publish_seq)
        return next((facts.form for facts in older if facts.version != serving), None)

    # --- frames that are needed

    def in_memory(self, form: FormId, frame: FrameId) -> memoryview | None:
        """The frame, if it is held in memory."""
        return self._recent.get(form, frame) or self._unwritten.get(form, frame)

    async def load(self, form: FormId, frame: FrameId) -> memoryview:
        """The payload of a held frame. IntegrityFault, StoreFault: it cannot be read, and did not arrive again."""
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
                return await self._load_again(fault, frame)
            except StoreFault as fault:
                log.warning("%s", fault)
                return await self._load_again(FramesDamaged(form, [frame]), frame)

    async def _load_again(self, fault: FramesDamaged, frame: FrameId) -> memoryview:
        """Wait for a damaged frame to arrive again, and load it. Raises `fault` after LOST_WAIT_S."""
        form = fault.form
        self.lose(fault)
        await self._search_base(self._known(form), [segment_of(frame)])
        try:
            async with asyncio.timeout(LOST_WAIT_S):
                while frame not in self.held(form):
                    await self.changed()
        except TimeoutError:
            raise fault from None
        return await self.load(form, frame)

    def lose(self, fault: FramesDamaged) -> None:
        """Hold the damaged frames no longer: they must be received again. Too many of them: give the form up."""
        form, here = fault.form, self._forms.get(fault.form)
        lost = () if here is None else here.lose(fault.frames)
        if here is None or not lost:
            return
        log.warning("frames damaged on disk form=%s frames=%s", form, lost)
        if here.lost > LOST_FRAMES_MAX:
            self.give_up(form, f"this disk damages what is written to it: {here.lost} frames")
        else:
            self._emit(relay_events.FramesLost(form, lost))

    @asynccontextmanager
    async def using(self, form: FormId) -> AsyncIterator[FormIndex]:
        """Keep the form from being deleted while the block runs. StoreFault: it was dropped already."""
        index = self._known(form).index
        self._users[form] = self._users.get(form, 0) + 1
        try:
            yield index
        finally:
            self._users[form] -= 1
            self.ring()

    def give_up(self, form: FormId, reason: str) -> None:
        """Drop a form that cannot be kept. The owner is told only once, however many of its frames wait."""
        if self.drop(form):
            log.warning("form given up form=%s reason=%s", form, reason)
            self._owner.fail(form, reason)

    def drop(self, form: FormId) -> bool:
        """Make the form unknown until a new root of it arrives. False: it is unknown already."""
        self._unwritten.drop(form)
        fresh = form not in self._dropped
        self._dropped[form] = None
        # Late frames of the 64 forms that were dropped last are refused at once.
        keep_newest(self._dropped, 64)
        self.ring()
        return self._forms.pop(form, None) is not None or fresh

    async def forget(self, form: FormId) -> None:
        """Drop the form, and delete it when no task uses it any more."""
        self.drop(form)
        self._found.pop(form, None)
        self._recent.forget(form)
        while self._users.get(form):
            await self.changed()
        self._users.pop(form, None)
        async with self._books:
            if form not in self._forms:
                await asyncio.to_thread(self._store.forget, form)
                self._deleted += 1

    # --- inside

    def _known(self, form: FormId) -> HeldForm:
        here = self._forms.get(form)
        if here is None:
            raise StoreFault(f"form {form} was dropped")
        return here

    def _is_current(self, here: HeldForm) -> bool:
        """Whether this is still the record of the form. False: the form was dropped meanwhile."""
        return self._forms.get(here.form) is here

    def _hold(self, form: FormId, frame: FrameId, payload: memoryview) -> None:
        here = self._forms.get(form)
        if here is not None:
            is_first = not here.payload_bytes
            here.hold(frame, len(payload))
            if is_first and here.payload_bytes:
                say(log, logging.INFO, "first frame", form=form, version=here.index.facts.version)
            self._recent.put(form, frame, payload)

    def _count_duplicates(self, form: FormId, frames: int) -> None:
        here = self._forms.get(form)
        if here is not None:
            here.duplicates += frames


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


class _RecentFrames:
    """Keeps the newest 32 MiB of verified frames in memory, because they are forwarded soon."""

    def __init__(self) -> None:
        self._frames: dict[tuple[FormId, FrameId], memoryview] = {}
        self._bytes = 0

    def get(self, form: FormId, frame: FrameId) -> memoryview | None:
        return self._frames.get((form, frame))

    def put(self, form: FormId, frame: FrameId, payload: memoryview) -> None:
        if (form, frame) not in self._frames:
            self._frames[form, frame] = payload
            self._bytes += len(payload)
        # A home uplink sends 32 MiB in some seconds.
        while self._bytes > 32 << 20:
            self._drop(next(iter(self._frames)))

    def forget(self, form: FormId) -> None:
        for key in [key for key in self._frames if key[0] == form]:
            self._drop(key)

    def _drop(self, key: tuple[FormId, FrameId]) -> None:
        self._bytes -= len(self._frames.pop(key))
