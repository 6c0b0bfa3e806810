"""Copies of checkpoints under a URL, whole or absent, and the one from which a learner on an empty disk continues."""

import dataclasses
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file

from echo2d.client import OperatorFault, StoreFault
from echo2d.learner.__main__ import main
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig
from echo2d.learner.saving import remote as module
from echo2d.learner.saving.checkpoint import OWN, Checkpoints
from echo2d.learner.saving.identity import ID_FILE
from echo2d.learner.saving.remote import DIGESTS, RemoteCheckpoints
from tests.support.learner import config_in, learn, write_config
from tests.support.scripted_coordinator import ScriptedCoordinator


class FlakyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory that fails. failing: how many of the next calls fail; error: the error that they raise."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    failing = 0
    error: Exception = OSError("slow down")
    calls: ClassVar[list[str]] = []

    @classmethod
    def strike(cls, call: str) -> None:
        cls.calls.append(call)
        if cls.failing:
            cls.failing -= 1
            raise cls.error

    def put_file(self, *rest: Any, **more: Any) -> None:
        self.strike(f"put {Path(rest[0]).name}")
        super().put_file(*rest, **more)

    def get_file(self, *rest: Any, **more: Any) -> None:
        self.strike("get")
        super().get_file(*rest, **more)

    def glob(self, *rest: Any, **more: Any) -> Any:
        self.strike("glob")
        return super().glob(*rest, **more)

    def rm(self, path: str, *rest: Any, **more: Any) -> None:
        self.strike(f"rm {Path(path).name}")
        super().rm(path, *rest, **more)


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FlakyFileSystem]]:
    monkeypatch.setattr(module, "PAUSES_S", (0.0,) * len(module.PAUSES_S))
    FlakyFileSystem.failing, FlakyFileSystem.error = 0, OSError("slow down")
    FlakyFileSystem.calls.clear()
    yield FlakyFileSystem
    FlakyFileSystem.store.clear()
    FlakyFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["flaky", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"flaky": "flaky://bucket/run", "file": f"file://{tmp_path}/bucket/run"}[request.param]


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((100, 100), float(step))}}


def saved(directory: Path, url: str, keep: int = 2) -> Checkpoints:
    return Checkpoints(directory, keep, remote=RemoteCheckpoints(url))


def save(checkpoints: Checkpoints, step: int, epoch: int = 1) -> None:
    checkpoints.save(step, epoch, state(step), {"run": "a"}, {"rng": [step]})
    assert checkpoints.settle()


def step_of(checkpoints: Checkpoints) -> int:
    found = state(-1)
    progress = checkpoints.load_newest(found)
    step = int(progress["step"])
    assert progress[OWN] == {"rng": [step]}
    assert torch.equal(found["model"]["w"], state(step)["model"]["w"])
    return step


def name(step: int, epoch: int = 1) -> str:
    return f"step-{step:08d}-epoch-{epoch}"


def names(url: str) -> list[str]:
    return sorted(RemoteCheckpoints(url).names())


def files(url: str, *parts: str) -> str:
    """The path of a file under the URL, for the file system behind it."""
    return "/".join([fsspec.core.url_to_fs(url)[1], *parts])


def test_a_learner_on_an_empty_disk_continues_from_the_newest_copy(
    tmp_path: Path, url: str
) -> None:
    checkpoints, durable = saved(tmp_path / "a", url), []
    assert not checkpoints
    for step in (10, 20, 30):
        save(checkpoints, step)
        durable.append(checkpoints.durable)
    assert durable == [0, 10, 20]
    assert names(url) == [name(20), name(30)]

    other = saved(tmp_path / "b", url)
    assert other
    assert step_of(other) == 30
    assert [path.name for path in (tmp_path / "b").iterdir()] == [name(30)]
    save(other, 40, epoch=2)
    assert names(url) == [name(30), name(40, 2)]
    assert other.durable == 30


