"""`echo2d demo`: the loop closes, the books balance, Ctrl-C leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from echo2d.demo.chaos import VICTIM_KINDS
from echo2d.demo.results import read_metrics

pytestmark = [pytest.mark.timeout(900)]
STEPS = 12
FEW_STEPS = 6


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "echo2d", "demo", *arguments]


def all_but_late(trained: int, steps: int) -> bool:
    """Each group of eight may lack the one answer that it has waited for too long."""
    return steps * 256 * 7 // 8 <= trained <= steps * 256


def test_a_short_demo_keeps_its_promises(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = command(f"--steps={STEPS}", "--workers=2", "--json", f"--run-dir={run}")
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == STEPS
    assert result["versions_published"] == STEPS + 1
    assert result["max_staleness"] <= result["staleness_bound"] == 2
    assert sum(result["staleness_histogram"].values()) == result["trajectories"]["trained"]
    assert all_but_late(result["trajectories"]["trained"], STEPS)
    assert result["seed_copies"] <= 1.5
    assert 0 < result["wire_bytes"] < result["full_bytes"]
    assert [(worker["version"], worker["digest_ok"]) for worker in result["workers"]] == [
        (STEPS, True)
    ] * 2
    assert 0 <= result["bubble_ratio"] < 1
    assert (run / "logs" / "coordinator.log").stat().st_size > 0
    the_trained_model_loads(run, tmp_path / "trained")


@pytest.mark.nightly
def test_a_demo_plays_an_environment_of_two_turns(tmp_path: Path) -> None:
    """Also when every process is killed; each trained episode has both turns, and the hint between them."""
    steps, run = 8, tmp_path / "run"
    flags = ("--task=two_turn_digits", f"--steps={steps}", "--workers=2", "--chaos", "--json")
    arguments = command(*flags, f"--run-dir={run}")
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {kill["kind"] for kill in result["kills"]} == set(VICTIM_KINDS)
    assert (result["steps"], result["batches_changed"]) == (steps, 0)
    rows = read_metrics(run / "learner" / "metrics.jsonl")
    assert {(row["turns"], row["given_tokens"]) for row in rows} == {(2.0, 10.0)}


def the_trained_model_loads(run: Path, directory: Path) -> None:
    """What `echo2d keep export` writes is the last version, and transformers loads it."""
    export = ["keep", "export", "--last", f"--run-dir={run / 'coordinator'}", "--json", directory]
    done = subprocess.run(
        [sys.executable, "-m", "echo2d", *map(str, export)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == STEPS
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all()


@pytest.mark.nightly
def test_a_demo_survives_chaos(tmp_path: Path) -> None:
    """All kinds of processes are killed while it runs; every promise but the accuracy's is the plain demo's."""
    steps, run = 8, tmp_path / "run"
    arguments = command(f"--steps={steps}", "--chaos", "--workers=2", "--json", f"--run-dir={run}")
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {kill["kind"] for kill in result["kills"]} == set(VICTIM_KINDS)
    assert all(kill["recovery_s"] > 0 for kill in result["kills"])
    assert all_but_late(sum(result["staleness_histogram"].values()), steps)
    assert result["batches_changed"] == 0
    assert [(worker["version"], worker["digest_ok"]) for worker in result["workers"]] == [
        (steps, True)
    ] * 2
    assert [line for line in done.stderr.splitlines() if "after it was killed" in line]
    assert processes_of(run) == []


@pytest.mark.nightly
@pytest.mark.parametrize(("staleness", "kappa"), [(0, 1), (2, 3)])
def test_a_demo_runs_with_the_smallest_staleness_and_the_largest_kappa(
    tmp_path: Path, staleness: int, kappa: int
) -> None:
    """S = 0 is strictly on-policy; kappa = S + 1 publishes as rarely as possible. Neither deadlocks."""
    run = tmp_path / "run"
    options = (
        f"--steps={FEW_STEPS}",
        "--workers=2",
        f"--staleness={staleness}",
        f"--kappa={kappa}",
        "--json",
    )
    done = subprocess.run(
        command(*options, f"--run-dir={run}"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["max_staleness"] <= staleness
    assert result["versions_published"] == 1 + -(-FEW_STEPS // kappa)


def processes_of(run: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(run).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_every_process_of_a_demo(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    arguments = command("--steps=1000", "--workers=1", f"--run-dir={run}")
    with subprocess.Popen(
        arguments, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if line.startswith("step "):
                break
        assert len(processes_of(run)) >= 4, "demo, coordinator, worker, learner"
        os.kill(demo.pid, number)
        assert "stopped; logs are in" in demo.stderr.read()
        assert demo.wait() == 130
    assert processes_of(run) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--kappa=4",), "echo2d: --kappa: expected at most staleness + 1 = 3; found 4"),
        (("--steps=0",), "echo2d: --steps: expected at least 1; found 0"),
    ],
)
def test_a_wrong_number_is_reported_in_one_line(arguments: tuple[str, ...], line: str) -> None:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (2, line)
