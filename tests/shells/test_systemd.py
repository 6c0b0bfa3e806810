"""The units start existing commands with valid options, and systemd understands every line of them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import parse_args

from echo2d import cli
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.config.worker import WorkerConfig
from echo2d.learner.__main__ import _parse
from echo2d.learner.config import LearnerConfig
from echo2d.runtime.process.lifecycle import EXIT_S_MAX, STOP_S_MAX
from tests.support.paths import REPO

FOLDER = REPO / "systemd"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
BIN = Path(sys.executable).parent
SYSTEMD_ANALYZE = shutil.which("systemd-analyze", path=f"{os.environ['PATH']}:{BIN}")
NEWER = {
    "RestartSteps",
    "RestartMaxDelaySec",
}  # keys of systemd 254, which older ones say they ignore
TARGETS = ("sysinit", "basic", "shutdown", "multi-user", "network-online")
DROP_INS = {
    "tasks-apart.conf": "echo2d-coordinate.service",
    "several-gpus.conf": "echo2d-learner.service",
    "restart-steps.conf": "echo2d-coordinate.service",
}
EXPOSURE_MAX = {  # by unit, or by drop-in, which its unit then has
    "echo2d-coordinate.service": 1.7,
    "echo2d-learner.service": 2.2,
    "echo2d-join@box.service": 2.2,
    "tasks-apart.conf": 3.2,
    "several-gpus.conf": 2.4,  # any of its processes may notify
}

needs_systemd = pytest.mark.skipif(
    SYSTEMD_ANALYZE is None, reason="no systemd-analyze here (.ci/10-setup.sh gets it)"
)


def keys_of(unit: str) -> dict[str, list[str]]:
    """Every key with its values, in order."""
    found = defaultdict(list)
    for key, value in re.findall(
        r"^(\w+)=(.*)$", (FOLDER / unit).read_text().replace("\\\n", ""), re.MULTILINE
    ):
        found[key].append(value)
    return found


def seconds(span: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(min|h|)", span).groups()  # type: ignore[union-attr]
    return int(number) * {"": 1, "min": 60, "h": 3600}[unit]


def command(unit: str) -> list[str]:
    (line,) = filter(None, keys_of(unit)["ExecStart"])
    return shlex.split(
        line.replace("%i", "box").replace("${CREDENTIALS_DIRECTORY}", "/run/credentials")
    )


def test_each_program_has_a_unit_that_the_deploy_page_names() -> None:
    assert UNITS == ["echo2d-coordinate.service", "echo2d-join@.service", "echo2d-learner.service"]
    page = (REPO / "docs" / "guide" / "deploy.md").read_text()
    assert [path.name for path in FOLDER.iterdir() if path.name not in page] == []


@pytest.mark.parametrize("unit", UNITS[:2])
def test_the_command_of_a_unit_accepts_its_options(unit: str) -> None:
    program, name, *options = command(unit)
    assert Path(program).name == "echo2d"
    taken = cli.main.commands[name].make_context(name, options).params
    assert taken["config"] == Path("/etc/echo2d") / (
        "run.toml" if name == "coordinate" else "box.toml"
    )


def test_the_learner_accepts_the_options_of_its_unit() -> None:
    program, *options = command("echo2d-learner.service")
    assert (Path(program).name, options[0]) == ("echo2d", "learn")
    taken = _parse(options[1:])
    assert (taken.config, taken.resume) == (Path("/etc/echo2d/run.toml"), True)


def test_torchrun_starts_a_learner_with_the_same_options() -> None:
    program, *options = command("several-gpus.conf")
    assert (Path(program).name, options[:2]) == ("python", ["-m", "echo2d.learner.torchrun"])
    taken = parse_args(options[2:])  # type: ignore[no-untyped-call]
    assert (taken.module, taken.training_script, taken.standalone) == (True, "echo2d.learner", True)
    assert ["learn", *taken.training_script_args] == command("echo2d-learner.service")[1:]
    (line,) = keys_of("several-gpus.conf")["Environment"]
    name, stop_s = line.split("=")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 30, "torchrun's own"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(name, stop_s)
        assert LaunchConfig(1, 1, 1).shutdown_timeout == int(stop_s)
    assert int(stop_s) < seconds(keys_of("echo2d-learner.service")["TimeoutStopSec"][0])
    within_s = LearnerConfig.load(FOLDER / "run.toml").stop_within_s
    assert within_s < 30, "also where an older torch has its own"


def test_the_examples_fit_the_units_and_each_other() -> None:
    run, learner = (
        CoordinatorConfig.load(FOLDER / "run.toml"),
        LearnerConfig.load(FOLDER / "run.toml"),
    )
    state = Path("/var/lib") / keys_of("echo2d-coordinate.service")["StateDirectory"][0]
    for path in (run.run.run_dir, run.run.snapshot_root, learner.out_dir):
        assert path.is_relative_to(state), "nothing else can be written"
    assert learner.snapshot_root == run.run.snapshot_root
    assert learner.url == "", "the token file names it"
    name, source = keys_of("echo2d-learner.service")["LoadCredential"][0].split(":")
    assert learner.token_file == Path("/run/credentials/echo2d-learner.service") / name
    assert source == str(run.run.run_dir / "tokens" / "learner.token")
    assert learner.patience_s < seconds(keys_of("echo2d-learner.service")["WatchdogSec"][0])
    worker = WorkerConfig.load(FOLDER / "worker.toml", {"token_file": "t", "state_dir": "s"})
    assert worker.url == f"https://{run.coordinator.host}:{run.coordinator.port}"


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_247_knows_every_key_of_a_unit(unit: str) -> None:
    assert NEWER & keys_of(unit).keys() == set()
    assert keys_of("restart-steps.conf").keys() >= NEWER
    assert seconds(keys_of(unit)["RestartSec"][0]) >= 10, "no other delay is known there"


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_declares_how_it_restarts_and_ends(unit: str) -> None:
    keys = keys_of(unit)
    assert (keys["Type"], keys["Restart"], keys["KillMode"]) == (
        ["notify"],
        ["on-failure"],
        ["mixed"],
    )
    assert keys["RestartPreventExitStatus"] == ["2"], (
        "the operator's mistake would be the same again"
    )
    assert seconds(keys["TimeoutStopSec"][0]) > STOP_S_MAX + EXIT_S_MAX
    assert seconds(keys["WatchdogSec"][0]) > 0


def installed(folder: Path, drop_in: str = "") -> dict[str, str]:
    """The units as an operator installs them, but for where the programs are; the environment to look at them."""
    for unit in UNITS:
        text = (FOLDER / unit).read_text().replace("/opt/echo2d/bin", str(BIN))
        (folder / unit.replace("@", "@box")).write_text(text)
    for target in TARGETS:
        (folder / f"{target}.target").write_text("[Unit]\n")
    if drop_in:
        there = folder / f"{DROP_INS[drop_in]}.d"
        there.mkdir()
        (there / drop_in).write_text(
            (FOLDER / drop_in).read_text().replace("/opt/echo2d/bin", str(BIN))
        )
    return {"PATH": os.environ["PATH"], "SYSTEMD_UNIT_PATH": str(folder)}


def analyze(environment: dict[str, str], *arguments: str) -> str:
    """What it says, but for the keys that are only newer than it is."""
    assert SYSTEMD_ANALYZE is not None
    done = subprocess.run(
        [SYSTEMD_ANALYZE, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    said = [*done.stderr.splitlines(), *done.stdout.splitlines()]
    lines = [
        line for line in said if line and not any(f"Unknown key '{key}'" in line for key in NEWER)
    ]
    return "\n".join([*lines, *([f"exit code {done.returncode}"] if done.returncode else [])])


@needs_systemd
@pytest.mark.parametrize(
    ("unit", "drop_in"), [*((unit, "") for unit in UNITS), *((DROP_INS[it], it) for it in DROP_INS)]
)
def test_systemd_understands_every_line(tmp_path: Path, unit: str, drop_in: str) -> None:
    environment = installed(tmp_path, drop_in)
    assert (
        analyze(environment, "verify", "--man=no", str(tmp_path / unit.replace("@", "@box"))) == ""
    )


@needs_systemd
def test_systemd_finds_a_planted_mistake(tmp_path: Path) -> None:
    environment = installed(tmp_path)
    unit = tmp_path / UNITS[0]
    unit.write_text(unit.read_text().replace("KeyringMode=private", "KeyringMode=prvate"))
    assert "prvate" in analyze(environment, "verify", "--man=no", str(unit))


@needs_systemd
@pytest.mark.parametrize("name", EXPOSURE_MAX)
def test_a_unit_gives_its_program_few_rights(tmp_path: Path, name: str) -> None:
    """systemd's own measure: 0 is shut in, 10 is root; most services of a distribution have 9.6."""
    environment = installed(tmp_path, name if name in DROP_INS else "")
    unit = tmp_path / DROP_INS.get(name, name)
    threshold = round(10 * EXPOSURE_MAX[name])
    said = analyze(
        environment,
        "security",
        "--offline=yes",
        "--no-pager",
        f"--threshold={threshold}",
        str(unit),
    )
    assert "Overall exposure level" in said
    assert "exit code" not in said
