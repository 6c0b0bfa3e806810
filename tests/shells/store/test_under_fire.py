"""A fault at every call to the disk while a form is forgotten and a version is received, applied and flipped.

The calls are counted first, then each of them fails in turn: no space, I/O error, `kill -9` before it, `kill -9` in the
middle of a write. Afterwards the store has exactly the old or exactly the new version, byte for byte; nothing
half-written is believed; only StoreFault is raised; and with the disk well again the new version arrives.
"""

import asyncio
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.core.base.ids import FormId
from echo2d.core.worker.events import ApplyRejected, SnapshotReady
from echo2d.errors import StoreFault
from echo2d.runtime.peer.frame_holdings import FrameHoldings
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.worker.snapshot_builder import SnapshotBuilder
from echo2d.store.budget import DiskBudget
from echo2d.store.frames import FrameStore
from echo2d.store.slots.slot_store import SlotStore
from tests.support.encodings import BuiltForm, build_form, facts
from tests.support.failing_disk import REFUSALS, WRITES, FailingDisk, Killed
from tests.support.holdings_owner import NotingOwner

ROOM = 1 << 20


COMMON = os.urandom(70_000)


def contents(version: int) -> dict[str, bytes]:
    """Two chunks of one file each; the first takes two frames in full, the other is the same in all versions."""
    changed = bytearray(COMMON)
    changed[::700] = bytes([version]) * 100
    return {"a.json": bytes(changed), "b.json": b"the same in all versions"}


CONTENTS = {version: contents(version) for version in (0, 1, 2)}
FORMS = {
    version: build_form(facts(version=version, publish_seq=version), CONTENTS[version])
    for version in CONTENTS
}
DELTA = build_form(
    replace(FORMS[2].facts, kind="delta", base_digest=FORMS[1].manifest.digest),
    CONTENTS[2],
    base=CONTENTS[1],
)
SECOND = {"full": FORMS[2], "delta": DELTA}


# --- a peer on it


class LacksBase(StoreFault):
    """A delta was reported as of no use here."""


class Box:
    """What a worker does with its state directory, without links and engines."""

    def __init__(self, path: Path) -> None:
        self.state_dir = StateDir(path, ROOM)
        self.holdings: FrameHoldings | None = None
        self.given_up: list[tuple[FormId, str]] = []

    def open(self) -> None:
        self.slots, self.standing = self.state_dir.slots()
        self.store = self.state_dir.frames()
        owner = NotingOwner()
        self.holdings, self.given_up = FrameHoldings(self.store, owner), owner.failed
        self.applier = SnapshotBuilder(self.slots, self.store, self.holdings)

    async def take(self, form: BuiltForm) -> SnapshotReady:
        """Receive all of the form, apply it, flip. StoreFault: the disk refused."""
        if self.holdings is None:
            await asyncio.to_thread(self.open)
            assert self.holdings is not None
        seq, run_id = form.facts.publish_seq, form.facts.run_id
        await asyncio.to_thread(self.state_dir.keep_publish_seq, run_id, seq)
        self.given_up.clear()
        await self._forget_before(form)
        for root in form.roots:
            await self.holdings.accept_root(root)
        if self.given_up:
            raise StoreFault(self.given_up[0][1])
        for segment in form.segments:
            await self.holdings.put_table(
                form.facts.form, segment.table.segment, segment.table.encode()
            )
            frames = [
                (span.frame, payload) for span, payload in segment.frames(form.facts.frame_bytes)
            ]
            assert await self.holdings.put_frames(form.facts.form, frames) == set()
        try:
            outcome = await self.applier.apply(form.facts.form)
        except StoreFault as fault:
            raise AssertionError("a failed apply is an answer") from fault
        if isinstance(outcome, ApplyRejected):
            raise (LacksBase if outcome.lacks_base else StoreFault)(outcome.reason)
        assert isinstance(outcome, SnapshotReady)
        return outcome

    async def _forget_before(self, form: BuiltForm) -> None:
        """Of the forms before the last one, only the files stay, for the next segments."""
        assert self.holdings is not None
        for old in self.store.forms():
            if old.publish_seq < form.facts.publish_seq - 1:
                with suppress(StoreFault):
                    await self.holdings.forget(old.form)

    async def take_again(self, form: BuiltForm) -> None:
        """As a worker does when it is told of the form again after it gave it up."""
        if self.holdings is not None:
            await self.holdings.forget(form.facts.form)
        await self.take(form)


def run_into(disk: FailingDisk, path: Path, runner: asyncio.Runner, form: BuiltForm) -> None:
    """Take version 2 so. After a StoreFault the old one stands; then, with the disk well again, it is taken."""
    box = Box(path)
    try:
        with disk.mounted():
            runner.run(box.take(form))
    except LacksBase:
        runner.run(box.take(FORMS[2]))  # which the coordinator tells it to
    except StoreFault:
        assert version_standing(path) == 1
        runner.run(box.take_again(form))
    except Killed:
        pass
    except BaseExceptionGroup as group:  # of the tasks that write chunks
        if group.subgroup(Killed) is None:
            raise
    finally:
        box.state_dir.close()


