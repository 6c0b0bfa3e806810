"""Any files, any cut into segments, messages in any order: the receiver ends with the manifest of the sender."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import SegmentId, is_table
from echo2d.core.weights.form import SegmentTable, decode_record, frame_layout
from echo2d.core.weights.manifest import Manifest, chunk_layout
from echo2d.core.weights.signed_index import Root
from echo2d.core.weights.verifier import FormIndex
from echo2d.errors import IntegrityFault
from tests.support.encodings import BuiltForm, build_form, facts

names = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)
bodies = st.binary(min_size=1, max_size=30) | st.builds(
    bytes.__mul__, st.binary(min_size=1, max_size=9), st.just(20_000)
)


@st.composite
def forms(draw: st.DrawFn) -> tuple[BuiltForm, dict[str, bytes], dict[str, bytes]]:
    """A form, the bytes it encodes, and the bytes of its base."""
    contents = {f"{name:02d}.txt": draw(bodies) for name in draw(names)}
    base = {
        path: body if draw(st.booleans()) else bytes(len(body)) for path, body in contents.items()
    }
    kind = draw(st.sampled_from(["full", "delta"]))
    segment_bytes = draw(st.integers(1, 200_000))
    made = build_form(
        facts(kind),  # type: ignore[arg-type]
        contents,
        base=base if kind == "delta" else None,
        segment_bytes=segment_bytes,
    )
    return made, contents, base


@given(forms())
def test_frames_cover_each_segment_exactly(
    made: tuple[BuiltForm, dict[str, bytes], dict[str, bytes]],
) -> None:
    form = made[0]
    for segment in form.segments:
        position = 0
        for index, (span, payload) in enumerate(segment.frames(form.facts.frame_bytes), 1):
            assert (span.offset_in_segment, len(payload), span.frame & 0xFFFFF) == (
                position,
                span.length,
                index,
            )
            assert not is_table(span.frame)
            position += span.length
        assert position == segment.table.wire_bytes
        assert SegmentTable.decode(segment.table.encode()) == segment.table


@given(forms())
def test_decoding_gives_the_files_back(
    made: tuple[BuiltForm, dict[str, bytes], dict[str, bytes]],
) -> None:
    form, contents, base = made
    digests = []
    for segment in form.segments:
        for record, payload in zip(segment.table.records, segment.payloads, strict=True):
            path = form.manifest.chunks[record.chunk].path
            old = base[path] if form.facts.kind == "delta" else None
            decoded = decode_record(record, payload, len(contents[path]), old)
            assert decoded == contents[path]
            digests.append(digest_of(decoded))
    assert Manifest(form.manifest.files, tuple(digests)).digest == form.manifest.digest


@given(made=forms(), data=st.data())
def test_damaged_tables_and_roots_raise_only_integrity_faults(
    made: tuple[BuiltForm, dict[str, bytes], dict[str, bytes]], data: st.DataObject
) -> None:
    for original in (
        made[0].segments[0].table.encode(),
        made[0].roots[-1].signing_bytes(),
        made[0].manifest.encode(),
    ):
        damaged = bytearray(original)
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
        for candidate in (bytes(damaged), cut):
            with contextlib.suppress(IntegrityFault):
                table = SegmentTable.decode(candidate)
                frame_layout(table, 1 << 16)
                chunk_layout(table.files)
            with contextlib.suppress(IntegrityFault):
                Root.decode(candidate)
            with contextlib.suppress(IntegrityFault):
                Manifest.decode(candidate)


class Receiver(RuleBasedStateMachine):
    """Roots, pages, tables and lies in any order."""

    @initialize(made=forms(), data=st.data())
    def begin(
        self, made: tuple[BuiltForm, dict[str, bytes], dict[str, bytes]], data: st.DataObject
    ) -> None:
        self.form = made[0]
        self.index = FormIndex(data.draw(st.sampled_from(self.form.roots)))

    @rule(data=st.data())
    def root(self, data: st.DataObject) -> None:
        self.index.accept_root(data.draw(st.sampled_from(self.form.roots)))

    @rule(data=st.data())
    def page(self, data: st.DataObject) -> None:
        """The true digests, unless false ones had been claimed before: then all claims fall."""
        start = data.draw(st.integers(0, len(self.form.digests)))
        with contextlib.suppress(IntegrityFault):
            self.index.accept_page(
                SegmentId(start), self.form.digests[start : start + data.draw(st.integers(0, 5))]
            )

    @rule(start=st.integers(0, 12), lie=st.binary(max_size=2))
    def false_page(self, start: int, lie: bytes) -> None:
        with contextlib.suppress(IntegrityFault):
            self.index.accept_page(SegmentId(start), [digest_of(lie)])

    @precondition(lambda self: self.index.table_digest(SegmentId(0)) is not None)
    @rule(data=st.data())
    def table(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(self.form.segments)).table
        if self.index.table_digest(segment.segment) is not None:
            self.index.accept_table(segment.segment, segment.encode())

    @invariant()
    def nothing_false_is_believed(self) -> None:
        self.index.check()
        for position, digest in enumerate(self.form.digests):
            assert self.index.table_digest(SegmentId(position)) in (None, digest)

    def teardown(self) -> None:
        """From any state, the true messages complete the form."""
        if not hasattr(self, "index"):
            return
        self.index.accept_root(self.form.roots[-1])
        for start in range(0, len(self.form.digests), 5):
            with contextlib.suppress(IntegrityFault):
                self.index.accept_page(SegmentId(start), self.form.digests[start : start + 5])
        self.index.accept_page(SegmentId(0), self.form.digests)
        for segment in self.form.segments:
            self.index.accept_table(segment.table.segment, segment.table.encode())
        self.index.check()
        assert self.index.manifest() == self.form.manifest
        assert self.index.table(SegmentId(0)) == self.form.segments[0].table


TestReceiver = Receiver.TestCase
