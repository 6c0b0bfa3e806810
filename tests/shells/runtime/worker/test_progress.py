"""The worker's log and terminal while a version arrives, and the report of an hour's work."""

import asyncio
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import echo2d.core.worker.progress as meter
from echo2d.core.base.ids import Version
from echo2d.core.protocol.control_messages import RefitDone
from echo2d.core.worker.progress import Stage
from echo2d.errors import OperatorFault
from echo2d.runtime.worker import progress
from echo2d.runtime.worker.progress import ProgressTeller, Worked
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.peer import a_seed, a_worker, spread

# 1 MB in 64 KiB frames of an 8 MiB chunk takes as long as is needed to look at it.
UPLINK = 4_000_000


class Scripted:
    """A worker that has one stage after the other, each time that it is asked."""

    def __init__(self, stages: Sequence[Stage | None]) -> None:
        self._stages, self.asked, self.serves = stages, 0, False
        self.over = asyncio.Event()

    def stage(self) -> Stage | None:
        if self.asked == len(self._stages):
            self.over.set()
            return None
        self.asked += 1
        return self._stages[self.asked - 1]

    def worked(self) -> Worked:
        return Worked(answers=2 * self.asked, tokens=10 * self.asked, received_bytes=7)

    def words(self) -> str:
        return "version 3 served"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """All that is due after some time is due at once."""
    for module, name in ((meter, "LINE_S"), (progress, "LINE_S"), (progress, "SHOW_S")):
        monkeypatch.setattr(module, name, 0.0)
    caplog.set_level(logging.INFO, "echo2d.worker")


@pytest.mark.usefixtures("at_once")
async def test_the_terminal_and_the_log_show_the_progress_of_a_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shown: list[tuple[str, float | None]] = []
    worker = Scripted(
        [
            Stage("receiving", Version(4), 0, 200),
            Stage("receiving", Version(4), 100, 200),
            Stage("applying", Version(4), 1, 4),
            Stage("loading", Version(4)),
        ]
    )
    async with asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(
            ProgressTeller(lambda words, share: shown.append((words, share))).tell(worker)
        )
        await worker.over.wait()
        await asyncio.sleep(0)
        telling.cancel()
    assert [re.sub(r"200 B .*", "200 B", words) for words, _ in shown[:5]] == [
        "receiving version 4: 0/200 B",
        "receiving version 4: 100/200 B",
        "applying version 4: 25%, 0:00",
        "loading version 4: 0:00",
        "version 3 served",
    ]
    assert [share for _, share in shown[:5]] == [0.0, 0.5, 0.25, None, None]
    lines = [re.sub(r"200 B .*", "200 B", line) for line in caplog.messages]
    assert lines == [
        "receiving version=4 0/200 B",
        "receiving version=4 100/200 B",
        "applying version=4 25%, 0:00",
        "loading version=4 0:00",
    ]


@pytest.mark.usefixtures("at_once")
async def test_an_hour_of_work_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "WORKED_S", 0.0)
    worker = Scripted([None, None])
    async with asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(ProgressTeller().tell(worker))
        await worker.over.wait()
        telling.cancel()
    per_line = "answers=2 tokens=10 received_bytes=0 sent_bytes=0"
    assert caplog.messages[:2] == [f"working {per_line} version 3 served"] * 2


@pytest.mark.usefixtures("at_once")
async def test_a_long_start_is_reported_until_it_ends_or_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shown: list[str] = []
    seen = asyncio.Event()

    def show(words: str, share: float | None) -> None:
        assert share is None
        shown.append(words)
        seen.set()

    with pytest.RaisesGroup(OperatorFault):
        async with ProgressTeller(show).doing("loading", "engine=torch"):
            await seen.wait()
            raise OperatorFault("no torch here")
    assert shown[0] == "loading engine=torch 0:00"
    assert caplog.messages[:2] == ["loading engine=torch", "loading engine=torch 0:00"]


async def test_a_short_transfer_leaves_two_lines_in_the_log(
    double: CoordinatorDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A real worker: the terminal sees it come, the log says verified and serving."""
    caplog.set_level(logging.INFO, "echo2d.worker")
    monkeypatch.setattr(progress, "SHOW_S", 0.001)
    shown: list[tuple[str, float | None]] = []
    teller = ProgressTeller(lambda words, share: shown.append((words, share)))
    async with (
        a_seed(double, uplink_limit=UPLINK),
        a_worker(double, tmp_path / "one", teller=teller),
    ):
        names = await double.peers(2)
        await spread(double, 0, names["seed"], names["one"])
        await double.until_said(RefitDone, names["one"])
    shares = [share for words, share in shown if words.startswith("receiving version 0")]
    assert any(share is not None and 0 < share < 1 for share in shares)
    kinds = [line.split()[0] for line in caplog.messages if "version=0" in line]
    assert kinds == ["verified", "serving"]
    assert re.search(r"verified .* payload_bytes=\d+ seconds=\d", caplog.text)
