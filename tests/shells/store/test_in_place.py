"""A version that is written over its base: the slot always holds the old or the new one, or can be turned back.

The calls to the disk of an apply, a cancelled apply, a rollback and a settle are counted first; then each of them fails
in turn, or the process is killed before it or in the middle of a write.
"""

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2d.core.base.ids import ChunkId, Epoch, Version
from echo2d.errors import IntegrityFault, StoreFault
from echo2d.store.budget import DiskBudget
from echo2d.store.disk import write_at
from echo2d.store.slots.current_slot import CurrentSlot
from echo2d.store.slots.slot_store import SlotStore
from echo2d.store.slots.slot_writer import SlotWriter
from echo2d.store.slots.undo_log import BASE, LOG
from echo2d.store.snapshots import damaged_chunks
from tests.support.encodings import build_form, facts
from tests.support.failing_disk import REFUSALS, WRITES, FailingDisk, Killed

ROOM = 1 << 20
SIZES = {
    "sparse.json": 8000,
    "odd.json": 4001,
    "dense.json": 3000,
    "same.json": 5000,
    "tiny.json": 1,
}


def contents(version: int) -> dict[str, bytes]:
    """Files of one chunk each: a few words of two of them change, all of the third, none of the fourth."""
    files = {name: bytearray(random.Random(name).randbytes(size)) for name, size in SIZES.items()}
    rng = random.Random(version)
    for name in ("sparse.json", "odd.json"):
        for place in rng.sample(range(SIZES[name]), 20):
            files[name][place] ^= 1 + version
    files["odd.json"][-1] = files["tiny.json"][0] = version
    files["dense.json"][:] = rng.randbytes(SIZES["dense.json"])
    return {name: bytes(data) for name, data in files.items()}


CONTENTS = {version: contents(version) for version in (0, 1, 2, 3)}
MANIFESTS = {
    version: build_form(facts(version=version), files).manifest
    for version, files in CONTENTS.items()
}


def open_store(path: Path) -> SlotStore:
    return SlotStore(path, DiskBudget(ROOM), one_slot=True)


def write(writer: SlotWriter, version: int, *, chunks: range | None = None) -> None:
    manifest = MANIFESTS[version]
    for position in chunks or range(len(manifest.chunks)):
        chunk = manifest.chunks[position]
        data = CONTENTS[version][chunk.path][chunk.offset : chunk.offset + chunk.length]
        writer.write_chunk(ChunkId(position), data, manifest.chunk_digests[position])


def put(store: SlotStore, version: int) -> CurrentSlot:
    """In the spare slot."""
    writer = store.begin(MANIFESTS[version].files)
    write(writer, version)
    return writer.commit(MANIFESTS[version], Epoch(1), Version(version))


def current_of(store: SlotStore) -> CurrentSlot:
    current = store.current()
    assert current is not None
    return current


def put_in_place(store: SlotStore, version: int) -> CurrentSlot:
    """As the builder does it: after a fault the writer is ended."""
    writer = store.begin_in_place(current_of(store))
    try:
        write(writer, version)
        return writer.commit(MANIFESTS[version], Epoch(1), Version(version))
    except StoreFault:
        writer.end()
        raise


def apply(store: SlotStore) -> None:
    put_in_place(store, 2)


def cancel(store: SlotStore) -> None:
    writer = store.begin_in_place(current_of(store))
    write(writer, 2, chunks=range(3))
    writer.end()


def roll_back(store: SlotStore) -> None:
    store.roll_back(current_of(store).directory)


def settle(store: SlotStore) -> None:
    store.settle(current_of(store).directory)


def standing(path: Path) -> int:
    """What a restart finds; every byte is that version's."""
    current = current_of(open_store(path))
    there = {file.name: file.read_bytes() for file in current.directory.iterdir()}
    assert there == CONTENTS[current.version]
    assert current.manifest == MANIFESTS[current.version]
    return current.version


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """Version 1 is current and served; version 0 is in the spare slot."""
    store = open_store(tmp_path / "served")
    for version in (0, 1):
        put(store, version)
    return tmp_path / "served"


