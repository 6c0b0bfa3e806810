"""The requests that a worker's token allows cost the loop little, however often they come."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.status.schema import Status
from echo2d.runtime.coordinator.main import core_machine
from tests.support.scripted_core import make_config, serving

ASKED = 200


async def test_the_status_is_not_made_for_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    async with serving(make_config(tmp_path), core_machine) as opened:
        await asyncio.to_thread(opened.access.create, "box", "worker")
        view: Any = opened.coordinator.view
        status = view._status

        def counted(*, now: float) -> Status:
            nonlocal looks
            looks += 1
            found: Status = status(now=now)
            return found

        monkeypatch.setattr(view, "_status", counted)
        for _ in range(ASKED):
            assert opened.coordinator.own_status("box")["run_id"]
    assert 0 < looks < ASKED / 4
