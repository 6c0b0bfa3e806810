"""Small forms for tests: many small files make many small chunks, and segments of a few chunks each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import ChunkId, Digest, Epoch, PublishSeq, RunId, Version
from echo2d.core.weights.encoder import FormBuilder, RootWriter, Segment
from echo2d.core.weights.form import FRAME_BYTES_MIN, FormFacts, encode_record
from echo2d.core.weights.kept_deltas import FormKind
from echo2d.core.weights.manifest import FileEntry, Manifest, chunk_layout
from echo2d.core.weights.signed_index import Root

BASE_DIGEST = digest_of(b"the base snapshot")


def facts(kind: FormKind = "full", *, version: int = 7, publish_seq: int = 3) -> FormFacts:
    base: Digest | None = BASE_DIGEST if kind == "delta" else None
    return FormFacts(
        RunId("run"),
        Epoch(1),
        Version(version),
        PublishSeq(publish_seq),
        kind,
        base,
        FRAME_BYTES_MIN,
    )


@dataclass(frozen=True, slots=True)
class BuiltForm:
    """Everything a sender has of one form."""

    facts: FormFacts
    segments: Sequence[Segment]
    roots: Sequence[Root]
    manifest: Manifest

    @property
    def digests(self) -> list[Digest]:
        return [segment.table.digest for segment in self.segments]


def text_files(contents: Mapping[str, bytes]) -> tuple[FileEntry, ...]:
    """Entries of files that are not safetensors."""
    return tuple(FileEntry(path, len(contents[path]), 0) for path in sorted(contents))


def build_form(
    form_facts: FormFacts,
    contents: Mapping[str, bytes],
    *,
    base: Mapping[str, bytes] | None = None,
    segment_bytes: int = 256 << 10,
) -> BuiltForm:
    """Encode text files; with `base` (same names and sizes) as a delta. Each finished segment gets its own root."""
    files = text_files(contents)
    builder, writer = (
        FormBuilder(form_facts, files, segment_bytes=segment_bytes),
        RootWriter(form_facts),
    )
    segments: list[Segment] = []
    roots: list[Root] = []
    for position, chunk in enumerate(chunk_layout(files)):
        place = slice(chunk.offset, chunk.offset + chunk.length)
        old = None if base is None else base[chunk.path][place]
        full = builder.add(*encode_record(ChunkId(position), contents[chunk.path][place], old))
        builder.check()
        if full is not None:
            segments.append(full)
            writer.add(full.table.digest)
            roots += writer.take()
    segments.append(builder.finish())
    writer.add(segments[-1].table.digest)
    roots += writer.take(builder.totals())
    writer.check()
    return BuiltForm(form_facts, segments, roots, builder.manifest())
