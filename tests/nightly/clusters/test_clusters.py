"""The files of examples/clusters, read by the clusters' own tools. Slurm runs its jobs; no cloud gets a request."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import REPO
from tests.support.polling import HANG_S, poll
from tests.support.programs import Site
from tests.support.programs import run as echo2d

CLUSTERS = REPO / "examples" / "clusters"
MANIFESTS = sorted((CLUSTERS / "kubernetes").glob("*.yaml"))
SCRIPTS = [*sorted((CLUSTERS / "slurm").glob("*.sbatch")), REPO / "tools" / "clusters" / "setup.sh"]
# A release that has sidecars, and the newest one that the schemas know.
RELEASES = ("1.29.0", "1.37.0")
LONG = 100_000  # steps of a run that does not end by itself

# SkyPilot fetches the names of accelerators from the network unless they are there.
ACCELERATORS = "AcceleratorName,Clouds\nL4,GCP\nA10G,AWS\nRTX4090,RunPod\n"
READS_TASK = """
import sys
import sky
from sky.client.cli import command
from sky.utils import yaml_utils
task = sky.Task.from_yaml_config(
    yaml_utils.read_yaml(sys.argv[1]),
    env_overrides=[("ECHO2D_URL", "https://10.0.0.1:7700")],
    secrets_overrides=[("ECHO2D_TOKEN", "e30=")],
)
print(sorted(name for each in task.resources for name in each.accelerators))
command.jobs_launch.make_context("sky jobs launch", sys.argv[2:])
"""
LAUNCH = re.compile(r"^ *\$? *sky (jobs launch .+)$", re.MULTILINE)

SLURM_CONF = """
ClusterName=echo2d
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MinJobAge=3600
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 Gres=gpu:4
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


