"""A run is backed up while it trains, all processes are killed, and the restored run continues: the books balance."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.client import Coordinator
from echo2d.demo.processes import Programs
from echo2d.demo.results import read_rows
from echo2d.demo.tiny_model import make_tiny_model
from echo2d.store.ledger_copy import SKIPPED
from tests.support.connection_tap import Tap
from tests.support.crash import (
    CHECKPOINT_EVERY,
    STEP_FLOOR_S,
    STEPS,
    CrashSite,
    balance,
    read_story,
    settle,
    watch_ledger,
)
from tests.support.polling import HANG_S
from tests.support.programs import run
from tools.replay import main as replay

WORKERS = 2
FLOOR, SLOW_FLOOR = f"step_floor_s = {STEP_FLOOR_S}", "step_floor_s = 2.0"

pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CrashSite]:
    model = make_tiny_model(Path.home() / ".cache" / "echo2d")
    with Programs(tmp_path / "logs") as programs:
        yield CrashSite(tmp_path, model, programs)


def kill_all(programs: Programs) -> None:
    for program in programs:
        program.kill()
    for program in programs:
        program.wait(10.0)


def test_a_run_restored_from_a_backup_goes_on(site: CrashSite, tmp_path: Path) -> None:
    site.learner_table = site.learner_table.replace(FLOOR, SLOW_FLOOR)
    watch_ledger(site.ledger)
    backup, learner_dir = tmp_path / "backup", tmp_path / "learner"
    with Tap(site.run_dir) as site.tap:
        site.coordinate()
        for number in range(WORKERS):
            site.join(f"worker-{number}", "--threads=1")
        site.learn(STEPS)
        site.wait_until_trained(4)
        acknowledged = {*site.tap.acknowledged}
        facts = json.loads(
            run(
                "keep",
                "backup",
                f"--run-dir={site.run_dir}",
                f"--learner-dir={learner_dir}",
                f"--to={backup}",
                "--json",
            )
        )
        # The run went on while the command started.
        assert facts["checkpoint"] in range(CHECKPOINT_EVERY, facts["step"] + 1, CHECKPOINT_EVERY)
        refused = run("keep", "restore", str(backup), "--run-dir=x", "--learner-dir=y", code=2)
        assert "still runs in" in refused
        site.wait_until_trained(facts["step"] + 1)
        kill_all(site.programs)
    then = read_story(backup / "run" / "ledger.sqlite")
    assert f"run {facts['run_id']}" in run("keep", "backup", f"--verify={backup}")

    # Another place on the disk; the boxes have kept what the lost run told them.
    again, learner_again = tmp_path / "again", tmp_path / "learner-again"
    run("keep", "restore", str(backup), f"--run-dir={again}", f"--learner-dir={learner_again}")
    text = site.config.read_text()
    text = text.replace("[run]\n", f'[run]\nrun_dir = "{again}"\n')
    text = text.replace("[learner]\n", f'[learner]\nout_dir = "{learner_again}"\n')
    site.run_dir = again
    with Programs(tmp_path / "logs-again") as site.programs, Tap(again) as site.tap:
        site.config.write_text(text.partition("\n[learner]")[0])
        site.coordinate()
        site.config.write_text(_learner_of(text, site.url()).replace(SLOW_FLOOR, FLOOR))
        for number in range(WORKERS):
            name = f"worker-{number}"
            token, state = tmp_path / f"{name}.token", f"--state-dir={tmp_path / name}"
            site.programs.start(
                name,
                "-m",
                "echo2d",
                "join",
                site.url(),
                f"--token-file={token}",
                state,
                "--threads=1",
            )
        learner = site.programs.start(
            "learner", "-m", "learner", "--config", str(site.config), "--resume"
        )
        site.wait_until(lambda: learner.returncode is not None)
        assert learner.returncode == 0, learner.tail()
        token_file = again / "tokens" / "viewer.token"
        with Coordinator(site.url(), token_file=token_file) as coordinator:
            settle(coordinator, site.ledger, WORKERS)
            # The seconds since the backup are added.
            assert 0 <= coordinator.status()["epoch"] - (1 + SKIPPED + 1) <= HANG_S
        story = read_story(site.ledger)
        assert story[: len(then)] == then, "what was written before the backup has changed"
        rows = read_rows(learner_again / "metrics.jsonl")
        balance(story, rows, acknowledged | site.tap.acknowledged, patience=site.patience)
    assert {path.stat().st_mode & 0o077 for path in (again, backup, learner_again)} == {0}
    assert replay([str(again)]) == 0


def _learner_of(text: str, url: str) -> str:
    """The config with the address at which the coordinator listens now."""
    lines = [f'url = "{url}"' if line.startswith("url = ") else line for line in text.splitlines()]
    return "\n".join(lines) + "\n"
