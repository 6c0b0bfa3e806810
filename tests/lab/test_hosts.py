"""A learner on two hosts, each in a network of its own: it trains what one process trains."""

import pickle
from pathlib import Path

import pytest
import torch

from echo2d.bench.tiny_model import TinyRecipe, make_tiny_model
from echo2d.sim.scenario import MBIT, PeerSpec
from tests.e2e.test_exactly_once import record, rows_of
from tests.e2e.test_ranks import LOSS_ERROR_MAX, SCRIPT, alone, config_of
from tests.lab.conftest import MakeLab
from tests.loopback.test_learner import write_config

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

HOST = PeerSpec(uplink=1000 * MBIT, downlink=1000 * MBIT, latency_s=0.0005)
STEPS = 3
RENDEZVOUS_PORT = 29500  # the networks are this test's own


def test_two_hosts_train_what_one_process_does(
    tmp_path: Path, make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    base = make_tiny_model(tmp_path / "models", TinyRecipe(accuracy_stop=0.0, batch=8, layers=2))
    batches = record(base, tmp_path, STEPS)
    expected, config = (config_of(each, base, steps=STEPS) for each in (one, two))
    alone(one, expected, batches)

    (two / "batches.pickle").write_bytes(pickle.dumps(batches))
    arguments = [str(two), "--config", str(write_config(two / "run.toml", config))]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "tun0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    lab = make_lab(HOST, HOST)
    programs = lab.programs(tmp_path / "logs")
    meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{lab.address(0)}:{RENDEZVOUS_PORT}"]
    hosts = []
    for node in (0, 1):
        # the names of hosts mean nothing in these networks: each is told its address, and who keeps the store
        here = ["--local-addr", lab.address(node), "--rdzv-conf", f"is_host={'false' if node else 'true'}"]
        with lab.inside(node):
            torchrun = ["-m", "torch.distributed.run", *meet, *here, "--nproc-per-node", "1", str(SCRIPT)]
            hosts.append(programs.start(f"host-{node}", *torchrun, *arguments))
    try:
        assert [host.wait(200) for host in hosts] == [0, 0], (tmp_path / "logs" / "host-0.log").read_text()
    finally:
        programs.kill_all()
    rows = [rows_of(each) for each in (expected, config)]
    assert [row["step"] for row in rows[1]] == list(range(1, STEPS + 1))
    for alone_row, row in zip(*rows, strict=True):
        assert row["batch"] == alone_row["batch"]
        assert row["loss"] == pytest.approx(alone_row["loss"], abs=LOSS_ERROR_MAX)