def version_standing(path: Path) -> int:
    """What a restart finds: exactly one version, and of all forms only frames that are right."""
    current = SlotStore(path / "slots", DiskBudget(ROOM)).current()
    assert current is not None
    there = {file.name: file.read_bytes() for file in current.directory.iterdir()}
    assert there == CONTENTS[current.version]
    store = FrameStore(path / "frames", DiskBudget(ROOM))
    for form_facts in store.forms():
        held = store.recover(form_facts.form)
        store.check()
        built = DELTA if form_facts == DELTA.facts else FORMS[form_facts.version]
        for segment in built.segments:
            for span, payload in segment.frames(form_facts.frame_bytes):
                assert span.frame not in held or store.get_frame(form_facts.form, span) == payload
    return current.version


@pytest.fixture(autouse=True)
def power_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes die here, the machine does not: what was written is there without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def pristine(tmp_path: Path, runner: asyncio.Runner) -> Path:
    """The state directory of a peer on which version 1 stands; it has the frames of version 0, too."""
    box = Box(tmp_path / "pristine")
    for version in (0, 1):
        runner.run(box.take(FORMS[version]))
    box.state_dir.close()
    return tmp_path / "pristine"


def calls_to_fail(
    pristine: Path, runner: asyncio.Runner, kinds: Collection[str], second: str
) -> list[int]:
    counting, form = FailingDisk(), SECOND[second]
    path = Path(shutil.copytree(pristine, pristine.with_name("counted")))
    run_into(counting, path, runner, form)
    assert len(counting.calls) > 80
    return [number for number, call in enumerate(counting.calls) if call in kinds]


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("name", REFUSALS)
def test_a_disk_error_at_any_call_costs_no_version(
    pristine: Path, tmp_path: Path, runner: asyncio.Runner, name: str, second: str
) -> None:
    (error, kinds), form = REFUSALS[name], SECOND[second]
    for number in calls_to_fail(pristine, runner, kinds, second):
        path = Path(shutil.copytree(pristine, tmp_path / str(number)))
        disk = FailingDisk(number, OSError(error, os.strerror(error)))
        run_into(disk, path, runner, form)
        assert disk.struck
        assert version_standing(path) == 2, f"call {number}, {disk.calls[number]}"


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_at_any_call_leaves_the_old_or_the_new_version(
    pristine: Path, tmp_path: Path, runner: asyncio.Runner, torn: bool, second: str
) -> None:
    found, form = [], SECOND[second]
    for number in calls_to_fail(pristine, runner, ["pwrite"] if torn else WRITES, second):
        path = Path(shutil.copytree(pristine, tmp_path / str(number)))
        disk = FailingDisk(number, Killed(), torn)
        run_into(disk, path, runner, form)
        assert disk.struck
        found.append(version_standing(path))
        box = Box(path)
        box.open()
        assert [each.key.version for each in box.standing] == [found[-1]]
        assert box.state_dir.publish_seq(FORMS[2].facts.run_id) in (1, 2)
        runner.run(box.take_again(form if found[-1] == 1 else FORMS[2]))
        box.state_dir.close()
        assert version_standing(path) == 2
    old = found.count(1)
    assert found == [1] * old + [2] * (len(found) - old), "one flip"
    assert old == len(found), "the flip is the last call"


@pytest.mark.parametrize("name", [*REFUSALS, "kill"])
def test_a_fault_while_the_spare_slot_is_reused_leaves_the_old_or_the_new_version(
    pristine: Path, tmp_path: Path, name: str
) -> None:
    """Version 0 is published again, which stands in the spare slot."""
    error, kinds = REFUSALS.get(name, (0, WRITES))
    fault = OSError(error, os.strerror(error)) if error else Killed()
    found = []
    for number in calls_of_taking_again(pristine, kinds):
        path = Path(shutil.copytree(pristine, tmp_path / str(number)))
        disk = FailingDisk(number, fault)
        taken = take_slot_again(disk, path)
        assert disk.struck
        found.append(version_standing(path))
        assert name == "kill" or found[-1] == (0 if taken else 1)
        assert take_slot_again(FailingDisk(), path) or found[-1] == 0
        assert version_standing(path) == 0
    assert name != "kill" or found == sorted(found, reverse=True), "one flip"


def calls_of_taking_again(pristine: Path, kinds: Collection[str]) -> list[int]:
    counting = FailingDisk()
    assert take_slot_again(counting, Path(shutil.copytree(pristine, pristine.with_name("counted"))))
    return [number for number, call in enumerate(counting.calls) if call in kinds]


def take_slot_again(disk: FailingDisk, path: Path) -> bool:
    slots, again = SlotStore(path / "slots", DiskBudget(ROOM)), FORMS[0]
    with disk.mounted(), suppress(StoreFault, Killed):
        return (
            slots.take_again(again.manifest.digest, again.facts.epoch, again.facts.version)
            is not None
        )
    return False
