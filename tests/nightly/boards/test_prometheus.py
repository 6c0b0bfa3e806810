"""A real Prometheus scrapes a real coordinator and worker, and answers all queries of Grafana."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from echo2d.net.security.auth import read_token_file, write_token_file
from echo2d.runtime.coordinator.main import Opened, core_machine
from tests.support.dashboard import RULE_TESTS, RULES, expressions, rules
from tests.support.free_port import free_port
from tests.support.peer import a_worker
from tests.support.polling import HANG_S
from tests.support.scripted_core import learner, make_config, make_snapshot, serving

CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: echo2d
    authorization: {{type: Bearer, credentials_file: "{secret}"}}
    static_configs: [{{targets: ["{coordinator}"]}}]
  - job_name: echo2d-workers
    static_configs: [{{targets: ["127.0.0.1:{worker}"]}}]
"""
# These panels have data even when a run has published a version, has not trained yet, and has no seed.
ANSWERED = {
    "Committed step",
    "Learner silent for",
    "Alerts",
    "Peers",
    "Samples",
    "Disk free",
    "Event loop",
    "Memory",
    "Alerts by kind",
    "Connected",
    "Seed alive",
}


@dataclass(frozen=True, slots=True)
class Home:
    """The coordinator, as `a_worker` joins it."""

    opened: Opened

    @property
    def url(self) -> str:
        return self.opened.url

    def token(self, path: Path, name: str) -> Path:
        write_token_file(path, self.opened.access.create(name, "worker"))
        return path


def checked(*command: str | Path, given: bytes = b"") -> str:
    """What promtool prints; it ends with 0 and warns of nothing."""
    done = subprocess.run(command, input=given, capture_output=True, check=False)
    text = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, text
    return text


def test_every_alert_fires_exactly_where_it_should(programs: Path) -> None:
    assert f"{len(rules())} rules found" in checked(programs / "promtool", "check", "rules", RULES)
    assert "SUCCESS" in checked(programs / "promtool", "test", "rules", RULE_TESTS)


class Prometheus:
    """A server that runs."""

    def __init__(self, http: aiohttp.ClientSession, port: int) -> None:
        self._http, self._url = http, f"http://127.0.0.1:{port}/api/v1"

    async def ask(self, expression: str) -> list[Any]:
        """The result. AssertionError: the expression is wrong."""
        async with self._http.get(f"{self._url}/query", params={"query": expression}) as response:
            found = await response.json()
        assert found["status"] == "success", f"{expression}: {found}"
        result: list[Any] = found["data"]["result"]
        return result

    async def until(self, expression: str) -> None:
        """Waits until the expression has a result."""
        async with asyncio.timeout(HANG_S):
            while True:
                try:
                    if await self.ask(expression):
                        return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)


@asynccontextmanager
async def prometheus(program: Path, folder: Path, config: str) -> AsyncIterator[Prometheus]:
    port = free_port()
    await asyncio.to_thread((folder / "prometheus.yml").write_text, config)
    process = await asyncio.create_subprocess_exec(
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as http:
            yield Prometheus(http, port)
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.may_block
async def test_prometheus_answers_every_query_of_grafana(programs: Path, tmp_path: Path) -> None:
    config, port = make_config(tmp_path), free_port()
    snapshot = make_snapshot(tmp_path / "out" / "0")
    secret = tmp_path / "secret"
    async with serving(config, core_machine) as opened:
        async with learner(config.run.run_dir, opened) as client:
            await client.open_session(0)
            await client.publish(0, snapshot)
        viewer = read_token_file(config.run.run_dir / "tokens" / "viewer.token")
        secret.write_text(viewer.secret)
        text = CONFIG.format(
            rules=RULES,
            secret=secret,
            coordinator=opened.url.removeprefix("http://"),
            worker=port,
        )
        async with (
            a_worker(Home(opened), tmp_path / "box", metrics_port=port),
            prometheus(programs / "prometheus", tmp_path, text) as server,
            aiohttp.ClientSession() as http,
        ):
            await server.until("sum(up) == 2 and on() echo2d_connected == 1")
            # A rate needs two scrapes.
            await server.until("min(count_over_time(up[1m])) > 3")
            empty = {title async for title, found in answers(server) if not found}
            assert empty.isdisjoint(ANSWERED), empty & ANSWERED
            for expression in rules().values():
                await server.ask(expression)
            for url, headers in (
                (opened.url, {"Authorization": f"Bearer {viewer.secret}"}),
                (f"http://127.0.0.1:{port}", {}),
            ):
                async with http.get(f"{url}/metrics", headers=headers) as response:
                    metrics = await response.read()
                assert checked(programs / "promtool", "check", "metrics", given=metrics) == ""


async def answers(server: Prometheus) -> AsyncIterator[tuple[str, bool]]:
    """Each panel, with whether any of its expressions has a result."""
    found: dict[str, bool] = {}
    for title, expression in expressions():
        found[title] = bool(await server.ask(expression)) or found.get(title, False)
    for title, answered in found.items():
        yield title, answered
