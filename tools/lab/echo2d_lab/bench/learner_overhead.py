"""Measure what a train step costs besides training: `python -m echo2d_lab.bench.learner_overhead OUT [--steps 24]`.

The real learner trains a model of 50 M parameters on generated batches. A stub coordinator links
and hashes versions, as the real one does on one host, and makes the learner publish every second
step. So each step that runs while a version is being written has a neighbour that runs alone, and a
busy machine affects both alike. Not measured: what the coordinator later does with a version in its
own process.

    overhead   share of a step that is not `train`, for steps that begin a version
    ratio      t_train_s of a step while a version is being written / t_train_s of the step before

With --checkpoints no version is published, and every second step saves a checkpoint: `ratio` is then that
of a step that waits for the copy and trains while the checkpoint is written. The model has 1 GB of
state, and `--tokens 600` makes steps of about 20 s on 2 CPU cores.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from blake3 import blake3

from echo2d.client import (
    Batch,
    Coordinator,
    Group,
    Published,
    Session,
    Span,
    Trajectory,
)
from echo2d.learner.batch.prefetch import BatchPrefetch
from echo2d.learner.config import LearnerConfig
from echo2d.learner.metrics.stopwatch import TRAIN, WAIT
from echo2d.learner.train import Learner

VOCABULARY = 8192
# Width and layers: 51 M parameters to publish, and 84 M whose weights and moments are 1 GB.
TO_PUBLISH, TO_SAVE = (512, 15), (640, 17)
GROUPS = GROUP_SIZE = 4
PROMPT_TOKENS = 16
WARM_UP = 2  # first steps, which are not counted
NEVER = 1 << 30  # a publish period in steps


class StubCoordinator:
    """Replaces `echo2d.client.Coordinator`. Batches differ only in their numbers. tokens: of the
    longest answer.
    """

    run_id = "run"

    def __init__(self, root: Path, tokens: int, *, publishes: bool = True) -> None:
        self._root = root
        self._publishes = publishes
        self._tokens = tokens
        self.t_train_s: dict[int, float] = {}
        self.publish_s: list[float] = []

    def open_session(self, resume_step: int, **_: object) -> Session:
        assert resume_step == 0
        return Session(1, "run", 2, NEVER, GROUPS * GROUP_SIZE, GROUP_SIZE, GROUP_SIZE)

    def publish(self, version: int, directory: Path, _: bytes | None = None) -> Published:
        copy, begun = self._root / "taken", time.monotonic()
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for path in directory.iterdir():
            (copy / path.name).hardlink_to(path)
            blake3().update_mmap(path)
        self.publish_s.append(time.monotonic() - begun)
        return Published(version, "00")

    def take_batch(self, step: int) -> Batch:
        rng = np.random.default_rng(0)
        groups = [self._group(step * GROUPS + index, step, rng) for index in range(GROUPS)]
        return Batch(step, 1, f"batch-{step}", tuple(groups))

    def commit(self, batch: Batch, *, t_train_s: float, **_: object) -> int:
        self.t_train_s[batch.step] = t_train_s
        return 1 if self._publishes and begins(batch.step) else NEVER

    def checkpoint(self, step: int) -> None:
        """Ignored: this coordinator stores nothing."""

    def _group(self, group_id: int, step: int, rng: np.random.Generator) -> Group:
        prompt = rng.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
        members = [self._trajectory(sample, step, rng) for sample in range(GROUP_SIZE)]
        return Group(group_id, prompt, tuple(members))

    def _trajectory(self, sample: int, step: int, rng: np.random.Generator) -> Trajectory:
        length = int(rng.integers(self._tokens // 2, self._tokens + 1))
        tokens = rng.integers(0, VOCABULARY, length, dtype=np.int32)
        logprobs = np.full(length, -np.log(VOCABULARY), dtype=np.float32)
        return Trajectory(
            tokens,
            logprobs,
            (Span(0, length, step - 1, "00"),),
            float(rng.integers(0, 2)),
            "recorded",
            sample=sample,
        )


def begins(step: int) -> bool:
    """Whether a version begins after this step and is written during the next one."""
    return step % 2 == 1


def make_model(directory: Path, hidden: int, layers: int) -> None:
    """Save a Qwen3 with random weights, on which the time of a step does not depend."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    facts: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        **facts,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(shape).to(torch.bfloat16)
    print(f"parameters={model.num_parameters() / 1e6:.1f}M")
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")  # copied, never read


