"""Measure train steps on one GPU: their use of the GPU, and the planned and the measured peak of memory.

    python -m echo2d_lab.research.gpu_step [--steps 4] [--only TEXT ...] [--profile]

The models have random weights and the shape of Qwen3; a step has 32 answers of 2,000 tokens to prompts of 48 tokens.
Figures are medians without the first step. MFU uses the operations of `learner/model/flops.py`. The plan is that of
`echo2d learn --plan`.
"""

import argparse
import gc
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2d.learner.batch.packing import PackedAnswer
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.footprint import footprint
from echo2d.learner.model.policy import Policy
from echo2d.learner.ranks.ranks import Ranks

VOCABULARY, PROMPT_TOKENS, ANSWER_TOKENS, ANSWERS = 151_936, 48, 2000, 32
TOKENS = PROMPT_TOKENS + ANSWER_TOKENS
ROW_TOKENS = 16_384
GIB = 2**30
# Hidden size, intermediate size of the MLP, layers, query heads, whether the head shares the embedding's weights.
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4 layers of 8B": (4096, 12_288, 4, 32, False),
}
# For each case: the model, and keys of the configuration.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "1.7B, nothing recomputed": ("1.7B", {"recompute": "none"}),
    "1.7B, selective": ("1.7B", {"recompute": "selective"}),
    "1.7B, all recomputed": ("1.7B", {"recompute": "all"}),
    "1.7B, LoRA of rank 16": ("1.7B", {"recompute": "selective", "lora_rank": 16}),
    "1.7B, without packing": ("1.7B", {"recompute": "selective", "packing": False}),
    "0.6B, selective": ("0.6B", {"recompute": "selective"}),
    "4 layers of 8B, all recomputed": ("4 layers of 8B", {"recompute": "all"}),
    "4 layers of 8B, selective": ("4 layers of 8B", {"recompute": "selective"}),
}
CASES.update(
    {
        f"{name}, compiled": (shape, {**changes, "compile": True})
        for name, (shape, changes) in CASES.items()
        if shape != "0.6B"
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="cases whose name contains one of these"
    )
    parser.add_argument("--profile", action="store_true", help="which kernels a step more took")
    asked = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| case | first step, s | s | tokens/s | MFU | peak, GiB | planned | reserved |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=spawn) as planner,
    ):
        for name, (shape, changes) in CASES.items():
            if any(each in name for each in asked.only):
                config = _config(_saved(shape, Path(folder) / shape), changes)
                # The plan is for rows of one answer: longer rows than the measured ones would need more for attention.
                planned = planner.submit(footprint, config, 1, ROW_TOKENS, on_gpu=True)
                found = _measure(config, asked.steps, profiled=asked.profile)
                gc.collect()
                torch.cuda.empty_cache()
                print(
                    f"| {name} | {found} |".replace("PLANNED", _gib(planned.result().peak)),
                    flush=True,
                )


def _saved(name: str, folder: Path) -> Path:
    """The directory of the model, which is written once."""
    if not folder.exists():
        hidden, inside, layers, heads, tied = SHAPES[name]
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=inside,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=tied,
            max_position_embeddings=4096,
        )
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
    return folder


def _config(model: Path, changes: dict[str, Any]) -> LearnerConfig:
    config = LearnerConfig(
        url="http://127.0.0.1:1",
        token_file=model / "token",
        model=model,
        snapshot_root=model / "snapshots",
        out_dir=model / "out",
        steps=1,
        lr=1e-6,
        micro_batch_tokens=ROW_TOKENS,
        device="cuda",
        **changes,
    )
    return config.explicit(cuda=True)


def _measure(config: LearnerConfig, steps: int, *, profiled: bool) -> str:
    """The cells of the table."""
    torch.cuda.reset_peak_memory_stats()
    policy, rng = Policy(config, Ranks(device="cuda")), np.random.default_rng(0)
    answers = [
        PackedAnswer(
            group_id=number // 8,
            sample=number % 8,
            tokens=rng.integers(0, VOCABULARY, TOKENS, dtype=np.int32),
            counts=np.arange(TOKENS) >= PROMPT_TOKENS,
            logprobs_n=np.full(ANSWER_TOKENS, -12.0, dtype=np.float32),
            staleness_n=np.zeros(ANSWER_TOKENS, dtype=np.int64),
            advantage=np.float32(1 - number % 2 * 2),
        )
        for number in range(ANSWERS)
    ]
    seconds, shares, peak = [], [], 0.0
    for step in range(steps):
        torch.cuda.synchronize()
        began = time.monotonic()
        effort = policy.train_step(step + 1, policy.lay_out([answers]), 2).effort
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
        shares.append(effort.operations / seconds[-1] / (effort.peak or float("inf")))
        peak = effort.memory_gib
    if profiled:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            policy.train_step(steps + 1, policy.lay_out([answers]), 2)
            torch.cuda.synchronize()
        table = found.key_averages().table
        print(table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=90))
    took = median(seconds[1:])
    return (
        f"{seconds[0]:.1f} | {took:.2f} ({min(seconds[1:]):.2f}-{max(seconds[1:]):.2f}) | "
        f"{ANSWERS * TOKENS / took:,.0f} | "
        f"{median(shares[1:]):.3f} | {peak:.1f} | PLANNED | {_gib(torch.cuda.max_memory_reserved())}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


if __name__ == "__main__":
    main()
