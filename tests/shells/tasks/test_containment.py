"""A task process tries to get out: into the run directory, the coordinator, the disk, the network, and past its end.

For an ordinary user, a task runs under the same user id and has only limits; to isolate tasks, start as root.
"""

import ast
import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.errors import OperatorFault
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.tasks.confinement import SCRATCH
from echo2d.tasks.pool import (
    Limits,
    Score,
    ScoreCall,
    TaskPlace,
    TaskPool,
    TaskPrompt,
    TextSettings,
)
from echo2d.tasks.process import TaskFailed
from echo2d.tasks.user_ids import TASK_UIDS
from tests.support.escaping_task import WAYS
from tests.support.processes import is_running
from tests.support.shared_folder import shared_folder
from tests.support.texts import write_text_model

ESCAPING = "tests.support.escaping_task:EscapingTask"
TIMEOUT_S = 3.0
LIMITS = Limits(memory_bytes_max=1 << 30, file_bytes_max=1 << 20, cpu_s_max=1)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a task another user id")


@pytest.fixture
def notes() -> Iterator[Path]:
    """A file that a task process of another user may write."""
    with shared_folder() as folder:
        yield folder / "notes"


@pytest.fixture
async def coordinator() -> AsyncIterator[int]:
    """A port of ours on loopback."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
async def pool(notes: Path, coordinator: int) -> AsyncIterator[TaskPool]:
    run = await asyncio.to_thread(RunDirectory, notes.parent / "run")
    options = {
        "notes": str(notes),
        "run_dir": str(run.path),
        "coordinator": os.getpid(),
        "port": coordinator,
    }
    async with TaskPool(ESCAPING, options, timeout_s=TIMEOUT_S, limits=LIMITS) as made:
        yield made


def told(notes: Path) -> dict[str, Any]:
    """What a task process found out about itself."""
    (facts,) = notes.parent.glob("facts-*")
    found: dict[str, Any] = ast.literal_eval(facts.read_text())
    return found


async def tries(pool: TaskPool, way: str) -> Score | TaskFailed:
    return await pool.reward(ScoreCall(WAYS.index(way), pack_tokens([1])))


@as_root
@pytest.mark.parametrize(
    "way",
    [
        "read the key",
        "list the run directory",
        "read the coordinator's environment",
        "read the coordinator's memory",
        "read the coordinator's descriptors",
        "signal the coordinator",
        "signal the guard",
        "become root",
        "become another user",
        "write into the run directory",
        "write into the installation",
        "mount",
        "start more processes",
    ],
)
async def test_a_task_under_another_user_reaches_nothing_of_the_run(
    pool: TaskPool, way: str
) -> None:
    outcome = await tries(pool, way)
    assert isinstance(outcome, TaskFailed)
    assert any(
        word in outcome.reason
        for word in ("PermissionError", "not allowed to raise", "Operation not permitted")
    )


@pytest.mark.parametrize(
    "way",
    [
        "write into the working directory",
        "use more memory",
        "write longer files",
        "open more files",
        "open many files",
        "spin on",
    ],
)
async def test_a_task_cannot_exceed_its_limits(pool: TaskPool, way: str) -> None:
    assert isinstance(await tries(pool, way), TaskFailed)
    assert await pool.prompt(0) == TaskPrompt(pack_tokens([1]))


@as_root
async def test_files_that_a_task_leaves_in_tmp_are_seen_by_no_other_task(pool: TaskPool) -> None:
    """The next process may get its user id, and the host's directory has room for all."""
    before = {folder: await asyncio.to_thread(os.listdir, folder) for folder in SCRATCH}
    assert await tries(pool, "fill the directories of everybody") == Score(1.0)
    found = {folder: await asyncio.to_thread(os.listdir, folder) for folder in SCRATCH}
    left = {
        name
        for folder in SCRATCH
        for name in {*found[folder]} - {*before[folder]}
        if name.isdigit()
    }
    assert left == set()


@pytest.mark.parametrize("way", ["leave a session behind", "leave a session behind and die"])
async def test_no_process_of_a_task_outlives_its_task_process(
    pool: TaskPool, notes: Path, way: str
) -> None:
    assert isinstance(await tries(pool, way), TaskFailed)
    left = [int(line) for line in (await asyncio.to_thread(notes.read_text)).split()]
    assert len(left) == 1
    assert not any(map(is_running, left))
    assert await pool.prompt(0) == TaskPrompt(pack_tokens([1]))


async def test_a_task_starts_without_secrets_and_open_files(pool: TaskPool, notes: Path) -> None:
    assert await tries(pool, "tell") == Score(0.0)
    facts = told(notes)
    assert facts["umask"] == 0o077
    # Python itself sets LC_CTYPE where no locale is given; the others are alike on every host.
    assert set(facts["environment"]) <= {"LC_CTYPE", "PYTHONHASHSEED", "TZ"}
    assert len(facts["descriptors"]) == 5, facts[
        "descriptors"
    ]  # null, output twice, its socket, and the one that lists
    assert facts["status"]["NoNewPrivs"] == "1"
    assert int(facts["status"]["CapEff"], 16) == int(facts["status"]["CapPrm"], 16) == 0
    if os.geteuid() == 0:
        assert facts["uid"] in TASK_UIDS
        assert facts["groups"] == []


