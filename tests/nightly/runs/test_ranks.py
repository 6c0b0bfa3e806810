"""A learner of two processes, started by torchrun: it trains the same as one process, and both end together."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from echo2d.client import Batch
from echo2d.learner.__main__ import main
from tests.support.learner import record, rows_of
from tests.support.model_shapes import SMALL, saved
from tests.support.paths import REPO
from tests.support.polling import poll
from tests.support.ranks import LOSS_ERROR_MAX, RANKS, STEPS, alone, config_of, together
from tests.support.scripted_coordinator import GROUP_SIZE, GROUPS

pytestmark = [pytest.mark.timeout(900)]

NORM_ERROR_MAX = 1e-3  # relative
# Ranks lay out their rows otherwise, and layers in bfloat16 round what they read in another order: the losses of one
# rank with micro_batch_tokens = 90 in place of 60 differ by up to 1.7e-3 in these six steps.
COARSER = {"float32": 1, "bfloat16": 100}
WRITTEN = 72  # tokens of a step's answers
WEIGHT_ERROR_MAX = 2e-3  # absolute, of bfloat16 weights that moved by 1e-3 a step


@pytest.fixture(scope="module")
def batches(base: Path) -> list[Batch]:
    return record(base, STEPS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_moves_from_one_rank_to_two_and_back(
    tmp_path: Path, base: Path, batches: list[Batch], dtype: str
) -> None:
    """One process trains steps 1 and 2, two train 3 and 4, one trains 5 and 6: as one that trains all.

    The two are ended by a signal to the second of them.
    """
    straight, handed = tmp_path / "straight", tmp_path / "handed"
    straight.mkdir()
    handed.mkdir()
    expected = config_of(straight, base, dtype=dtype)
    alone(straight, expected, batches)

    config = config_of(handed, base, dtype=dtype)
    alone(handed, dataclasses.replace(config, steps=2), batches)
    (handed / "signal").write_text(f"4 1 {signal.SIGTERM}")
    done = together(handed, dataclasses.replace(config, recompute="all"), batches)
    (handed / "signal").unlink()
    assert done.returncode == 0, done.stderr
    shards = sorted(
        path.name for path in (config.out_dir / "checkpoints" / "step-00000004-epoch-2").iterdir()
    )
    assert shards == [
        *(
            ".metadata",
            "__0_0.distcp",
            "__1_0.distcp",
            "digests.blake3",
            "progress-0.pt",
            "progress-1.pt",
        ),
    ]
    alone(handed, config, batches)

    rows = [rows_of(each) for each in (expected, config)]
    assert [row["step"] for row in rows[1]] == list(range(1, STEPS + 1))
    coarser = COARSER[dtype]
    for one, other in zip(*rows, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=coarser * LOSS_ERROR_MAX)
        for name in ("grad_norm", "ratio_mean", "ratio_max", "kl"):
            near = pytest.approx(one[name], rel=coarser * NORM_ERROR_MAX, abs=coarser * 1e-6)
            assert other[name] == near
        for name in ("batch", "tokens", "reward_mean"):
            assert other[name] == one[name]
        # In bfloat16 one token of a step may lie so near to the edge of the clip that it falls on its other side.
        edge = 1.01 / WRITTEN if dtype == "bfloat16" else 0.0
        assert other["clip_share"] == pytest.approx(one["clip_share"], abs=edge)
    said, told = (scores_told(directory) for directory in (straight, handed))
    assert list(said) == list(told) == list(range(1, STEPS + 1))
    for step, scores in said.items():
        assert len(scores) == GROUPS * GROUP_SIZE
        assert told[step].keys() == scores.keys(), "of both ranks"
        for trajectory, numbers in scores.items():
            assert told[step][trajectory] == pytest.approx(numbers, rel=1e-2, abs=coarser * 1e-3)
    for version in (4, STEPS):
        same_weights(*(directory / "taken" / str(version) for directory in (straight, handed)))


def test_the_experts_of_a_layer_are_split_over_both_ranks(tmp_path: Path, base: Path) -> None:
    """Version 0 of two ranks has the bytes of the base; the last one is that of one rank, but for rounding."""
    model = saved(tmp_path / "model", "qwen3 moe", base)
    batches = record(model, 2)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    changes: dict[str, Any] = {"steps": 2, "optimizer_steps": 1, "lr": 1e-4}
    alone(tmp_path / "one", config_of(tmp_path / "one", model, **changes), batches)
    done = together(tmp_path / "two", config_of(tmp_path / "two", model, **changes), batches)
    assert done.returncode == 0, done.stderr
    first, original = (
        load_file(path / "model.safetensors") for path in (tmp_path / "two" / "taken" / "0", model)
    )
    assert first.keys() == original.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in original.items())
    same_weights(tmp_path / "one" / "taken" / "2", tmp_path / "two" / "taken" / "2")


def test_the_reported_load_of_experts_counts_both_ranks(tmp_path: Path, base: Path) -> None:
    """Without packing any number of ranks reads the same tokens; a rank of its own would know of half of them."""
    model = saved(tmp_path / "model", "mixtral", base)
    batches = record(model, 1)
    rows = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        changes: dict[str, Any] = {"steps": 1, "optimizer_steps": 1, "packing": False}
        config = config_of(tmp_path / name, model, **changes, recompute="all")
        if name == "one":
            alone(tmp_path / name, config, batches)
        else:
            done = together(tmp_path / name, config, batches)
            assert done.returncode == 0, done.stderr
        rows += rows_of(config)
    one, two = (row["router"] for row in rows)
    assert two == pytest.approx(one, rel=1e-6)
    assert one["load_max"] > 1.0


@pytest.mark.parametrize("family", ["qwen3 moe", "adapter"])
def test_a_run_moves_from_hosts_that_each_have_the_model_to_ranks_that_share_it_and_back(
    tmp_path: Path, base: Path, family: str
) -> None:
    """Two hosts of two ranks train steps 1 and 2, four ranks 3 and 4, the hosts 5 and 6: as one rank trains all."""
    model = saved(tmp_path / "model", family, base) if family == "qwen3 moe" else base
    changes: dict[str, Any] = {"lora_rank": 4, "kl_coef": 0.0} if family == "adapter" else {}
    batches = record(model, STEPS)
    straight, handed = tmp_path / "straight", tmp_path / "handed"
    straight.mkdir()
    handed.mkdir()
    expected, config = (config_of(each, model, lr=1e-4, **changes) for each in (straight, handed))
    alone(straight, expected, batches)
    moves: tuple[tuple[int, int, Any], ...] = ((2, 2, "host"), (4, 1, "each"), (STEPS, 2, "host"))
    for steps, hosts, sync in moves:
        part = dataclasses.replace(config, steps=steps, gradient_sync=sync)
        done = together(handed, part, batches, ranks=4, hosts=hosts)
        assert done.returncode == 0, done.stderr
    for one, other in zip(*(rows_of(each) for each in (expected, config)), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=LOSS_ERROR_MAX)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=NORM_ERROR_MAX)
    file = "adapter_model.safetensors" if family == "adapter" else "model.safetensors"
    firsts = [(each / "taken" / "0" / file).read_bytes() for each in (straight, handed)]
    assert firsts[0] == firsts[1]
    same_weights(*(each / "taken" / str(STEPS) for each in (straight, handed)), file=file)


@pytest.mark.parametrize("family", ["tied", "qwen3", "qwen3 moe", "adapter"])
def test_a_checkpoint_of_two_ranks_is_exported_by_one_process(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """The export has the bytes that the two ranks published."""
    model = base
    if family.startswith("qwen3"):
        model = saved(tmp_path / "model", family, base)
    changes: dict[str, Any] = {"lora_rank": 4} if family == "adapter" else {}
    config = config_of(tmp_path, model, steps=2, optimizer_steps=1, lr=1e-4, **changes)
    done = together(tmp_path, config, record(model, 2))
    assert done.returncode == 0, done.stderr
    command = ["--config", str(tmp_path / "run.toml"), "--export", "last"]
    assert main([*command, str(tmp_path / "export"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    export, published = tmp_path / "export", tmp_path / "taken" / "2"
    assert {path.name for path in export.iterdir()} == {path.name for path in published.iterdir()}
    for path in published.iterdir():
        assert (export / path.name).read_bytes() == path.read_bytes(), path.name
    if family == "adapter":
        assert main([*command, str(tmp_path / "merged"), "--merge"]) == 0
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def scores_told(directory: Path) -> dict[int, dict[tuple[int, int], tuple[float, float]]]:
    """k and z of each trajectory, by step."""
    lines = [json.loads(line) for line in (directory / "said.jsonl").read_text().splitlines()]
    return {
        line[1]: {(group, sample): (k, z) for group, sample, k, z in line[2]}
        for line in lines
        if line[0] == "scores"
    }


def last_word(done: "subprocess.CompletedProcess[str]") -> str:
    """There is one, whoever said it; torchrun has its own."""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("learner: ")]
    return line.removeprefix("learner: ").removeprefix("rank 1: ")


def same_weights(one: Path, other: Path, *, file: str = "model.safetensors") -> None:
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    weights, others = (load_file(path / file) for path in (one, other))
    for name, weight in weights.items():
        assert (others[name].dtype, others[name].shape) == (torch.bfloat16, weight.shape)
        assert torch.allclose(
            others[name].float(), weight.float(), rtol=1e-2, atol=WEIGHT_ERROR_MAX
        ), name


def test_a_killed_rank_ends_the_others_with_one_line(
    tmp_path: Path, base: Path, batches: list[Batch]
) -> None:
    (tmp_path / "signal").write_text(f"3 1 {signal.SIGKILL}")
    done = together(tmp_path, config_of(tmp_path, base), batches)
    assert done.returncode == 1
    assert last_word(done).startswith("lost another rank: ")
    (tmp_path / "signal").unlink()
    alone(tmp_path, config_of(tmp_path, base), batches)  # who resumes finds a whole checkpoint
    assert {row["step"] for row in rows_of(config_of(tmp_path, base))} == set(range(1, STEPS + 1))


def test_a_stopped_rank_is_noticed_and_ends_the_others(
    tmp_path: Path, base: Path, batches: list[Batch]
) -> None:
    """As one whose host is gone: no connection is reset."""
    (tmp_path / "signal").write_text(f"3 1 {signal.SIGSTOP}")
    threading.Thread(target=kill_when_the_first_is_gone, args=(tmp_path,), daemon=True).start()
    done = together(tmp_path, config_of(tmp_path, base, rank_silence_s=3.0), batches)
    assert done.returncode == 1
    assert last_word(done) == "lost another rank: nothing was heard of rank 1 for 3 s"
    (tmp_path / "signal").unlink()
    alone(tmp_path, config_of(tmp_path, base), batches)
    assert {row["step"] for row in rows_of(config_of(tmp_path, base))} == set(range(1, STEPS + 1))


def kill_when_the_first_is_gone(directory: Path) -> None:
    """The second rank, which stands still: torchrun would wait 30 s for it."""
    first, second = (directory / f"pid-{rank}" for rank in range(RANKS))
    poll(lambda: first.exists() and second.exists())
    poll(lambda: not Path(f"/proc/{first.read_text()}").exists())
    os.kill(int(second.read_text()), signal.SIGKILL)


def test_a_mistake_on_every_rank_is_reported_once(tmp_path: Path, base: Path) -> None:
    done = together(tmp_path, config_of(tmp_path, base, lora_rank=2, lora_targets=("none",)), [])
    assert done.returncode == 2, "the operator's mistake"
    assert last_word(done) == f"learner.lora_targets: {base} has no linear layers named 'none'"


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_ever_has_the_whole_model(tmp_path: Path, base: Path, ranks: int) -> None:
    """The peaks of all ranks while they load it add up to hardly more than the float32 model."""
    shape = {**SMALL, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 60}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    shutil.copy(base / "tokenizer.json", tmp_path / "model")
    torchrun = [
        sys.executable,
        "-m",
        "echo2d.learner.torchrun",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    subprocess.run(
        [*torchrun, "-m", "tests.support.load_peak", str(tmp_path / "model"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        check=True,
        timeout=240,
    )
    peaks = [json.loads((tmp_path / f"peak-{rank}.json").read_text()) for rank in range(ranks)]
    share = sum(peaks) * 1e6 / (4 * model.num_parameters())
    print(f"{ranks} ranks: {share:.2f} times the model's {4 * model.num_parameters() / 1e6:.0f} MB")  # noqa: T201
    assert 1.0 <= share <= 1.3


def test_torchrun_ends_by_the_same_signal_as_its_processes_and_after_them(
    tmp_path: Path,
) -> None:
    """What a service manager takes for an orderly end."""
    script = 'trap "sleep 0.3; touch ended; exit 0" TERM; touch ready; while :; do sleep 0.1; done'
    command = [
        sys.executable,
        "-m",
        "echo2d.learner.torchrun",
        "--standalone",
        "--no-python",
        "bash",
        "-c",
        script,
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    poll((tmp_path / "ready").exists)
    process.terminate()
    assert process.wait(60.0) == -signal.SIGTERM
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_weights_do_not_depend_on_where_the_ranks_keep_their_moments(
    tmp_path: Path, base: Path, batches: list[Batch], ranks: int
) -> None:
    """The same bytes after twelve optimizer steps, with a resume after the fourth one."""
    taken = []
    for place in ("device", "host"):
        directory = tmp_path / place
        directory.mkdir()
        config = config_of(directory, base, moments=place)
        for steps in (2, STEPS):
            done = together(
                directory, dataclasses.replace(config, steps=steps), batches, ranks=ranks
            )
            assert done.returncode == 0, done.stderr
        taken.append((directory / "taken" / str(STEPS) / "model.safetensors").read_bytes())
    assert taken[0] == taken[1]
