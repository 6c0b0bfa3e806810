"""The worker's process: how it ends, which coordinator it obeys, and the mistakes that it refuses at the start."""

import asyncio
import dataclasses
import logging
import os
import signal
import stat
from pathlib import Path

import aiohttp
import pytest

from echo2d.config.worker import WorkerConfig
from echo2d.core.protocol.control_messages import Goodbye, RefitDone, Refused
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import read_token_file, write_token_file
from echo2d.runtime.peer.state_dir import StateDir
from echo2d.runtime.worker.main import _check_hosts, run_worker
from tests.support.fake_coordinator import CoordinatorDouble
from tests.support.free_port import free_port
from tests.support.peer import a_seed, config_of, spread


async def test_a_revoked_token_ends_the_worker_with_one_line(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    config = await config_of(double, tmp_path / "one")
    await asyncio.to_thread(double.access.revoke, "one")
    with pytest.raises(OperatorFault, match="token one was revoked"):
        await run_worker(config)


async def test_the_daemon_serves_until_sigterm(
    double: CoordinatorDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    port = free_port()
    config = dataclasses.replace(await config_of(double, tmp_path / "one"), metrics_port=port)
    async with a_seed(double), asyncio.TaskGroup() as tasks:
        daemon = tasks.create_task(run_worker(config))
        names = await double.peers(2)
        assert await answer(port, "readyz") == "no version is served yet\n"
        await spread(double, 0, names["seed"], names["one"])
        await double.until_said(RefitDone)
        assert "echo2d_serving_version 0.0" in await answer(port, "metrics")
        assert await answer(port, "healthz") == await answer(port, "readyz") == "ok\n"
        os.kill(os.getpid(), signal.SIGTERM)
        await double.until_said(Goodbye)
        double.sessions.close(double.connected[names["one"]])
        assert await daemon == 0
    listen = double.hellos[names["one"]].listen
    assert listen is not None
    assert any(
        message.endswith(f" listen={listen.host}:{listen.port}") for message in caplog.messages
    )


async def answer(port: int, page: str) -> str:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{port}/{page}") as response,
    ):
        return await response.text()


async def test_a_permanently_refused_session_ends_the_daemon(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    config = await config_of(double, tmp_path / "one")
    async with asyncio.TaskGroup() as tasks:
        daemon = tasks.create_task(_fault_of(config))
        names = await double.peers(1)
        double.send(names["one"], Refused("revoked", "token one was revoked", permanent=True))
        assert "refused this peer (revoked)" in await daemon


async def _fault_of(config: WorkerConfig) -> str:
    with pytest.raises(OperatorFault) as fault:
        await run_worker(config)
    return str(fault.value)


async def test_a_second_worker_in_a_state_directory_is_refused(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    config = await config_of(double, tmp_path / "one")
    await asyncio.to_thread(config.state_dir.mkdir)
    other = await asyncio.to_thread(StateDir, config.state_dir)
    assert stat.S_IMODE((await asyncio.to_thread(config.state_dir.stat)).st_mode) == 0o700
    with pytest.raises(OperatorFault, match="is in use by another worker"):
        await run_worker(config)
    other.close()


async def test_the_token_file_gives_the_url_unless_one_is_given(
    double: CoordinatorDouble, tmp_path: Path
) -> None:
    config = dataclasses.replace(await config_of(double, tmp_path / "one"), url="")
    token = await asyncio.to_thread(read_token_file, config.token_file)
    for url, complaint in (
        ("", "names no coordinator"),
        ("http://203.0.113.9:1", "'203.0.113.9' is"),
    ):
        changed = dataclasses.replace(token, url=url)
        await asyncio.to_thread(write_token_file, config.token_file, changed)
        with pytest.raises(OperatorFault, match=complaint):
            await run_worker(config)


async def test_a_server_beyond_loopback_has_tls_or_is_trusted_by_name(
    double: CoordinatorDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = "http://203.0.113.7:8000"
    config = await config_of(double, tmp_path / "one")
    config = dataclasses.replace(config, engine="sglang", engine_url=url)
    with pytest.raises(OperatorFault, match=rf"{url} is not loopback.*no TLS.*--trust-network"):
        await run_worker(config)
    trusted = dataclasses.replace(config, trust_network=True)
    _check_hosts(trusted)
    assert caplog.text.count(f"trust_network urls={url}") == 1
    for safe in ("https://203.0.113.7:8000", "http://127.0.0.1:8000", "http://localhost:8000"):
        _check_hosts(dataclasses.replace(config, engine_url=safe))


@pytest.mark.parametrize("change", [{"url": "http://203.0.113.9:1"}, {"listen_host": "0.0.0.0"}])
async def test_a_worker_connects_off_loopback_only_with_tls_or_by_an_explicit_option(
    double: CoordinatorDouble, tmp_path: Path, change: dict[str, str]
) -> None:
    config = await config_of(double, tmp_path / "one")
    with pytest.raises(OperatorFault, match=r"is not loopback.*no TLS.*--no-tls"):
        await run_worker(dataclasses.replace(config, **change))  # type: ignore[arg-type]