@pytest.fixture
def unsettled(served: Path, tmp_path: Path) -> Path:
    """Version 2 was written over version 1, and is not served yet."""
    path = Path(shutil.copytree(served, tmp_path / "unsettled"))
    put_in_place(open_store(path), 2)
    return path


def test_a_version_takes_the_place_of_its_base(served: Path) -> None:
    store = open_store(served)
    base = current_of(store)
    new = put_in_place(store, 2)
    assert new.directory == base.directory
    assert standing(served) == 2
    store.require_intact(new.directory, MANIFESTS[2].digest)
    assert (new.directory.parent / BASE).exists()
    store.settle(new.directory)
    assert sorted(file.name for file in served.iterdir()) == [new.slot, "current.json"]
    assert sorted(file.name for file in new.directory.parent.iterdir()) == ["manifest", "model"]
    assert store.roll_back(new.directory) is None, "a version that is served stays"
    assert standing(served) == 2


def test_a_version_that_no_engine_could_load_gives_way_to_its_base(unsettled: Path) -> None:
    store = open_store(unsettled)
    new = current_of(store)
    old = store.roll_back(new.directory)
    assert old is not None
    assert (old.version, old.directory) == (1, new.directory)
    store.require_intact(old.directory, MANIFESTS[1].digest)
    assert standing(unsettled) == 1
    assert store.roll_back(new.directory) is None, "once"
    put_in_place(store, 2)
    assert standing(unsettled) == 2


def test_a_version_over_one_that_was_never_served_is_turned_back_to_that(unsettled: Path) -> None:
    store = open_store(unsettled)
    put_in_place(store, 3)
    assert standing(unsettled) == 3
    roll_back(store)
    assert standing(unsettled) == 2


def test_an_apply_that_is_cancelled_leaves_the_base(served: Path) -> None:
    store = open_store(served)
    writer = store.begin_in_place(current_of(store))
    write(writer, 2, chunks=range(3))
    assert writer.unsure
    writer.end()
    assert standing(served) == 1
    with pytest.raises(StoreFault, match="ended"):
        write(writer, 2)
    writer = store.begin_in_place(current_of(store))
    write(writer, 2)
    assert standing(served) == 1, "the next store undoes what this one has begun"


def test_an_engine_never_reads_what_is_being_written(served: Path) -> None:
    store = open_store(served)
    base = current_of(store)
    writer = store.begin_in_place(base)
    write(writer, 2, chunks=range(3))
    store.require_intact(base.directory, base.manifest.digest)
    assert standing(served) == 1
    with pytest.raises(StoreFault, match="ended"):
        write(writer, 2)


def test_wrong_bytes_never_reach_the_slot(served: Path) -> None:
    store = open_store(served)
    writer = store.begin_in_place(current_of(store))
    with pytest.raises(IntegrityFault, match="promised"):
        writer.write_chunk(
            ChunkId(0), CONTENTS[2]["dense.json"][:-1] + b"x", MANIFESTS[2].chunk_digests[0]
        )
    with pytest.raises(IntegrityFault, match="not those"):
        writer.commit(MANIFESTS[2], Epoch(1), Version(2))
    write(writer, 2)
    writer.commit(MANIFESTS[2], Epoch(1), Version(2))
    assert standing(served) == 2


def test_another_base_is_refused(served: Path) -> None:
    store = open_store(served)
    base = current_of(store)
    put(store, 3)
    with pytest.raises(StoreFault, match="not the current slot"):
        store.begin_in_place(base)


