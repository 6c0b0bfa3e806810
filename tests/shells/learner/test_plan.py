"""The plan predicts the memory that a train step needs, before the first one."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from echo2d.client import OperatorFault
from echo2d.learner import plan
from echo2d.learner.model.footprint import Footprint
from echo2d.learner.plan import TOKENS_MIN, PlannedDevice, fitted, fitted_on_gpu, longest_row
from tests.support.learner import config_in, write_config
from tests.support.model_shapes import SMALL, made

CLOSE = 0.05
# glibc returns freed memory at once, so that the process has only the memory of its tensors.
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
BIG: dict[str, Any] = {**SMALL, **HEADS, "hidden_size": 512, "max_position_embeddings": 8192}
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "deep, float32": (
        Qwen3Config(
            **{**BIG, "vocab_size": 8192, "intermediate_size": 1536, "num_hidden_layers": 12}
        ),
        {"micro_batch_tokens": 2048},
    ),
    "bfloat16, selective": (
        LlamaConfig(
            **{**BIG, "vocab_size": 16_384, "intermediate_size": 2048, "num_hidden_layers": 12}
        ),
        {"micro_batch_tokens": 2048, "dtype": "bfloat16", "recompute": "selective"},
    ),
    "adapter and base": (
        Qwen3Config(
            **{**BIG, "vocab_size": 8192, "intermediate_size": 4096, "num_hidden_layers": 12}
        ),
        {"micro_batch_tokens": 2048, "lora_rank": 8, "kl_coef": 0.1, "recompute": "all"},
    ),
    "teacher, and base before the step": (
        Qwen3Config(
            **{**BIG, "vocab_size": 8192, "intermediate_size": 1536, "num_hidden_layers": 4}
        ),
        {
            "micro_batch_tokens": 2048,
            "teacher": LlamaConfig(
                **{**BIG, "vocab_size": 8192, "intermediate_size": 4096, "num_hidden_layers": 8}
            ),
            "kl_coef": 0.1,
            "kl_in": "reward",
        },
    ),
}


def planned(path: Path, *options: str) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "echo2d",
        "learn",
        "--config",
        str(path),
        "--plan",
        "--json",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 2}, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def save(shape: Any, directory: Path) -> Path:
    made(shape).to(torch.bfloat16).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHAPES)
def test_the_measured_peak_equals_the_planned_one(name: str, tmp_path: Path) -> None:
    shape, changes = SHAPES[name]
    if "teacher" in changes:
        changes = {**changes, "teacher": save(changes["teacher"], tmp_path / "teacher")}
    config = config_in(tmp_path, save(shape, tmp_path / "model"), threads=2, **changes)
    path = write_config(tmp_path / "run.toml", config)
    found = planned(path)
    command = [sys.executable, "-m", "tests.support.step_peak", str(path)]
    measured = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **AT_ONCE}
    )
    peak = int(measured.stdout.split()[-1])
    print(f"{name}: planned {found['peak'] / 2**20:.0f} MiB, measured {peak / 2**20:.0f}")  # noqa: T201
    assert found["peak"] == pytest.approx(peak, rel=CLOSE)


@pytest.mark.nightly
def test_the_plan_for_a_small_gpu_says_which_rows_fit(tmp_path: Path) -> None:
    shape = Qwen3Config(**{**BIG, "vocab_size": 8192, "num_hidden_layers": 2})
    how: dict[str, Any] = {"recompute": "selective", "moments": "device"}
    config = config_in(tmp_path, save(shape, tmp_path / "model"), micro_batch_tokens=4096, **how)
    path = write_config(tmp_path / "run.toml", config)
    roomy = planned(path, "--gpu-gib", "80")
    assert roomy["fits"]
    small = str(roomy["peak"] / 2**30)  # but a part of it is not for tensors
    found = planned(path, "--gpu-gib", small)
    assert not found["fits"]
    assert 0 < found["longest"] < 4096
    many = planned(path, "--gpu-gib", small, "--ranks", "8")
    assert many["weights"] == pytest.approx(found["weights"] / 8, rel=0.01)
    assert many["longest"] > found["longest"]


@pytest.mark.nightly
def test_auto_takes_the_cheapest_values_with_which_the_longest_answer_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One process plans all, which saves the imports of others.
    monkeypatch.setattr(plan, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    monkeypatch.setattr(logging, "disable", lambda: None)
    shape = Qwen3Config(**{**BIG, "vocab_size": 8192, "num_hidden_layers": 2})
    config = config_in(tmp_path, save(shape, tmp_path / "model"), micro_batch_tokens=2048)

    def chosen(gpu: int, answer_tokens: int) -> tuple[str, str]:
        device = PlannedDevice(on_gpu=True, memory=gpu)
        found = fitted(config, 2, device, answer_tokens)
        assert found.fits(device)
        assert found.longest >= answer_tokens
        return found.config.recompute, found.config.moments

    plenty = fitted_on_gpu(config, 2, 80 << 30, 1 << 20)
    assert (plenty.recompute, plenty.moments, plenty.dtype) == ("none", "device", "bfloat16")
    assert plenty.row_tokens_max == 8192, "all that the model reads"
    assert chosen(540 << 20, 1000) == ("selective", "device")
    assert chosen(490 << 20, 1000) == ("selective", "host")
    least = dataclasses.replace(config, recompute="all", moments="host")
    with pytest.raises(OperatorFault, match=r"rows of 2048 tokens need .* that fits has 0"):
        fitted_on_gpu(least, 2, 32 << 20, 0)
    # The second start plans nothing.
    monkeypatch.setattr(plan, "fit", None)
    assert fitted_on_gpu(config, 2, 80 << 30, 1 << 20) == plenty


@pytest.mark.nightly
def test_rows_that_four_ranks_share_are_four_times_as_long(tmp_path: Path) -> None:
    shape = Qwen3Config(
        **{**BIG, "vocab_size": 8192, "num_hidden_layers": 2, "max_position_embeddings": 1 << 20}
    )
    how: dict[str, Any] = {"recompute": "selective", "moments": "device"}
    config = config_in(tmp_path, save(shape, tmp_path / "model"), micro_batch_tokens=1024, **how)
    path = write_config(tmp_path / "run.toml", config)
    options = ("--ranks", "4", "--gpu-gib", "0.5")
    own = planned(path, *options)
    shared = planned(path, *options, "--set", "learner.context_parallel=4")
    print(f"longest {own['longest']} and {shared['longest']}")  # noqa: T201
    assert (own["row_tokens"], shared["row_tokens"]) == (1024, 4096)
    assert shared["peak"] == pytest.approx(own["peak"], rel=0.05)
    assert shared["longest"] == pytest.approx(4 * own["longest"], rel=0.1)


def test_the_longest_row_is_interpolated_between_two_peaks() -> None:
    asked: list[int] = []

    def peak_of(tokens: int) -> Footprint:
        asked.append(tokens)
        return Footprint(tokens, 10, 10, 20, computing=100 + 2 * tokens, stepping=2000)

    first = peak_of(1000)
    assert longest_row(peak_of, first, 9000, 1 << 20) == 4450
    assert asked == [1000, 2000, 4000, 8000]
    assert longest_row(peak_of, first, 9000, 3000) == 3000
    assert longest_row(peak_of, first, 9000, 500) == 500
    # The row of 950 tokens fits, but the straight line from 500 tokens on is above its peak.
    assert longest_row(peak_of, first, 2050, 1 << 20) == 750
    assert longest_row(peak_of, first, 1999, 1 << 20) == 0
    assert min(asked) == TOKENS_MIN
