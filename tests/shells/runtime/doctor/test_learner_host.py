"""`echo2d doctor` on the learner's host: before the start, and beside a running coordinator."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.coordinator.events import SessionAsked
from echo2d.runtime.coordinator.main import core_machine
from echo2d.runtime.doctor import host, learner_host
from echo2d.runtime.doctor.finding import HostFinding
from echo2d.runtime.doctor.learner_host import examine_learner_host, refit_finding
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from tests.support.polling import HANG_S
from tests.support.scripted_core import config, make_config, serving

__all__ = ["config"]


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PROBE_BYTES", 1 << 16)


async def examined(config: CoordinatorConfig) -> dict[str, HostFinding]:
    """The worst finding of each check."""
    order = ("ok", "skipped", "warning", "error")
    found = sorted(await examine_learner_host(config), key=lambda each: order.index(each.level))
    return {each.check: each for each in found}


async def test_ports_are_tried_before_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: Any = taken.getsockname()[1]
        found = await examined(make_config(tmp_path, **{"link.port": port}))
    assert found["coordinator"].level == "skipped"
    assert found["coordinator port"].level == "ok"
    assert found["link port"].level == "error"
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in found["link port"].text
    assert found["tokens"].level == "skipped"


async def test_an_incomplete_base_model_is_an_error(tmp_path: Path) -> None:
    changed = make_config(tmp_path, **{"run.base_model": str(tmp_path)})
    (tmp_path / "config.json").write_text("{}")
    assert (await examined(changed))["model"].level == "ok"
    (tmp_path / "model.safetensors").touch()
    found = (await examined(changed))["model"]
    assert (found.level, "is cut off or damaged" in found.text) == ("error", True)


async def test_a_running_coordinator_is_examined(config: CoordinatorConfig) -> None:
    async with serving(config, core_machine):
        found = await examined(config)
        assert found["coordinator"].level == found["tokens"].level == "ok"
        assert found["ready"].text == "the coordinator is not ready: the seed is away"
        assert found["learner"].level == "skipped"
        assert found["seed port"].todo == "set link.port, so that a firewall can let it in: 7701"
        assert "no learner has opened a session" in found["alerts"].text


async def test_a_silent_learner_is_distinguished_from_one_that_answers(
    config: CoordinatorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config, core_machine) as opened:
        await opened.coordinator.ask(lambda number: SessionAsked(number, 0), timeout_s=HANG_S)
        assert (await examined(config))["learner"].level == "ok"
        monkeypatch.setattr(learner_host, "LEARNER_SILENT_S_MAX", -1.0)
        assert (await examined(config))["learner"].level == "error"


@pytest.mark.parametrize(
    ("pause_s", "recompute_s", "mixes", "level", "todo"),
    [
        (0.3, 0.9, False, "ok", ""),
        (0.3, 9.0, True, "warning", 'set worker.refit_mode = "in_place"'),
        (0.3, 9.0, False, "warning", "set audit.in_place = true in run.toml, then"),
        (9.0, 0.3, True, "warning", "let the worker start it"),
        (0.0, 9.0, True, "warning", "adapters pause nothing"),
    ],
)
def test_dear_refits_are_named_with_what_would_cost_less(
    pause_s: float, recompute_s: float, mixes: bool, level: str, todo: str
) -> None:
    found = refit_finding(pause_s, recompute_s, "box-3", between_s=62.0, mixes=mixes)
    assert (found.level, todo in found.todo) == (level, True)
    assert found.text.startswith(f"box-3 loses {pause_s:.2g} s of pause and {recompute_s:.2g} s of")


async def test_tokens_that_expire_soon_are_reported(config: CoordinatorConfig) -> None:
    def create() -> None:
        table = AccessTable(RunDirectory(config.run.run_dir))
        table.create("soon", "worker", expires_at=time.time() + 3600)
        table.create("later", "worker", expires_at=time.time() + 30 * 86400)

    await asyncio.to_thread(create)
    found = (await examined(config))["tokens"]
    assert (found.level, found.text) == ("warning", "these expire within a week: soon")


async def test_a_disk_without_room_for_two_versions_is_reported(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    version = config.run.run_dir / "versions" / "3-aa"
    version.mkdir(parents=True)
    with (version / "model.safetensors").open("wb") as file:
        file.truncate(1 << 42)
    found = (await examined(config))["run dir"]
    assert (found.level, "two versions will take" in found.text) == ("error", True)


def test_the_command_prints_findings_and_ends_with_their_code(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f"""
        [run]
        run_dir = "{tmp_path}/run"
        snapshot_root = "{tmp_path}/out"
        [coordinator]
        host = "203.0.113.9"
        [sampling]
        vocab_size = 17
        [task]
        kind = "sort_digits"
        """
    )
    result = CliRunner().invoke(main, ["doctor", "--config", str(tmp_path / "run.toml"), "--json"])
    found = json.loads(result.output)
    assert result.exit_code == found["code"] == 1
    assert {"check": "coordinator port", "level": "error"}.items() <= found["findings"][1].items()
    lines = CliRunner().invoke(main, ["doctor", "--config", str(tmp_path / "run.toml")]).output
    assert "error    coordinator port coordinator.host, coordinator.port: cannot listen on" in lines
    assert "-> take an address of this host, and a port that is free" in lines


def test_doctor_without_arguments_says_how_to_use_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "doctor needs --config FILE" in result.output
