"""Learners' requests to the coordinator's shell: versions, around a scripted core; all, around the real one."""

import asyncio
import threading
from pathlib import Path

import aiohttp
import pytest

from echo2d.client import Fenced, PeerFault, connection
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import PublishSeq
from echo2d.core.cluster.events import (
    CopyLost,
    DeleteVersion,
    Persist,
    PublishAsked,
    Reply,
    SyncVersion,
    VersionPublished,
)
from echo2d.core.coordinator.events import CheckpointAsked, CoordinatorAction
from echo2d.core.protocol.builds import OURS_AS_LEARNER_API, Build, to_install
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import read_token_file
from echo2d.runtime.coordinator import version_publisher
from echo2d.runtime.coordinator.main import core_machine
from echo2d.runtime.run_dir.version_files import VersionFiles
from echo2d.this_build import THIS_BUILD
from tests.support.polling import HANG_S
from tests.support.scripted_core import (
    Script,
    config,
    learner,
    make_config,
    make_snapshot,
    names,
    run_dir,
    script,
    serving,
)

__all__ = ["config", "run_dir", "script"]


def published(event: PublishAsked) -> list[CoordinatorAction]:
    record = VersionPublished(
        PublishSeq(event.request + 1),
        event.epoch,
        event.version,
        event.digest,
        event.path,
        event.full_bytes,
    )
    return [
        Persist(record),
        Reply(event.request, 200, {"version": event.version, "digest": event.digest.hex()}),
    ]


async def test_a_learner_of_another_build_gets_both_builds_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make_config(tmp_path)
    async with serving(here, core_machine) as opened:
        monkeypatch.setattr(connection, "OURS_AS_LEARNER_API", Build(12, 11))
        async with learner(here.run.run_dir, opened) as coordinator:
            with pytest.raises(OperatorFault) as refused:
                await coordinator.open_session(0)
            assert (await coordinator.status())["epoch"] == 0, "anybody may look"
    assert str(refused.value) == (
        f"this learner is echo2d {THIS_BUILD.name} (learner API 12); the coordinator is "
        f"echo2d {THIS_BUILD.name} (learner API {OURS_AS_LEARNER_API.protocol}): "
        f"install {to_install(THIS_BUILD, on_a_box=False)}"
    )


