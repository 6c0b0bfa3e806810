"""Damaged roots, tables, pages and token files: believed only if unchanged, or else an IntegrityFault."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from echo2d.core.base.ids import Digest, SegmentId
from echo2d.core.protocol.control_messages import TO_PEER, SegmentPage
from echo2d.core.weights.form import FormFacts, SegmentTable
from echo2d.core.weights.signed_index import Root
from echo2d.core.weights.verifier import FormIndex
from echo2d.errors import IntegrityFault, OperatorFault, PeerFault
from echo2d.net.security.auth import TokenFile, read_token_file, verify_root, write_token_file
from tests.support.encodings import BuiltForm, build_form, facts
from tests.support.fuzz import Fuzz, assert_bounded, damaged

TABLES_BYTES_MAX = 4 << 20  # what an index may keep of the small form here


@pytest.fixture(scope="module")
def built() -> BuiltForm:
    chance = random.Random(7)
    return build_form(facts(), {f"{name}.txt": chance.randbytes(60_000) for name in "abcdefghij"})


def decode_facts(data: bytes) -> bytes:
    return FormFacts.decode(data).encode()


def decode_root(data: bytes) -> bytes:
    return Root.decode(data).signing_bytes()


def decode_table(data: bytes) -> bytes:
    return SegmentTable.decode(data).encode()


def test_a_decoded_form_equals_the_sent_one(fuzz: Fuzz, built: BuiltForm) -> None:
    """One encoding per value: damaged bytes that still decode mean exactly themselves, so their digest tells."""
    kinds: list[tuple[Callable[[bytes], bytes], Sequence[bytes]]] = [
        (decode_facts, [built.facts.encode()]),
        (decode_root, [root.signing_bytes() for root in built.roots]),
        (decode_table, [segment.table.encode() for segment in built.segments]),
    ]
    for _ in fuzz.share(0.05):
        decode, sources = fuzz.rng.choice(kinds)
        wrong = damaged(fuzz.rng, fuzz.rng.choice(sources), sources)
        with suppress(IntegrityFault):
            assert decode(wrong) == wrong


def test_a_root_without_a_valid_signature_is_refused(fuzz: Fuzz, built: BuiltForm) -> None:
    for _ in fuzz.share(0.005):
        root = fuzz.rng.choice(built.roots).signing_bytes()
        with pytest.raises(IntegrityFault):
            verify_root(
                fuzz.rng.randbytes(32),
                damaged(fuzz.rng, root),
                fuzz.rng.randbytes(fuzz.rng.choice((0, 64))),
            )


def test_an_index_accepts_only_right_entries(fuzz: Fuzz, built: BuiltForm) -> None:
    """Signed roots of this form in any order, pages and tables that are right, damaged or somebody else's."""
    index, rng, count = FormIndex(built.roots[0]), fuzz.rng, len(built.segments)
    for number in fuzz.share(0.05):
        with suppress(IntegrityFault, PeerFault):
            match rng.randrange(4):
                case 0:
                    index.accept_root(rng.choice(built.roots))
                case 1:
                    feed_page(index, built, rng)
                case 2:
                    data = rng.choice(built.segments).table.encode()
                    index.accept_table(SegmentId(rng.randrange(count + 2)), damaged(rng, data))
                case _ if rng.random() < 0.1:
                    segment = rng.randrange(count)
                    index.accept_table(SegmentId(segment), built.segments[segment].table.encode())
        index.check()
        if index.complete:
            assert index.manifest() == built.manifest
        if number % 100 == 99:
            assert_bounded(index, items_max=TABLES_BYTES_MAX, total_max=TABLES_BYTES_MAX)
            index = FormIndex(rng.choice(built.roots))


def feed_page(index: FormIndex, built: BuiltForm, rng: random.Random) -> None:
    start = rng.randrange(len(built.segments))
    digests = [
        digest if rng.random() < 0.9 else Digest(rng.randbytes(32))
        for digest in built.digests[start:]
    ]
    data = TO_PEER.encode(SegmentPage(built.facts.form, SegmentId(start), tuple(digests)))
    page = TO_PEER.decode(damaged(rng, data) if rng.random() < 0.3 else data)
    if isinstance(page, SegmentPage):
        index.accept_page(page.start, page.digests)


def test_a_damaged_token_file_is_refused_or_unchanged(fuzz: Fuzz, tmp_path: Path) -> None:
    path, token = (
        tmp_path / "t",
        TokenFile("box", "worker", "secret", "ab" * 32, "http://127.0.0.1:1"),
    )
    write_token_file(path, token)
    right, read = path.read_bytes(), 0
    for _ in fuzz.share(0.025):
        path.write_bytes(damaged(fuzz.rng, right, [b'"role": "learner"', b"\xff\xfe", b"[" * 64]))
        with suppress(OperatorFault):
            assert len(read_token_file(path).run_id) == len(token.run_id)
            read += 1
    assert 0 < read < len(fuzz.share(0.025))
