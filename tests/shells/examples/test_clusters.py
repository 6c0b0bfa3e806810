"""The files of examples/clusters name things that echo2d has, and their scripts pass signals on.

Stand-ins replace `echo2d` and Slurm. `make nightly-clusters` uses the clusters' own tools.
"""

import base64
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.config.worker import WorkerConfig
from echo2d.learner.config import LearnerConfig
from echo2d.runtime.process.lifecycle import EXIT_S_MAX, STOP_S_MAX
from tests.support.commands import wrong
from tests.support.paths import REPO
from tests.support.polling import HANG_S, poll

yaml = pytest.importorskip("yaml")

CLUSTERS = REPO / "examples" / "clusters"
WORKERS, LEARNER = CLUSTERS / "slurm" / "workers.sbatch", CLUSTERS / "slurm" / "learner.sbatch"
MANIFESTS = sorted((CLUSTERS / "kubernetes").glob("*.yaml"))
TOKEN = '{"name": "boxes"}\n'
# Says how it was started and which signals came; it ends 0.3 s after them, as a worker with work to finish.
STAND_IN = """#!/usr/bin/env bash
for name in TERM USR1; do trap "echo $name >>\\"$SEEN\\"; ending=yes" $name; done
echo "$(basename "$0") $*" >>"$SEEN"
[ -z "${ENDS_WITH:-}" ] || exit "$ENDS_WITH"
while [ -z "${ending:-}" ]; do sleep 0.1; done
sleep 0.3
"""


def documents() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text())


def containers() -> Iterator[tuple[str, list[str]]]:
    """The name and the command of each container that runs echo2d, as the image starts it."""
    for document in documents():
        if document["kind"] == "StatefulSet":
            pod = document["spec"]["template"]["spec"]
            for each in [*pod.get("initContainers", []), *pod["containers"]]:
                words = [*each.get("command", ["echo2d"]), *each.get("args", [])]
                if words[0] != "sh":
                    yield each["name"], words


def script_commands(text: str) -> list[list[str]]:
    """The commands of echo2d that a shell script starts."""
    found = re.findall(
        r"^ *(?:exec )?((?:\S*/)?(?:echo2d|python) .+?)(?: &)?$",
        text.replace("\\\n", " "),
        re.MULTILINE,
    )
    return [shlex.split(line) for line in found]


def commands() -> list[list[str]]:
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    return [
        *script_commands(WORKERS.read_text()),
        *script_commands(LEARNER.read_text()),
        *script_commands(task["run"]),
        *(words for _, words in containers()),
    ]


def of_learner(words: list[str]) -> list[str]:
    """The learner's own command, which torchrun starts for each GPU; other commands as they are."""
    if "echo2d.learner.torchrun" not in words:
        return words
    return ["echo2d", "learn", *words[words.index("echo2d.learner") + 1 :]]


def settings(words: list[str]) -> list[str]:
    """What its --set options say, with an address for each variable."""
    text = re.sub(r"\$\w+|\$\(\w+\)", "10.0.0.1", " ".join(words).replace("--set ", "--set="))
    return [each.removeprefix("--set=") for each in text.split() if each.startswith("--set=")]


def test_every_command_exists_with_its_options(tmp_path: Path) -> None:
    found = commands()
    assert [each[1] for each in map(of_learner, found)] == [
        *("join", "coordinate", "learn", "join", "coordinate", "learn", "join")
    ]
    for words in map(of_learner, found):
        # A variable is one word, "$@" are options of the caller's.
        assert wrong(shlex.join(word for word in words if word != "$@")) == "", words
        if words[1] == "join":
            given = {"token_file": Path("t"), "state_dir": Path("s")}
            WorkerConfig.load(None, given, settings(words))
        else:
            (run,) = [each for each in documents() if each["kind"] == "ConfigMap"]
            (tmp_path / "run.toml").write_text(run["data"]["run.toml"])
            CoordinatorConfig.load(tmp_path / "run.toml", settings(words))
            LearnerConfig.load(tmp_path / "run.toml", settings(words))


def test_the_manifests_use_each_others_names() -> None:
    kinds = {(each["kind"], each["metadata"]["name"]): each for each in documents()}
    for name in ("echo2d-worker", "echo2d-learner"):
        spec = kinds["StatefulSet", name]["spec"]
        pod, labels = spec["template"]["spec"], spec["template"]["metadata"]["labels"]
        service = kinds["Service", spec["serviceName"]]["spec"]
        assert labels == spec["selector"]["matchLabels"] == service["selector"]
        assert pod["terminationGracePeriodSeconds"] > STOP_S_MAX + EXIT_S_MAX
        there = {each["name"] for each in (*pod["volumes"], *_metadata(spec))}
        for each in pod["containers"]:
            assert {mount["name"] for mount in each["volumeMounts"]} <= there
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in kinds
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in kinds
    (join,) = [words for name, words in containers() if name == "worker"]
    assert join[2] == "https://echo2d-learner:7700"
    ports = kinds["Service", "echo2d-learner"]["spec"]["ports"]
    assert [each["port"] for each in ports] == [7700, 7701]


