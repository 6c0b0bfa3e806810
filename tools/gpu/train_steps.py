"""Measure train steps of layers with the shapes of Qwen3: MFU, memory beside the plan, and waits of the host.

The models have random weights; a step has 65,536 tokens and one optimizer step. Figures are medians without the first
step. MFU uses the operations of `learner/model/flops.py`. The plan is that of `echo2d learn --plan`. Each model is
written to a folder once, and every case loads it as a learner does.
"""

import gc
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from echo2d.client import OperatorFault
from echo2d.learner.batch.packing import PackedAnswer
from echo2d.learner.config import LearnerConfig, Place
from echo2d.learner.model.footprint import footprint
from echo2d.learner.model.policy import Policy
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.ranks.ranks import Ranks, device_of
from tools.gpu.rows import GIB, Row, device, on_gpu, settle

STEP_TOKENS, PROMPT_TOKENS = 65_536, 48
STEPS = 4
SMALLER = 64  # times, with --small
COMMON: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    **COMMON,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
MODELS = {
    "8B": Qwen3Config(
        **COMMON,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=4,
        num_attention_heads=32,
    ),
    "30B-A3B": Qwen3MoeConfig(**EXPERTS),
    "1.7B": Qwen3Config(
        **{**COMMON, "tie_word_embeddings": True},
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
    ),
}
# What --small changes of a model.
TINY: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
MFU = "MFU"
RESERVED = "reserved / planned"


