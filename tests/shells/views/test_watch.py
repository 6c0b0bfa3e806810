"""`echo2d status --watch` beside a real coordinator that ends and comes back at another port."""

import asyncio
import json
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from echo2d.errors import OperatorFault
from echo2d.runtime.coordinator.main import core_machine
from echo2d.runtime.run_dir.run_directory import find_coordinator
from echo2d.views.watch import Asker, Away, Screen, status_once, watch
from tests.support.polling import HANG_S
from tests.support.scripted_core import make_config, serving

INTERVAL_S = 0.01


class Noted(Screen):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__(as_json=True)
        self.seen: asyncio.Queue[Mapping[str, Any] | str] = asyncio.Queue()

    def show(self, facts: Mapping[str, Any], *, now: float) -> None:
        super().show(facts, now=now)
        self.seen.put_nowait(facts)

    def away(self, reason: str, *, now: float) -> None:
        super().away(reason, now=now)
        self.seen.put_nowait(reason)

    async def next(self, kind: type) -> Mapping[str, Any] | str:
        async with asyncio.timeout(HANG_S):
            while not isinstance(found := await self.seen.get(), kind):
                pass
            return found


async def test_a_restart_of_the_coordinator_is_shown_as_a_pause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, screen = make_config(tmp_path), Noted()
    find = partial(find_coordinator, config.run.run_dir)
    async with asyncio.TaskGroup() as tasks:
        async with serving(config, core_machine) as opened:
            watching = tasks.create_task(watch(find, screen, interval_s=INTERVAL_S))
            first = await screen.next(dict)
            url = opened.url
        reason = str(await screen.next(str))
        assert str(config.run.run_dir) in reason or url in reason
        async with serving(config, core_machine):
            again = await screen.next(dict)
            watching.cancel()
    assert isinstance(first, dict)
    assert isinstance(again, dict)
    assert first["run_id"] == again["run_id"]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"away_s", "reason"} in [line.keys() for line in lines]
    assert lines[0].keys() == lines[-1].keys()


async def test_a_missing_coordinator_at_the_start_is_the_operators_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2d.views.watch.WATCH_PATIENCE_S", 0.0)
    with pytest.raises(OperatorFault, match="no coordinator runs in"):
        await status_once(partial(find_coordinator, tmp_path))
    config = make_config(tmp_path)
    async with serving(config, core_machine) as opened:
        token = config.run.run_dir / "tokens" / "viewer.token"
        assert (await status_once(lambda: (opened.url, token)))["epoch"] == 0
    with pytest.raises(OperatorFault, match="cannot reach"):
        await status_once(lambda: (opened.url, token))


async def test_a_coordinator_that_hangs_is_shown_as_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is open, and it does not answer."""
    config = make_config(tmp_path)
    async with serving(config, core_machine) as opened, Asker(lambda: at) as asker:
        at = (opened.url, config.run.run_dir / "tokens" / "viewer.token")
        await asker.status()
        monkeypatch.setattr("echo2d.views.watch.ANSWER_S", 0.05)
        with socket.create_server(("127.0.0.1", 0)) as hung:
            at = (f"http://127.0.0.1:{hung.getsockname()[1]}", at[1])
            with pytest.raises(Away, match="no answer from http"):
                await asker.status()