def _metadata(spec: dict[str, Any]) -> list[dict[str, str]]:
    return [each["metadata"] for each in spec["volumeClaimTemplates"]]


def test_the_job_of_skypilot_joins_with_the_token_that_it_is_given(tmp_path: Path) -> None:
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    program = tmp_path / "echo2d-venv" / "bin" / "echo2d"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN)
    program.chmod(0o755)
    environment = {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "SEEN": str(tmp_path / "seen"),
        "ENDS_WITH": "2",
        "ECHO2D_URL": "https://10.0.0.1:7700",
        "ECHO2D_TOKEN": base64.b64encode(TOKEN.encode()).decode(),
    }
    done = subprocess.run(["bash", "-c", task["run"]], env=environment, check=False)
    assert done.returncode == 2
    assert (tmp_path / "seen").read_text().startswith("echo2d join https://10.0.0.1:7700 --token")
    assert (tmp_path / "box.token").read_text() == TOKEN
    assert (tmp_path / "box.token").stat().st_mode & 0o077 == 0


class Job:
    """A batch script that runs in a process group of its own, with stand-ins for all that it starts."""

    def __init__(self, folder: Path, script: Path, **environment: str) -> None:
        self._seen = folder / "seen"
        bin_ = folder / "bin"
        bin_.mkdir()
        for name in ("echo2d", "python"):
            (bin_ / name).write_text(STAND_IN)
        (bin_ / "scontrol").write_text('#!/bin/sh\necho "scontrol $*" >>"$SEEN"\n')
        for each in bin_.iterdir():
            each.chmod(0o755)
        (folder / "url").write_text("https://10.0.0.1:7700\n")
        slurm = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
        self.process = subprocess.Popen(
            ["bash", str(script), str(folder)],
            env={
                "PATH": f"{bin_}:/usr/bin:/bin",
                "SEEN": str(self._seen),
                "ECHO2D_ADDRESS": "10.0.0.2",
                **slurm,
                **environment,
            },
            start_new_session=True,
        )

    def seen(self) -> list[str]:
        return self._seen.read_text().splitlines() if self._seen.exists() else []

    def wait_until_started(self, programs: int) -> None:
        poll(lambda: len(self.seen()) >= programs)

    def end(
        self, kill: Callable[[int, int], None], number: signal.Signals
    ) -> tuple[int, list[str]]:
        """Its exit code after the signal, and all that was seen but the starts."""
        kill(self.process.pid, number)
        code = self.process.wait(HANG_S)
        return code, [each for each in self.seen() if not each.startswith(("echo2d", "python"))]


def test_a_worker_finishes_its_work_before_the_time_limit_and_is_queued_again(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, WORKERS)
    job.wait_until_started(1)
    assert f"--state-dir {tmp_path}/workers/3 --name slurm-3" in job.seen()[0]
    assert job.end(os.kill, signal.SIGUSR1) == (0, ["USR1", "scontrol requeue 7_3"])


def test_a_worker_that_the_operator_drains_is_not_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path, WORKERS)
    job.wait_until_started(1)
    assert job.end(os.kill, signal.SIGUSR2) == (0, ["USR1"])


def test_scancel_sends_a_worker_one_sigterm(tmp_path: Path) -> None:
    """A second one would end it at once."""
    job = Job(tmp_path, WORKERS)
    job.wait_until_started(1)
    assert job.end(os.killpg, signal.SIGTERM) == (0, ["TERM"])


@pytest.mark.parametrize("code", [0, 2])
def test_a_worker_that_has_ended_for_good_is_not_started_again(tmp_path: Path, code: int) -> None:
    job = Job(tmp_path, WORKERS, ENDS_WITH=str(code))
    assert job.process.wait(HANG_S) == code
    assert len(job.seen()) == 1


def test_the_learner_is_stopped_before_the_coordinator_and_queued_again(tmp_path: Path) -> None:
    job = Job(tmp_path, LEARNER)
    job.wait_until_started(2)
    assert (tmp_path / "url").read_text() == "https://10.0.0.2:7700\n"
    assert job.end(os.kill, signal.SIGUSR1) == (0, ["TERM", "TERM", "scontrol requeue 7"])


def test_scancel_sends_learner_and_coordinator_one_sigterm_each(tmp_path: Path) -> None:
    job = Job(tmp_path, LEARNER)
    job.wait_until_started(2)
    assert job.end(os.killpg, signal.SIGTERM) == (0, ["TERM", "TERM"])


@pytest.mark.parametrize("code", [0, 2])
def test_a_learner_that_has_ended_for_good_ends_the_job(tmp_path: Path, code: int) -> None:
    job = Job(tmp_path, LEARNER, ENDS_WITH=str(code))
    assert job.process.wait(HANG_S) == code
