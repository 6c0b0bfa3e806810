"""Enrolments that arrive together are committed together, and each gets its own answer."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from echo2d.core.base.ids import PeerId
from echo2d.errors import StoreFault
from echo2d.net.security.auth import Denied
from echo2d.runtime.run_dir.access_table import Enrolment
from echo2d.runtime.run_dir.enrolments import ENROLMENTS_MAX, Enrolments


class Access:
    """A table that is slow, and knows no secret but "s"."""

    def __init__(self) -> None:
        self.commits: list[int] = []
        self.known: set[str] = set()
        self.on_disk = {"s"}
        self.reads = 0
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.fault: StoreFault | None = None

    def recognise(self, secret: str, *, now_s: float) -> None:
        assert now_s > 0
        if secret not in self.known:
            raise Denied(401, "credential", "")

    def reload(self) -> None:
        self.reads += 1
        self.known = set(self.on_disk)

    def enrol_all(self, asked: Sequence[Enrolment], *, now_s: float) -> list[PeerId | Denied]:
        self.entered.set()
        assert self.go_on.wait(20)
        if self.fault is not None:
            raise self.fault
        self.commits.append(len(asked))
        return [
            PeerId(each.public_key.hex()) if each.secret == "s" else Denied(401, "credential", "")
            for each in asked
        ]


def enrolment(number: int, secret: str = "s") -> Enrolment:
    return Enrolment(secret, number.to_bytes(2), b"")


@pytest.mark.may_block
async def test_waiting_enrolments_share_a_transaction() -> None:
    access = Access()
    enrolments, count = Enrolments(access), ENROLMENTS_MAX + 3
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(enrolments.enrol(enrolment(0)))
        await asyncio.to_thread(access.entered.wait)
        others = [
            tasks.create_task(enrolments.enrol(enrolment(number))) for number in range(1, count)
        ]
        await asyncio.sleep(0)
        access.go_on.set()
    assert [task.result() for task in (first, *others)] == [
        enrolment(n).public_key.hex() for n in range(count)
    ]
    assert access.commits == [1, ENROLMENTS_MAX, 2]


async def test_each_enrolment_gets_its_own_answer() -> None:
    access = Access()
    access.go_on.set()
    enrolments = Enrolments(access)
    good, bad = await asyncio.gather(
        enrolments.enrol(enrolment(1)),
        enrolments.enrol(enrolment(2, "stolen")),
        return_exceptions=True,
    )
    assert good == enrolment(1).public_key.hex()
    assert isinstance(bad, Denied)


async def test_a_disk_error_is_the_answer_to_all_callers_and_the_next_try_is_fresh() -> None:
    access = Access()
    access.go_on.set()
    access.fault = StoreFault("full")
    enrolments = Enrolments(access)
    with pytest.raises(StoreFault, match="full"):
        await enrolments.enrol(enrolment(1))
    access.fault = None
    assert await enrolments.enrol(enrolment(1)) == enrolment(1).public_key.hex()


async def test_a_peer_that_hangs_up_ends_no_other_enrolment() -> None:
    access = Access()
    enrolments = Enrolments(access)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(enrolments.enrol(enrolment(1)))
        await asyncio.to_thread(access.entered.wait)
        second = tasks.create_task(enrolments.enrol(enrolment(2)))
        await asyncio.sleep(0)
        first.cancel()
        access.go_on.set()
    assert first.cancelled()
    assert second.result() == enrolment(2).public_key.hex()


async def test_a_token_made_a_moment_ago_is_recognised() -> None:
    access = Access()
    enrolments = Enrolments(access)
    await enrolments.recognise("s")
    access.on_disk.add("t")
    await enrolments.recognise("t")
    assert access.reads == 2


async def test_unknown_secrets_cost_no_more_reads_however_many_come() -> None:
    access = Access()
    enrolments = Enrolments(access)
    junk = [enrolments.recognise(f"junk-{number}") for number in range(1000)]
    outcomes = await asyncio.gather(*junk, return_exceptions=True)
    assert all(isinstance(outcome, Denied) for outcome in outcomes)
    assert access.reads == 1
    await enrolments.recognise("s")
    assert access.reads == 1, "a known secret needs none"
