"""`echo2d keep restore` asks the coordinator at the run's address whether it belongs to this run."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.cli.keeping import _run_at
from echo2d.client import connection
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import TokenFile, read_token_file, write_token_file
from echo2d.runtime.coordinator.main import core_machine
from echo2d.runtime.run_dir.backup import back_up
from echo2d.views import watch
from tests.support.scripted_core import config, serving

__all__ = ["config"]


def keep(run_dir: Path, backup: Path) -> None:
    back_up(run_dir, backup, learner_dir=None, reuse=None, tell=lambda _: None)


async def test_a_server_that_accepts_connections_without_a_status_may_be_the_runs_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "viewer.token"
    await asyncio.to_thread(write_token_file, token, TokenFile("v", "viewer", "secret", "00" * 32))
    # Connections wait in its queue, and are never answered.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(watch, "WATCH_PATIENCE_S", 0.1)
        monkeypatch.setattr(connection, "ANSWER_SILENCE_S_MAX", 0.1)
        with pytest.raises(
            OperatorFault, match=r"does not say which run it belongs to .* --not-running"
        ):
            await asyncio.to_thread(_run_at, url, token)
    assert await asyncio.to_thread(_run_at, url, token) is None


@pytest.mark.parametrize("token", ["same", "made later"])
async def test_a_run_whose_coordinator_answers_is_not_restored_beside_it(
    config: CoordinatorConfig, tmp_path: Path, token: str
) -> None:
    backup = tmp_path / "backup"
    async with serving(config, core_machine) as opened:
        await asyncio.to_thread(keep, config.run.run_dir, backup)
        viewer = backup / "run" / "tokens" / "viewer.token"
        kept = await asyncio.to_thread(read_token_file, viewer)
        secret = kept.secret if token == "same" else "of another day"
        await asyncio.to_thread(
            write_token_file, viewer, replace(kept, url=opened.url, secret=secret)
        )
        asked = ["keep", "restore", str(backup), "--run-dir", str(tmp_path / "new")]
        # The run directory is on another host.
        gone = config.run.run_dir.rename(tmp_path / "elsewhere")
        ended = await asyncio.to_thread(CliRunner().invoke, main, asked)
        gone.rename(config.run.run_dir)
        assert ended.exit_code == 2
        words = {"same": "still runs at", "made later": "add --not-running"}[token]
        assert words in ended.output
        assert not (tmp_path / "new").exists()