@dataclass(frozen=True, slots=True)
class Case:
    """A way to run a train step."""

    row_tokens: int
    answer_tokens: int  # of a prompt with its answer
    changes: Mapping[str, Any]  # keys of the configuration
    asked: Mapping[str, tuple[str, float | str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        answers = self.row_tokens // self.answer_tokens
        how = [f"recompute = {self.changes['recompute']}"]
        how += [f"LoRA of rank {self.changes['lora_rank']}"] if "lora_rank" in self.changes else []
        how += ["without packing"] if not self.changes.get("packing", True) else []
        how += ["compiled"] if self.changes.get("compile") else ["eager"]
        row = f"rows of {self.row_tokens:,} tokens, {answers} answer{'s' * (answers > 1)} each"
        return f"{row}, {', '.join(how)}"


def dense(*, small: bool) -> Iterator[Row]:
    """Section B: layers of 8B, compiled and eager, in rows of several answers and of one."""
    held = {RESERVED: ("at most", 1.08)}
    cases = [
        Case(16_384, 2048, {"recompute": "selective", "compile": True}, {MFU: ("at least", 0.42), **held}),
        Case(16_384, 2048, {"recompute": "selective"}, held),
        Case(32_768, 32_768, {"recompute": "all", "compile": True}, held),
        Case(32_768, 32_768, {"recompute": "all"}, held),
    ]  # fmt: skip
    with Bench("8B", small=small) as bench:
        for case in cases:
            yield bench.run(case)


def experts(*, small: bool) -> Iterator[Row]:
    """Section D: layers of experts, and the check of packing at the depth of the whole model."""
    with Bench("30B-A3B", small=small) as bench:
        eager = Case(16_384, 2048, {"recompute": "all"})
        yield bench.run(eager)
        yield bench.waits(eager)
        yield _packing(2 if small else 48, small=small)
        yield bench.run(Case(16_384, 2048, {"recompute": "all", "compile": True}))


def whole_models(*, small: bool) -> Iterator[Row]:
    """Section T: a whole model of 1.7B in all ways, which takes longer than the ten minutes of the other sections."""
    ways: list[dict[str, Any]] = [
        {"recompute": "none"},
        {"recompute": "selective"},
        {"recompute": "all"},
        {"recompute": "selective", "lora_rank": 16},
        {"recompute": "selective", "packing": False},
    ]
    with Bench("1.7B", small=small) as bench:
        for way in ways:
            for more in ({}, {"compile": True}):
                yield bench.run(Case(16_384, 2048, {**way, **more}))


class Bench:
    """A model in a folder, and a process that plans memory, because a plan imagines its ranks."""

    def __init__(self, name: str, *, small: bool) -> None:
        self._small, self._shape = small, _shape(MODELS[name], small=small)
        self.what = f"{self._shape.num_hidden_layers} layers of {name}"
        self._folder = tempfile.TemporaryDirectory()
        alone = multiprocessing.get_context("spawn")
        self._planner = ProcessPoolExecutor(1, mp_context=alone)

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        with device():
            model = AutoModelForCausalLM.from_config(self._shape, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        return self

    def __exit__(self, *_: object) -> None:
        self._planner.shutdown(cancel_futures=True)
        self._folder.cleanup()

    def run(self, case: Case) -> Row:
        """The train steps of a case."""
        case = self._scaled(case)
        what = f"{self.what}: {case.name}"
        if self._small and case.changes.get("compile"):
            return Row(what, skipped="compiling takes a CPU minutes")
        # On a CPU nothing is compared with the plan, and its process takes seconds to start, so one section is enough.
        planned = None
        if on_gpu() or RESERVED in case.asked:
            planned = self._planner.submit(
                footprint, self._config(case), 1, case.row_tokens, on_gpu=True
            )
        policy, answers = self._ready(case)
        taken, shares, peak = [], [], 0.0
        for step in range(1, (2 if self._small else STEPS) + 1):
            settle()
            began = time.monotonic()
            effort = policy.train_step(step, policy.lay_out([answers]), 2).effort
            settle()
            taken.append(time.monotonic() - began)
            shares.append(effort.operations / taken[-1] / effort.peak if effort.peak else 0.0)
            peak = effort.memory_gib
        figures: dict[str, float | str] = {MFU: median(shares[1:])} if shares[-1] else {}
        tokens = sum(len(each.tokens) for each in answers)
        figures |= {"s / step": median(taken[1:]), "tokens/s": tokens / median(taken[1:])}
        figures |= {"first step, s": taken[0], "packing": _switch(policy._scorer.packed)}  # noqa: SLF001
        plan = None if planned is None else planned.result().peak / GIB
        if plan is not None:
            figures["planned, GiB"] = plan
        if plan is not None and on_gpu():
            reserved = torch.cuda.max_memory_reserved() / GIB
            figures |= {"peak, GiB": peak, "reserved, GiB": reserved, RESERVED: reserved / plan}
        config = policy.model.config
        if hasattr(config, "num_experts"):
            figures["experts by"] = str(config._experts_implementation)  # noqa: SLF001
        return Row(
            what, figures, {name: case.asked[name] for name in case.asked if name in figures}
        )

    def waits(self, case: Case) -> Row:
        """How often, and for how long, the host waits for the GPU in one row, forward and backward, with its step."""
        case = self._scaled(case)
        policy, answers = self._ready(case)
        row = policy.lay_out([answers[: max(1, case.row_tokens // case.answer_tokens)]])
        policy.train_step(1, row, 2)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu() else [])]
        with profile(activities=kinds) as found:
            policy.train_step(2, row, 2)
            settle()
        events = found.key_averages()
        print(events.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))
        waits = [
            each for each in events if each.key.startswith("cuda") and "Synchronize" in each.key
        ]
        copies = [each for each in events if each.key == "cudaMemcpyAsync"]
        figures: dict[str, float | str] = {
            "numbers read from tensors": float(
                sum(each.count for each in events if each.key == "aten::_local_scalar_dense")
            )
        }
        if on_gpu():
            figures["waits"] = float(sum(each.count for each in waits))
            for name, those in (("waiting, ms", waits), ("in calls that copy, ms", copies)):
                figures[name] = sum(each.self_cpu_time_total for each in those) / 1e3
        return Row(f"{self.what}: the host in a step of one row, eager", figures)

    def _ready(self, case: Case) -> tuple[Policy, list[PackedAnswer]]:
        gc.collect()
        if on_gpu():
            # Compiled code keeps the layers of the case before.
            torch.compiler.reset()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        config = self._config(case).explicit(cuda=on_gpu())
        policy = Policy(config, Ranks(device=device_of(config.device, Place())))
        step_tokens = STEP_TOKENS // (SMALLER if self._small else 1)
        return policy, _answers(policy.vocab_size, step_tokens, case.answer_tokens)

    def _scaled(self, case: Case) -> Case:
        """The case that is run."""
        if not self._small:
            return case
        row, answer = case.row_tokens // SMALLER, case.answer_tokens // SMALLER
        return replace(case, row_tokens=row, answer_tokens=max(PROMPT_TOKENS + 16, answer))

    def _config(self, case: Case) -> LearnerConfig:
        folder = Path(self._folder.name)
        return LearnerConfig(
            url="http://127.0.0.1:1",
            token_file=folder / "token",
            model=folder,
            snapshot_root=folder / "snapshots",
            out_dir=folder / "out",
            steps=1,
            lr=1e-6,
            micro_batch_tokens=case.row_tokens,
            device=device().type,
            **case.changes,
        )


def _shape(config: Any, *, small: bool, **changes: Any) -> Any:
    known = config.to_dict()
    tiny = {name: value for name, value in TINY.items() if name in known} if small else {}
    return type(config)(**{**known, "layer_types": None, **tiny, **changes})


def _answers(vocabulary: int, step_tokens: int, tokens: int) -> list[PackedAnswer]:
    """Answers of `tokens` tokens with their prompts, which together have step_tokens."""
    dice = np.random.default_rng(0)
    return [
        PackedAnswer(
            group_id=number // 8,
            sample=number % 8,
            tokens=dice.integers(0, vocabulary, tokens, dtype=np.int32),
            counts=np.arange(tokens) >= PROMPT_TOKENS,
            logprobs_n=np.full(tokens - PROMPT_TOKENS, -12.0, dtype=np.float32),
            staleness_n=np.zeros(tokens - PROMPT_TOKENS, dtype=np.int64),
            advantage=np.float32(1 - number % 2 * 2),
        )
        for number in range(step_tokens // tokens)
    ]


def _packing(layers: int, *, small: bool) -> Row:
    """Whether the learner packs answers of a model of this depth, in bfloat16, as it finds out at its start."""
    config = _shape(MODELS["30B-A3B"], small=small, num_hidden_layers=layers)
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()
    with device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    try:
        found = _switch(AnswerScorer(model).packed)
    except OperatorFault as fault:
        found = f"refused: {fault}"
    what = f"{layers} layers of 30B-A3B: the check of packing at the start"
    return Row(what, {"packing": found}, {"packing": ("is", "on")})


def _switch(on: bool) -> str:  # noqa: FBT001
    return "on" if on else "off"