def ended(*command: str | Path, **environment: str) -> str:
    """What the command prints; it ends with 0."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_no_mistake_in_the_scripts(programs: Path, script: Path) -> None:
    assert ended(programs / "shellcheck", script) == ""


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_accepts_every_manifest(programs: Path, manifest: Path, release: str) -> None:
    check = programs / "kubernetes-validate"
    ended(check, "--strict", "--kubernetes-version", release, manifest)


def test_kubernetes_validate_finds_a_planted_mistake(programs: Path, tmp_path: Path) -> None:
    planted = tmp_path / "planted.yaml"
    text = (CLUSTERS / "kubernetes" / "workers.yaml").read_text()
    planted.write_text(text.replace("podManagementPolicy", "podManagmentPolicy"))
    check: list[str | Path] = [programs / "kubernetes-validate", "--strict", planted]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "podManagmentPolicy" in done.stdout + done.stderr


def test_skypilot_reads_its_task_and_the_command_of_the_page(
    programs: Path, tmp_path: Path
) -> None:
    catalog = tmp_path / ".sky" / "catalogs" / "v8" / "common" / "accelerators.csv"
    catalog.parent.mkdir(parents=True)
    catalog.write_text(ACCELERATORS)
    (line,) = LAUNCH.findall(
        (REPO / "docs" / "guide" / "skypilot.md").read_text().replace("\\\n", "")
    )
    options = line.replace("$n", "1").split()[2:]
    task = CLUSTERS / "skypilot.yaml"
    said = ended(
        *(programs / "python", "-c", READS_TASK, task, *options),
        HOME=str(tmp_path),
        ECHO2D_TOKEN="e30=",
        SKYPILOT_DISABLE_USAGE_COLLECTION="1",
    )
    assert said == "['A10G', 'L4', 'RTX4090']\n"


class Slurm:
    """A cluster of one node, this machine, on which terminals stand for four GPUs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        (folder / "slurm.conf").write_text(SLURM_CONF.format(folder=folder, ports=(26917, 26918)))
        (folder / "gres.conf").write_text("NodeName=localhost Name=gpu File=/dev/tty[0-3]\n")
        self._environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        files = {name: self._folder / f"munge.{name}" for name in ("socket", "log", "seed")}
        self._daemons.append(
            self._start(
                *("munged", "--foreground", "--force", f"--key-file={self._folder}/munge.key"),
                *(f"--socket={files['socket']}", f"--log-file={files['log']}"),
                *(f"--seed-file={files['seed']}", f"--pid-file={self._folder}/munge.pid"),
            )
        )
        poll(files["socket"].exists)
        self._daemons.append(self._start("slurmctld", "-D"))
        self._daemons.append(self._start("slurmd", "-D", "-N", "localhost"))
        poll(lambda: "idle" in self._said("sinfo", "--noheader", "--format=%t"))

    def _start(self, *words: str) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, **self._environment}
        with (self._folder / f"{words[0]}.out").open("ab") as log:
            return subprocess.Popen(words, env=environment, stdout=log, stderr=log)

    def _said(self, *words: str) -> str:
        done = subprocess.run(
            words,
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    def run(self, *words: str) -> str:
        return ended(*words, **self._environment)

    def submit(self, script: Path, *words: str, options: str = "") -> str:
        small = "--parsable --mem=0 --cpus-per-task=1"
        command = ["sbatch", *small.split(), f"--chdir={self._folder}", *options.split()]
        return self.run(*command, str(script), *words).strip()

    def fact(self, job: str, name: str) -> str:
        """Such as JobState, of a job."""
        found = re.search(rf"\b{name}=(\S+)", self.run("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def close(self) -> None:
        self._said("scancel", "--user=root")
        deadline = time.monotonic() + HANG_S
        while self._said("squeue", "--noheader").strip() and time.monotonic() < deadline:
            time.sleep(0.5)
        for each in reversed(self._daemons):
            each.terminate()
            each.wait()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    lacking = [each for each in ("munged", "slurmctld", "slurmd") if shutil.which(each) is None]
    if lacking:
        pytest.skip(f"no {', '.join(lacking)}: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root")
    cluster = Slurm(tmp_path / "slurm")
    try:
        cluster.open()
        yield cluster
    finally:
        cluster.close()


def worker_of(site: Site, name: str) -> dict[str, object] | None:
    found = [each for each in site.status()["workers"] if each["name"] == name]
    return found[0] if found else None


def works(site: Site, name: str) -> bool:
    found = worker_of(site, name)
    return found is not None and found["state"] == "joined" and bool(found["accepted"])


@pytest.mark.timeout(900)
def test_slurm_ends_workers_in_order_by_signal_scancel_and_time_limit(
    site: Site, slurm: Slurm, tmp_path: Path
) -> None:
    """By SIGUSR2, by scancel, and before the time limit, after which it starts them again."""
    site.coordinate()
    token = tmp_path / "boxes.token"
    (tmp_path / "url").write_text(site.url())
    create = ("token", "create", "boxes", "--role", "worker", "--run-dir", str(site.run_dir))
    echo2d(*create, "--max-workers", "3", "--out", str(token))
    site.learn(LONG)
    script = CLUSTERS / "slurm" / "workers.sbatch"
    # The run of this test is on loopback, where there is no TLS.
    here = ("--threads", "1", "--set", "device=cpu", "--listen-host", "127.0.0.1")
    jobs = slurm.submit(script, str(tmp_path), *here, options="--array=1-2")
    # Slurm sends the signal up to a minute earlier than it is asked to.
    limited = slurm.submit(
        script, str(tmp_path), *here, options="--array=3 --time=4 --signal=B:USR1@90"
    )
    poll(lambda: all(works(site, f"slurm-{number}") for number in (1, 2, 3)))
    slurm.run("scancel", "--batch", "--signal=USR2", f"{jobs}_1")
    slurm.run("scancel", f"{jobs}_2")
    poll(lambda: slurm.fact(f"{jobs}_1", "JobState") == "COMPLETED")
    poll(lambda: slurm.fact(f"{jobs}_2", "JobState") == "CANCELLED")
    poll(lambda: slurm.fact(f"{limited}_3", "Restarts") == "1")
    logs = {
        number: (tmp_path / "slurm" / f"echo2d-worker-{job}_{number}.log").read_text()
        for number, job in ((1, jobs), (2, jobs), (3, limited))
    }
    for number, reason in ((1, "drained"), (2, "SIGTERM"), (3, "drained")):
        assert f"stopping reason={reason}" in logs[number]
        assert "area=echo2d.worker stopped" in logs[number]
    assert {json.dumps(each["state"]) for each in site.status()["workers"]} == {'"gone"'}
