"""The programs with `activation.mode = "auto"`: workers on standby, a spot notice, and plans from measurements."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2d.client import Coordinator
from echo2d.demo.processes import Program, Programs, wait_for
from echo2d_lab.standins.fake_learner import FakeLearner
from tests.support.control_link import worker_token
from tests.support.polling import START_S, poll

pytestmark = [pytest.mark.timeout(900)]
T_TRAIN_S, PER_STEP, TOKENS = 0.4, 8, 8
NEEDED = PER_STEP / T_TRAIN_S  # trajectories/s
PLAN_KEYS = {
    "feasible",
    "why_not",
    "mu_min",
    "mu_pool",
    "bubble",
    "t_bcast_s",
    "usd_per_step",
    "workers",
}
CONFIG = """
[run]
run_dir = "{root}/run"
snapshot_root = "{root}/snapshots"
[coordinator]
port = 0
[policy]
staleness_max = 32
publish_every = 1
trajectories_per_step = {per_step}
group_size = 2
filter_zero_variance = false
[sampling]
max_new_tokens = {tokens}
vocab_size = 512
[task]
kind = "echo2d_lab.bench.lab.stub_task:StubTask"
options = {{ prompt_tokens = 4, vocab_size = 512 }}
processes = 1
[activation]
mode = "auto"
learner_usd_per_h = 10.0
[[price]]
workers = "spot-*"
usd_per_h = 0.3
[[price]]
workers = "*"
usd_per_h = 0.9
"""

ABLATED = (
    "--set=dissemination.p2p=false",
    "--set=activation.by_cost=false",
    "--set=dissemination.delta=false",
)


class Site:
    def __init__(self, root: Path, programs: Programs, *flags: str) -> None:
        self.root, self.programs, self.run_dir = root, programs, root / "run"
        (root / "snapshots").mkdir()
        (root / "run.toml").write_text(CONFIG.format(root=root, per_step=PER_STEP, tokens=TOKENS))
        command = ("coordinate", f"--config={root / 'run.toml'}", *flags)
        self.coordinator = programs.start("coordinator", "-m", "echo2d", *command)
        self.url = str(
            json.loads(wait_for(self.run_dir / "coordinator.json", programs, START_S))["url"]
        )
        self.viewer = Coordinator(self.url, token_file=self.run_dir / "tokens" / "viewer.token")

    def join(self, name: str) -> Program:
        token = self.root / f"{name}.token"
        worker_token(self.run_dir, self.url, name, out=token)
        flags = (
            f"--token-file={token}",
            f"--state-dir={self.root / name}",
            f"--name={name}",
            "--engine=fake",
        )
        pace = f"--set=tokens_per_s_max={2 * NEEDED * TOKENS}"
        return self.programs.start(
            name, "-m", "echo2d", "join", self.url, *flags, "--slots=8", pace
        )

    def learner(self) -> FakeLearner:
        token = self.run_dir / "tokens" / "learner.token"
        return FakeLearner(self.url, token, self.root / "snapshots", t_train_s=T_TRAIN_S)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "echo2d", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        return self.viewer.status()

    def active(self) -> set[str]:
        workers = self.status()["workers"]
        return {
            worker["name"]
            for worker in workers
            if worker["active"] and worker["serving"] is not None
        }

    def until_one_is_active(self, prefix: str = "") -> str:
        """Its name, which begins with the prefix: cheaper workers may come after others."""
        found: list[str] = []

        def settled() -> bool:
            found[:] = self.active()
            return len(found) == 1 and found[0].startswith(prefix)

        poll(settled)
        return found[0]


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Its coordinator gets the parameter's flags."""
    with Programs(tmp_path / "logs") as programs:
        made = Site(tmp_path, programs, *getattr(request, "param", ()))
        with made.viewer:
            yield made


def test_spare_workers_replace_one_that_leaves_and_plans_use_measurements(
    site: Site,
) -> None:
    nothing = site.run("plan", "--live", str(site.run_dir))
    assert nothing.returncode == 2
    assert nothing.stderr.startswith(
        "echo2d: this run has not measured t_train_s, t_bcast_s, wire_bytes yet"
    )
    assert nothing.stderr.count("\n") == 1

    programs = {name: site.join(name) for name in ("spot-1", "spot-2", "home")}
    learner = site.learner()
    learner.start()
    site.until_one_is_active("spot-")
    poll(lambda: learner.steps > 3)

    viewer = site.run_dir / "tokens" / "viewer.token"
    for where in ([str(site.run_dir)], [site.url, f"--token-file={viewer}"]):
        poll(lambda where=where: one_is_enough(site, *where))  # type: ignore[misc]
    poll(lambda: says_who_waits(site.run("status", f"--run-dir={site.run_dir}").stdout))

    active = site.until_one_is_active("spot-")
    os.kill(programs[active].pid, signal.SIGUSR1)
    assert programs[active].wait(START_S) == 0
    assert site.until_one_is_active() != active
    steps = learner.steps
    poll(lambda: learner.steps > steps + 2)
    learner.stop()
    assert learner.fault is None
    facts = site.status()
    assert facts["trajectories"]["dropped"] == 0, facts["groups_dropped"]
    assert not {fault["kind"] for fault in facts["faults"]} & {"lease", "result"}
    log = site.coordinator.log.read_text()
    assert f"leaving {active}: SIGUSR1" in log


def one_is_enough(site: Site, *where: str) -> bool:
    """Whether the plan, from what the run has measured by now, is the fleet that the run has.

    Measurements follow what the machine can do at the moment, so the plan is asked for until they say so.
    """
    measured = site.status()["provision"]
    plan = json.loads(site.run("plan", "--live", *where, "--json").stdout)
    assert plan.keys() >= PLAN_KEYS
    usd_per_h = 10.0 + sum(worker["count"] * worker["usd_per_h"] for worker in plan["workers"])
    assert plan["usd_per_h"] == pytest.approx(usd_per_h)
    assert plan["usd_per_step"] == pytest.approx(usd_per_h / 3600 * plan["step_s"])
    return (
        (plan["feasible"], plan["why_not"]) == (True, "")
        and [(worker["name"][:5], worker["count"]) for worker in plan["workers"]] == [("spot-", 1)]
        and plan["mu_min"] == pytest.approx(measured["mu_min"], rel=0.2)
        and plan["usd_per_step"] == pytest.approx((10.0 + 0.3) / 3600 * T_TRAIN_S, rel=0.2)
    )


def says_who_waits(shown: str) -> bool:
    return shown.count("standby") == 2 and "learner-bound" in shown


@pytest.mark.nightly
@pytest.mark.parametrize("site", [ABLATED], indirect=True)
def test_a_run_works_without_p2p_prices_and_deltas(site: Site) -> None:
    for name in ("spot-1", "home"):
        site.join(name)
    learner = site.learner()
    learner.start()
    poll(lambda: max(site.status()["seed_copies"].values(), default=0.0) > 1.9)
    poll(lambda: learner.steps > 2 and len(site.active()) == 1)
    learner.stop()
    facts, log = site.status(), site.coordinator.log.read_text()
    assert max(facts["seed_copies"].values()) < 2.1, (
        "the seed sends to both, and nobody else to anybody"
    )
    assert "goes out in full" in log
    assert "as a delta" not in log
    assert "by rho" not in log, "prices decide nothing"