async def test_a_published_version_is_kept_until_the_core_releases_it(
    config: CoordinatorConfig,
    script: Script,
    tmp_path: Path,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deleted, delete = threading.Event(), VersionFiles.delete

    def delete_and_tell(files: VersionFiles, path: str) -> None:
        delete(files, path)
        deleted.set()

    monkeypatch.setattr(VersionFiles, "delete", delete_and_tell)
    script.on[PublishAsked] = published
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        answered = await client.publish(0, snapshot)
        event = await script.hears(PublishAsked)
        assert answered.digest == event.digest.hex()
        kept = run_dir / event.path
        assert names(kept) == names(snapshot)
        script.on[CheckpointAsked] = lambda asked: [
            DeleteVersion(event.path),
            Reply(asked.request, 200, {}),
        ]
        await client.checkpoint(0)
        assert await asyncio.to_thread(deleted.wait, 10.0)
        assert not kept.exists()


async def test_a_damaged_copy_is_reported_to_the_core_at_once(
    config: CoordinatorConfig, script: Script, tmp_path: Path, run_dir: Path
) -> None:
    script.on[PublishAsked] = lambda event: [
        *published(event),
        SyncVersion(event.path, digest_of(b"what was published")),
    ]
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        await client.publish(0, snapshot)
        event = await script.hears(PublishAsked)
        assert await script.hears(CopyLost) == CopyLost(event.path)
        assert not (run_dir / event.path).exists()


async def test_a_stopping_coordinator_says_that_it_syncs_the_last_version(
    config: CoordinatorConfig,
    script: Script,
    tmp_path: Path,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "echo2d.coordinator")
    script.on[PublishAsked] = published
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        await client.publish(0, snapshot)
        event = await script.hears(PublishAsked)
        assert "syncing" not in caplog.text
    assert f"syncing version=0 bytes={event.full_bytes}: " in caplog.text
    assert names(run_dir / "synced") == [".boot", Path(event.path).name]


async def test_a_stopping_coordinator_does_not_wait_for_ever_for_a_slow_disk(
    config: CoordinatorConfig,
    script: Script,
    tmp_path: Path,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = threading.Event()
    monkeypatch.setattr(VersionFiles, "sync", lambda *_: written.wait(HANG_S))
    monkeypatch.setattr(version_publisher, "SYNC_AT_END_S_MAX", 0.05)
    script.on[PublishAsked] = published
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        await client.publish(0, snapshot)
    written.set()
    assert "version 0 is not synced in 0.05 s" in caplog.text


async def test_a_refused_version_leaves_nothing(
    config: CoordinatorConfig, script: Script, tmp_path: Path, run_dir: Path
) -> None:
    refusal = {"error": "fenced", "detail": "epoch 2 is in force"}
    script.on[PublishAsked] = lambda event: [Reply(event.request, 409, refusal)]
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        with pytest.raises(Fenced, match="epoch 2"):
            await client.publish(0, snapshot)
    assert names(run_dir / "versions") == []


async def test_a_version_that_cannot_be_published_is_refused_in_one_line(
    config: CoordinatorConfig, script: Script, tmp_path: Path, run_dir: Path
) -> None:
    outside = await asyncio.to_thread(make_snapshot, tmp_path / "elsewhere")
    no_tokenizer = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    (no_tokenizer / "tokenizer.json").unlink()
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        with pytest.raises(PeerFault, match="inside the snapshot root"):
            await client.publish(0, outside)
        with pytest.raises(PeerFault, match=r"has no tokenizer\.json"):
            await client.publish(0, no_tokenizer)
        with pytest.raises(PeerFault, match="too long"):
            await client.publish(0, tmp_path / "out" / ("x" * 5000))
        assert (await client.status())["epoch"] == 0
    assert script.heard.empty()
    assert names(run_dir / "versions") == []


async def test_a_learner_on_another_host_publishes_by_upload(
    config: CoordinatorConfig,
    script: Script,
    tmp_path: Path,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echo2d.client.async_coordinator.is_loopback", lambda host: False)
    script.on[PublishAsked] = published
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, script.make) as opened, learner(run_dir, opened) as client:
        await client.publish(0, snapshot)
        event = await script.hears(PublishAsked)
        assert (run_dir / event.path / "model.safetensors").stat().st_nlink == 1
    assert names(run_dir / "uploads") == []


# --- the real core --------------------------------------------------------------------------------------------------


async def test_a_learner_publishes_to_the_real_core_across_a_restart(
    config: CoordinatorConfig, tmp_path: Path, run_dir: Path
) -> None:
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    async with serving(config, core_machine) as opened, learner(run_dir, opened) as client:
        session = await client.open_session(0)
        assert (session.epoch, session.staleness_max, session.group_size) == (1, 3, 2)
        first = await client.publish(0, snapshot)
        assert await client.publish(0, snapshot) == first
        assert len(names(run_dir / "versions")) == 1
        status = await client.status()
        assert status["newest_version"]["digest"] == first.digest
        assert status["run_id"] == session.run_id
    async with serving(config, core_machine) as opened, learner(run_dir, opened) as client:
        with pytest.raises(Fenced):
            await client.publish(0, snapshot)
        assert (await client.status())["newest_version"]["digest"] == first.digest
        assert len(names(run_dir / "versions")) == 1
        assert (await client.open_session(0)).epoch == 2
        async with aiohttp.ClientSession() as http:
            secret = (
                await asyncio.to_thread(read_token_file, run_dir / "tokens" / "viewer.token")
            ).secret
            async with http.get(
                f"{opened.url}/metrics", headers={"Authorization": f"Bearer {secret}"}
            ) as response:
                text = await response.text()
        assert 'echo2d_events_total{kind="SessionAsked"} 1.0' in text
        assert "echo2d_epoch 2.0" in text


async def test_uploads_of_a_fenced_learner_are_refused(
    config: CoordinatorConfig, tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "echo2d.client.async_coordinator.is_loopback", lambda host: False
    )  # so that it uploads
    snapshot = await asyncio.to_thread(make_snapshot, tmp_path / "out" / "0")
    (snapshot / "big.txt").write_bytes(bytes(32 << 20))
    async with (
        serving(config, core_machine) as opened,
        learner(run_dir, opened) as old,
        learner(run_dir, opened) as new,
    ):
        await old.open_session(0)
        await new.open_session(0)
        with pytest.raises(Fenced, match="epoch 2 is in force"):
            await old.publish(0, snapshot)
        assert names(run_dir / "uploads") == []
        monkeypatch.setattr("echo2d.client.async_coordinator.is_loopback", lambda host: True)
        with pytest.raises(Fenced, match="epoch 2 is in force"):
            await old.publish(0, tmp_path / "nowhere")  # it is not even looked at
        assert (await new.publish(0, snapshot)).version == 0


async def test_a_learner_of_another_run_is_refused_with_the_reason(
    config: CoordinatorConfig, run_dir: Path
) -> None:
    async with serving(config, core_machine) as opened, learner(run_dir, opened) as client:
        with pytest.raises(
            OperatorFault,
            match="cannot resume: this run has come to step 0; step 9 must be another",
        ):
            await client.open_session(9)
        assert (await client.status())["epoch"] == 0