def test_what_would_undo_it_counts_against_the_disk_budget(served: Path) -> None:
    budget = DiskBudget(ROOM)
    store = SlotStore(served, budget, one_slot=True)
    before = budget.left
    new = put_in_place(store, 2)
    log = (new.directory.parent / LOG).stat().st_size
    assert before - budget.left == log > SIZES["dense.json"]
    again = DiskBudget(ROOM)
    SlotStore(served, again)
    assert again.left == budget.left
    store.settle(new.directory)
    assert budget.left == before + sum(SIZES.values())


def test_without_room_for_what_would_undo_it_the_base_stays(served: Path) -> None:
    store = SlotStore(served, DiskBudget(2 * sum(SIZES.values()) + 2000), one_slot=True)
    with pytest.raises(StoreFault, match="disk_bytes_max") as fault:
        put_in_place(store, 2)
    assert fault.value.full
    assert standing(served) == 1


def test_two_slots_are_never_emptied(served: Path) -> None:
    store = SlotStore(served, DiskBudget(ROOM))
    current = current_of(store)
    store.settle(current.directory)
    assert (served / "a" / "model").exists()
    assert (served / "b" / "model").exists()


def test_a_slot_that_is_being_written_is_not_emptied(served: Path) -> None:
    store = open_store(served)
    current = current_of(store)
    writer = store.begin(MANIFESTS[3].files)
    store.settle(current.directory)
    write(writer, 3)
    writer.commit(MANIFESTS[3], Epoch(1), Version(3))
    assert standing(served) == 3
    store.settle(current.directory)
    assert standing(served) == 3, "nor one that is current by now"


def test_a_base_that_rotted_stays_as_it_was_and_is_found_out(served: Path) -> None:
    store = open_store(served)
    base = current_of(store)
    write_at(base.directory / "sparse.json", b"rot", 100)
    cancel(store)
    chunks = base.manifest.chunks
    assert [chunks[each].path for each in damaged_chunks(base.directory, base.manifest)] == [
        "sparse.json"
    ]
    with pytest.raises(IntegrityFault, match="damaged"):
        store.require_intact(base.directory, base.manifest.digest)


@pytest.mark.parametrize("file", [BASE, LOG])
def test_what_would_undo_it_rots(served: Path, file: str) -> None:
    """Then nothing can be restored, and the slot is given up before an engine loads it."""
    store = open_store(served)
    base = current_of(store)
    write(store.begin_in_place(base), 2)
    (base.directory.parent / file).write_bytes(b"\0" * 100)
    store = open_store(served)
    with pytest.raises(IntegrityFault, match="damaged"):
        store.require_intact(base.directory, base.manifest.digest)
    assert store.current() is None
    put(store, 3)
    assert standing(served) == 3


@pytest.mark.parametrize("end", [b"", bytes(100)], ids=["torn", "zeros"])
def test_an_undo_record_that_is_not_what_was_written_is_not_applied(
    served: Path, end: bytes
) -> None:
    """It is the last one, and its chunk is untouched: the others restore the base."""
    store = open_store(served)
    base = current_of(store)
    manifest = MANIFESTS[2]
    last = next(n for n, chunk in enumerate(manifest.chunks) if chunk.path == "dense.json")
    writer = store.begin_in_place(base)
    for position in {*range(len(manifest.chunks))} - {last}:
        write(writer, 2, chunks=range(position, position + 1))
    assert writer._undo is not None
    assert writer._undo[0].keep(ChunkId(last), manifest.chunks[last], CONTENTS[2]["dense.json"])
    log = base.directory.parent / LOG
    log.write_bytes(log.read_bytes()[:-100] + end)
    assert standing(served) == 1


# --- every call to the disk