def test_a_newer_checkpoint_on_the_disk_is_used_instead_of_a_copy(tmp_path: Path, url: str) -> None:
    """Its learner was killed before the copy was whole."""
    checkpoints = saved(tmp_path / "a", url)
    for step in (10, 20):
        save(checkpoints, step)
    fsspec.core.url_to_fs(url)[0].rm(files(url, name(20), DIGESTS))
    assert names(url) == [name(10)]
    assert step_of(saved(tmp_path / "a", url)) == 20
    assert step_of(saved(tmp_path / "b", url)) == 10
    other = saved(tmp_path / "a", url)
    save(other, 30, epoch=2)
    assert names(url) == [name(10), name(30, 2)]
    left = fsspec.core.url_to_fs(url)[0].ls(files(url), detail=False)
    assert sorted(Path(each).name for each in left) == [name(10), name(30, 2)], (
        "an incomplete copy is removed"
    )


def damage(url: str, step: int, file: str) -> None:
    fs = fsspec.core.url_to_fs(url)[0]
    path = files(url, name(step), file)
    data = bytearray(fs.cat_file(path))
    data[len(data) // 2] ^= 1
    fs.pipe_file(path, bytes(data))


@pytest.mark.parametrize("file", ["__0_0.distcp", DIGESTS])
def test_a_damaged_copy_is_skipped_with_a_warning(
    tmp_path: Path, url: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = saved(tmp_path / "a", url)
    for step in (10, 20):
        save(checkpoints, step)
    damage(url, 20, file)
    assert step_of(saved(tmp_path / "b", url)) == 10
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert line.startswith(f"cannot read the checkpoint {url}/{name(20)}: ")
    assert [path.name for path in (tmp_path / "b").iterdir()] == [name(10)]
    damage(url, 10, file)
    with pytest.raises(OperatorFault, match="cannot read any checkpoint"):
        step_of(saved(tmp_path / "c", url))


def test_a_copy_with_a_missing_file_counts_as_damaged(tmp_path: Path, url: str) -> None:
    checkpoints = saved(tmp_path / "a", url)
    for step in (10, 20):
        save(checkpoints, step)
    fsspec.core.url_to_fs(url)[0].rm(files(url, name(20), "__0_0.distcp"))
    assert step_of(saved(tmp_path / "b", url)) == 10


def test_a_copy_with_a_truncated_list_of_digests_counts_as_damaged(
    tmp_path: Path, url: str
) -> None:
    checkpoints = saved(tmp_path / "a", url)
    for step in (10, 20):
        save(checkpoints, step)
    fs, path = fsspec.core.url_to_fs(url)[0], files(url, name(20), DIGESTS)
    *lines, _ = fs.cat_file(path).splitlines(keepends=True)
    fs.pipe_file(path, b"".join(lines))
    assert step_of(saved(tmp_path / "b", url)) == 10


def test_a_damaged_checkpoint_on_the_disk_is_fetched_again_from_its_copy(
    tmp_path: Path, url: str
) -> None:
    checkpoints = saved(tmp_path / "a", url)
    save(checkpoints, 10)
    (tmp_path / "a" / name(10) / "__0_0.distcp").write_bytes(b"x")
    assert step_of(checkpoints) == 10


def test_copies_of_a_newer_epoch_stay(tmp_path: Path, url: str) -> None:
    older, newer = saved(tmp_path / "a", url), saved(tmp_path / "b", url)
    save(older, 10, epoch=1)
    save(newer, 20, epoch=2)
    save(older, 15, epoch=1)
    save(older, 20, epoch=1)
    assert name(20, 2) in names(url)
    save(newer, 30, epoch=2)
    assert names(url) == [name(20, 2), name(30, 2)]


def test_the_mark_of_a_whole_copy_is_written_last_and_removed_first(
    tmp_path: Path, flaky: type[FlakyFileSystem]
) -> None:
    checkpoints = saved(tmp_path / "a", "flaky://bucket/run", keep=1)
    save(checkpoints, 10)
    puts = [call for call in flaky.calls if call.startswith("put")]
    assert puts[-1] == f"put {DIGESTS}"
    save(checkpoints, 20)
    removed = [call for call in flaky.calls if call.startswith("rm")]
    assert removed[0] == f"rm {DIGESTS}"
    assert removed[-1] == f"rm {name(10)}"


def test_a_temporary_error_is_tried_again(
    tmp_path: Path, flaky: type[FlakyFileSystem], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = saved(tmp_path / "a", "flaky://bucket/run")
    flaky.failing = len(module.PAUSES_S)
    save(checkpoints, 10)
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(lines) == len(module.PAUSES_S)
    assert lines[0].endswith(", trying again: slow down")
    flaky.failing = len(module.PAUSES_S)
    assert step_of(saved(tmp_path / "b", "flaky://bucket/run")) == 10


@pytest.mark.parametrize(("error", "tries"), [(OSError("gone"), 6), (PermissionError("denied"), 1)])
def test_a_store_that_stays_away_is_reported_in_one_line(
    tmp_path: Path, flaky: type[FlakyFileSystem], error: Exception, tries: int
) -> None:
    checkpoints = saved(tmp_path / "a", "flaky://bucket/run")
    flaky.failing, flaky.error = 1000, error
    checkpoints.save(10, 1, state(10), {"run": "a"}, {"rng": [10]})
    line = rf"^cannot write flaky://bucket/run/{name(10)}: {error}$"
    with pytest.raises(StoreFault, match=line):
        checkpoints.settle()
    assert 1000 - flaky.failing == tries
    assert checkpoints.durable == 0
    with pytest.raises(StoreFault, match="cannot list the checkpoints in flaky://bucket/run"):
        bool(saved(tmp_path / "b", "flaky://bucket/run"))


@pytest.mark.parametrize("url", ["nothing://bucket/run", "no scheme://x"])
def test_a_url_that_fsspec_does_not_know_is_the_operators_mistake(url: str) -> None:
    with pytest.raises(OperatorFault, match=r"^learner\.checkpoint_url: "):
        RemoteCheckpoints(url)


def test_the_error_about_a_missing_fsspec_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(OperatorFault, match=r"needs fsspec: .* install .*fsspec"):
        RemoteCheckpoints("s3://bucket/run")


def test_a_learner_moves_to_a_host_with_an_empty_disk(tmp_path: Path, base: Path, url: str) -> None:
    """It ends with the same weights as a learner that stays on its host, and has the same identity."""
    (tmp_path / "snapshots").mkdir()
    config = config_in(tmp_path, base, checkpoint_url=url, checkpoint_every=1)
    straight = ScriptedCoordinator(tmp_path / "taken", lag=1)
    learn(dataclasses.replace(config, checkpoint_url=""), straight)
    expected = load_file(straight.published(config.steps) / "model.safetensors")

    moving, prefetch = ScriptedCoordinator(tmp_path / "taken2", lag=1), BatchPrefetch()
    moving.on_commit = lambda step: prefetch.stop() if step == 2 else None
    first = dataclasses.replace(config, out_dir=tmp_path / "first")
    first.out_dir.mkdir()
    (first.out_dir / ID_FILE).write_text("host-1234\n")
    learn(first, moving, prefetch=prefetch)
    shutil.rmtree(first.out_dir)

    second = dataclasses.replace(config, out_dir=tmp_path / "second")
    with pytest.raises(OperatorFault, match=r"or .* is not empty; use --resume or another"):
        learn(second, moving)
    shutil.rmtree(second.out_dir)
    RemoteCheckpoints(url).bring_identity(second.out_dir)
    assert (second.out_dir / ID_FILE).read_text() == "host-1234\n"
    rows = learn(second, moving, resume=True)
    assert [row["step"] for row in rows] == [3, 4]
    assert moving.said("session") == [0, 2]
    weights = load_file(moving.published(config.steps) / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in expected.items())


def test_the_program_reports_an_unreachable_store_in_one_line(
    config: LearnerConfig,
    served: ScriptedCoordinator,
    tmp_path: Path,
    flaky: type[FlakyFileSystem],
    capsys: pytest.CaptureFixture[str],
) -> None:
    flaky.failing = 1000
    path = write_config(tmp_path / "run.toml", config, checkpoint_url="flaky://bucket/run")
    assert main(["--config", str(path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "learner: cannot list the checkpoints in flaky://bucket/run: slow down"
    )
    assert served.events == []
