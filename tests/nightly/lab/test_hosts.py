"""A learner on two hosts, each in its own network: it trains the same as one process, and notices a lost host."""

import pickle
import re
from pathlib import Path

import pytest

from echo2d.client import Batch
from echo2d.demo.processes import Program
from echo2d.learner.config import LearnerConfig
from echo2d.plan.kernel.scenario import MBIT, PeerSpec
from echo2d_lab.bench.lab.netlab import Lab
from tests.support.lab import MakeLab
from tests.support.learner import make_base, record, rows_of, write_config
from tests.support.paths import REPO
from tests.support.polling import poll
from tests.support.ranks import LOSS_ERROR_MAX, PROGRAM, alone, config_of

pytestmark = [pytest.mark.timeout(900)]

HOST = PeerSpec(uplink=1000 * MBIT, downlink=1000 * MBIT, latency_s=0.0005)
STEPS = 3
STEPS_LONG = 60  # more than are trained until a host is lost
SILENCE_S = 3.0
PORT = 29500  # where they meet; the networks are this test's own
END_S = 150.0  # torchrun gives its processes 30 s, and is given a minute itself


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models"), layers=2)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "tun0")
    monkeypatch.setenv("PYTHONPATH", str(REPO))


def start_hosts(
    lab: Lab, directory: Path, config: LearnerConfig, batches: list[Batch]
) -> list[Program]:
    """A rank on each. Names of hosts mean nothing here: each is told its address, and who keeps the store."""
    (directory / "batches.pickle").write_bytes(pickle.dumps(batches))
    arguments = [
        *PROGRAM,
        str(directory),
        "--config",
        str(write_config(directory / "run.toml", config)),
    ]
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    programs, hosts = lab.programs(directory / "logs"), []
    for node in (0, 1):
        here = [
            "--local-addr",
            lab.address(node),
            "--rdzv-conf",
            f"is_host={'false' if node else 'true'}",
        ]
        with lab.inside(node):
            torchrun = ["-m", "echo2d.learner.torchrun", *meet, f"{lab.address(0)}:{PORT}", *here]
            hosts.append(programs.start(f"host-{node}", *torchrun, *arguments))
    return hosts


def log_of(directory: Path, node: int) -> str:
    return (directory / "logs" / f"host-{node}.log").read_text()


def test_two_hosts_train_the_same_weights_as_one_process(
    tmp_path: Path, base: Path, make_lab: MakeLab
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    batches = record(base, STEPS)
    expected, config = (config_of(each, base, steps=STEPS) for each in (one, two))
    alone(one, expected, batches)

    hosts = start_hosts(make_lab(HOST, HOST), two, config, batches)
    assert [host.wait(END_S) for host in hosts] == [0, 0], log_of(two, 0)
    rows = [rows_of(each) for each in (expected, config)]
    assert [row["step"] for row in rows[1]] == list(range(1, STEPS + 1))
    for alone_row, row in zip(*rows, strict=True):
        assert row["batch"] == alone_row["batch"]
        assert row["loss"] == pytest.approx(alone_row["loss"], abs=LOSS_ERROR_MAX)


def test_both_hosts_notice_that_the_network_between_them_is_gone(
    tmp_path: Path, base: Path, make_lab: MakeLab
) -> None:
    """Nothing is reset: packets are dropped in silence."""
    config = config_of(tmp_path, base, steps=STEPS_LONG, rank_silence_s=SILENCE_S)
    lab = make_lab(HOST, HOST)
    hosts = start_hosts(lab, tmp_path, config, record(base, STEPS_LONG))
    poll(lambda: "trained step=2" in log_of(tmp_path, 0))
    lab.isolate(1)
    assert [host.wait(END_S) for host in hosts] == [1, 1]
    for node in (0, 1):
        assert re.search(
            f"lost another rank: nothing was heard of rank {1 - node} for 3 s",
            log_of(tmp_path, node),
        )