@as_root
async def test_a_task_has_no_network_if_the_kernel_allows_it(pool: TaskPool, notes: Path) -> None:
    await tries(pool, "tell")
    if told(notes)["network"] == await asyncio.to_thread(os.readlink, "/proc/self/ns/net"):
        pytest.skip("this container may not make network namespaces")
    outcome = await tries(pool, "call the coordinator")
    assert isinstance(outcome, TaskFailed)
    assert "OSError" in outcome.reason


@as_root
async def test_two_processes_of_a_pool_run_as_two_users(notes: Path, tmp_path: Path) -> None:
    options = {"notes": str(notes), "run_dir": str(tmp_path), "coordinator": os.getpid(), "port": 1}
    async with TaskPool(ESCAPING, options, processes=2, timeout_s=TIMEOUT_S, limits=LIMITS) as pool:
        await asyncio.gather(tries(pool, "tell"), tries(pool, "tell"))
    told_by = {path.name.removeprefix("facts-") for path in notes.parent.iterdir()}
    assert len(told_by & set(map(str, TASK_UIDS))) == len(told_by) == 2


@as_root
async def test_a_task_cannot_signal_the_processes_of_another_pool(
    pool: TaskPool, notes: Path, tmp_path: Path
) -> None:
    options = {"notes": str(notes), "run_dir": str(tmp_path), "coordinator": os.getpid(), "port": 1}
    async with TaskPool(ESCAPING, options, timeout_s=TIMEOUT_S, limits=LIMITS) as other:
        assert await tries(other, "tell") == Score(0.0)
        before = told(notes)["pid"]
        outcome = await tries(pool, "signal the others")
        assert isinstance(outcome, TaskFailed)
        assert "no other process may be signalled" in outcome.reason
        assert await tries(other, "tell") == Score(0.0)
        assert told(notes)["pid"] == before


@as_root
async def test_files_in_a_home_that_others_may_not_enter_are_readable(tmp_path: Path) -> None:
    """And nothing else of that home is; on a rented box everything lies in the home of root."""
    home = tmp_path / "home"
    rows = home / "data" / "rows.csv"
    rows.parent.mkdir(parents=True)
    rows.write_text("prompt,answer\n1+1,2\n")
    (home / "secret").write_text("x")
    home.chmod(0o700)
    model = write_text_model(home / "model")
    settings = TextSettings(str(model))
    async with TaskPool("rows", {"files": str(rows)}, texts=settings) as pool:
        assert isinstance(await pool.prompt(0), TaskPrompt)
        outside = await asyncio.to_thread(list, home.iterdir())
    assert len(outside) == 3
    options = {"files": str(rows), "scorer": "tests.support.text_task:list_home"}
    options["scorer_options"] = {"home": str(home)}  # type: ignore[assignment]
    async with TaskPool("rows", options, texts=settings) as pool:
        assert await pool.reward(ScoreCall(0, pack_tokens([1]))) == Score(1.0)


async def test_a_task_gets_the_environment_that_it_is_given(notes: Path, tmp_path: Path) -> None:
    options = {"notes": str(notes), "run_dir": str(tmp_path), "coordinator": os.getpid(), "port": 1}
    async with TaskPool(ESCAPING, options, limits=LIMITS, place=TaskPlace({"KEY": "x"})) as pool:
        await tries(pool, "tell")
    assert set(told(notes)["environment"]) - {"LC_CTYPE"} == {"KEY", "PYTHONHASHSEED", "TZ"}


@as_root
async def test_paths_that_a_task_needs_are_readable(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    rows = home / "rows.csv"
    rows.write_text("prompt,answer\n1+1,2\n")
    (home / "more").mkdir()
    home.chmod(0o700)
    settings = TextSettings(str(write_text_model(tmp_path / "model")))
    options = {
        "files": str(rows),
        "scorer": "tests.support.text_task:list_home",
        "scorer_options": {"home": str(home)},
    }
    limits = Limits(read_paths=(str(home / "more"),))
    async with TaskPool("rows", options, texts=settings, limits=limits) as pool:
        assert await pool.reward(ScoreCall(0, pack_tokens([1]))) == Score(2.0)
    # A path of run.toml leads out of its own folder, to a link as in the hub's cache.
    run, cache = tmp_path / "run", tmp_path / "cache"
    run.mkdir()
    cache.mkdir()
    (cache / "rows.csv").symlink_to(rows)
    linked = {**options, "files": str(run / ".." / "cache" / "rows.csv")}
    limits = Limits(read_paths=(str(run), str(home / "more")))
    async with TaskPool("rows", linked, texts=settings, limits=limits) as pool:
        assert await pool.reward(ScoreCall(0, pack_tokens([1]))) == Score(2.0)
    missing = Limits(read_paths=(str(home / "none"),))
    with pytest.raises(OperatorFault, match=r"there is no .*none"):
        await TaskPool("rows", options, texts=settings, limits=missing).start()


@as_root
async def test_a_file_for_its_owner_only_is_named_at_the_start(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("prompt,answer\n1+1,2\n")
    rows.chmod(0o600)
    with pytest.raises(
        OperatorFault, match=r"user [0-9]+.* cannot read .*rows.csv: make it"
    ) as told:
        await TaskPool("rows", {"files": str(rows)}, texts=TextSettings(str(tmp_path))).start()
    assert "\n" not in str(told.value)