Act = Callable[[SlotStore], None]
# What is done, on what, and what stands at the end.
ACTS: dict[str, tuple[Act, str, int]] = {
    "apply": (apply, "served", 2),
    "cancel": (cancel, "served", 1),
    "roll back": (roll_back, "unsettled", 1),
    "settle": (settle, "unsettled", 2),
}


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("name", ACTS)
def test_a_kill_at_any_call_leaves_the_old_or_the_new(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, torn: bool
) -> None:
    act, before, end = ACTS[name]
    pristine: Path = request.getfixturevalue(before)
    start, found = standing(pristine), []
    for number in calls_of(act, pristine, ["pwrite"] if torn else WRITES):
        path = Path(shutil.copytree(pristine, tmp_path / f"{number}"))
        run(FailingDisk(number, Killed(), torn), path, act)
        found.append(standing(path))
        killed_again(path, tmp_path / f"{number} again", found[-1])
        if found[-1] == start:
            act(open_store(path))
        assert standing(path) == end, f"call {number}"
    first = found.count(start)
    assert found == [start] * first + [end] * (len(found) - first), "one flip"
    if start != end:
        assert first, "not before the first call"


def killed_again(path: Path, copy: Path, expected: int) -> None:
    """The restart that undoes what a kill has left is killed, too."""
    shutil.copytree(path, copy)
    for number in range(0, 60, 7):
        run(FailingDisk(number, Killed(), torn=False), copy, lambda _: None)
    assert standing(copy) == expected


def test_a_version_whose_settling_was_cut_off_is_turned_back_whole_or_not_at_all(
    unsettled: Path, tmp_path: Path
) -> None:
    for number in calls_of(settle, unsettled, WRITES):
        path = Path(shutil.copytree(unsettled, tmp_path / str(number)))
        run(FailingDisk(number, Killed()), path, settle)
        roll_back(open_store(path))
        assert standing(path) in {1, 2}, f"call {number}"


@pytest.mark.parametrize("fault", REFUSALS)
@pytest.mark.parametrize("name", ACTS)
def test_a_disk_that_refuses_at_any_call_costs_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, fault: str
) -> None:
    (act, before, end), (error, kinds) = ACTS[name], REFUSALS[fault]
    pristine: Path = request.getfixturevalue(before)
    start = standing(pristine)
    for number in calls_of(act, pristine, kinds):
        path = Path(shutil.copytree(pristine, tmp_path / str(number)))
        store = open_store(path)
        disk = FailingDisk(number, OSError(error, os.strerror(error)))
        with disk.mounted(), suppress(StoreFault):
            act(store)
        version = current_of(store).version
        assert version in {start, end}
        store.require_intact(current_of(store).directory, MANIFESTS[version].digest)
        if version == start:
            act(store)
        assert current_of(store).version == standing(path) == end, f"call {number}"


def calls_of(act: Act, pristine: Path, kinds: tuple[str, ...] | list[str]) -> list[int]:
    path = Path(shutil.copytree(pristine, pristine.with_name("counted")))
    counting = FailingDisk()
    run(counting, path, act)
    assert len(counting.calls) > 5
    return [number for number, call in enumerate(counting.calls) if call in kinds]


def run(disk: FailingDisk, path: Path, act: Act) -> None:
    """Without what opening a store does, unless that is all."""
    with suppress(Killed, StoreFault):
        store = open_store(path) if act in {each for each, _, _ in ACTS.values()} else None
        with disk.mounted():
            act(store or open_store(path))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_chunks_half_written_by_a_kill_are_restored(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Several kills, each in the middle of the write of any chunk: the base comes back each time."""
    path = tmp_path_factory.mktemp("slots")
    put(open_store(path), 1)
    places = range(len(MANIFESTS[2].chunks))
    for order in data.draw(st.lists(st.permutations(list(places)), min_size=1, max_size=3)):
        store = open_store(path)
        writes = data.draw(st.integers(0, 12))
        disk = FailingDisk(writes, Killed(), torn=data.draw(st.booleans()), names=("pwrite",))
        with suppress(Killed):
            writer = store.begin_in_place(current_of(store))
            with disk.mounted():
                for place in order:
                    write(writer, 2, chunks=range(place, place + 1))
        assert standing(path) == 1
    put_in_place(open_store(path), 2)
    assert standing(path) == 2