def measure(out: Path, steps: int, tokens: int, threads: int, *, checkpoints: bool = False) -> None:
    out.mkdir(parents=True)
    make_model(out / "model", *(TO_SAVE if checkpoints else TO_PUBLISH))
    config = LearnerConfig(
        url="http://127.0.0.1:1",
        token_file=out / "token",
        model=out / "model",
        snapshot_root=out / "snapshots",
        out_dir=out / "out",
        steps=steps,
        threads=threads,
        micro_batch_tokens=1024,
        checkpoint_every=2 if checkpoints else 250,
    )
    source = StubCoordinator(out, tokens, publishes=not checkpoints)
    learner = Learner(config, cast("Coordinator", source), BatchPrefetch(), resume=False)
    learner.run()
    print(f"profile: {learner.watch}")
    rows = [
        json.loads(line) for line in (config.out_dir / "metrics.jsonl").read_text().splitlines()
    ]
    # The last step always publishes, so it is left out.
    counted = rows[WARM_UP : steps - 1]
    if checkpoints:
        report_checkpoints(counted, source, config.out_dir / "checkpoints")
    else:
        report(counted, source)


def report(rows: Sequence[dict[str, Any]], source: StubCoordinator) -> None:
    t = source.t_train_s
    pairs = [
        t[row["step"]] / t[row["step"] - 1]
        for row in rows
        if begins(row["step"] - 1) and row["step"] > WARM_UP
    ]
    say(
        "t_train_s without a version on its way",
        [t[row["step"]] for row in rows if begins(row["step"])],
    )
    say("t_train_s with one", [t[row["step"]] for row in rows if not begins(row["step"])])
    say("ratio", pairs)
    say(
        "overhead of a step that begins a version",
        [overhead(row) for row in rows if begins(row["step"])],
    )
    say(
        "seconds in which it is begun",
        [row["seconds"]["publish"] for row in rows if begins(row["step"])],
    )
    say("seconds in which the source takes it", source.publish_s)


def report_checkpoints(
    rows: Sequence[dict[str, Any]], source: StubCoordinator, directory: Path
) -> None:
    """A step with an odd number waits for the copy, and a checkpoint is written during it."""
    t = source.t_train_s
    begun = [row["step"] for row in rows if row["step"] % 2 == 0]
    size = sum(path.stat().st_size for path in max(directory.iterdir()).iterdir())
    print(f"a checkpoint: {size / 1e9:.3f} GB")
    say("t_train_s without a checkpoint under way", [t[step] for step in begun])
    say("t_train_s with one", [t[step + 1] for step in begun if step + 1 in t])
    pairs = [t[step + 1] / t[step] for step in begun if step + 1 in t]
    # A shared machine gets slower and faster over several steps; the mean of two neighbours compensates for that.
    both = [
        t[step + 1] / ((t[step] + t[step + 2]) / 2)
        for step in begun
        if step + 2 in t and step + 2 < len(t)
    ]
    say("ratio to the step before", pairs)
    say("ratio to the mean of the steps before and after", both)
    # A row is written before the checkpoint of its step, so the next row has the checkpoint's seconds.
    copies = [row["seconds"]["checkpoint"] for row in rows if "checkpoint" in row["seconds"]]
    say("seconds of the copy, for which training stands still", copies)


def overhead(row: dict[str, Any]) -> float:
    worked: dict[str, float] = {
        doing: seconds for doing, seconds in row["seconds"].items() if doing != WAIT
    }
    return 1.0 - worked[TRAIN] / sum(worked.values())


def say(what: str, values: Sequence[float]) -> None:
    low, middle, high = statistics.quantiles(values, n=4)
    line = f"{what}: median={middle:.4g} quartiles={low:.4g}..{high:.4g} n={len(values)}"
    print(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m echo2d_lab.bench.learner_overhead",
        description="What steps cost beyond training.",
    )
    parser.add_argument("out", type=Path, help="a directory that is not there yet")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=150, help="of the longest answer")
    parser.add_argument(
        "--checkpoints", action="store_true", help="measure checkpoints, and not versions"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads of torch; 0: torch decides"
    )
    options = parser.parse_args()
    measure(
        options.out,
        options.steps,
        options.tokens,
        options.threads,
        checkpoints=options.checkpoints,
    )


if __name__ == "__main__":
    main()
