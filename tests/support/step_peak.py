"""Two train steps of rows of micro_batch_tokens, and their peak of memory: `python -m tests.support.step_peak CONFIG`.

Prints by how many bytes the peak exceeds the memory that the process had before it loaded the model. The caller sets
glibc's MALLOC_MMAP_THRESHOLD_, so that freed memory is returned at once.
"""

import sys
from pathlib import Path

import numpy as np

from echo2d.learner.batch.packing import PackedAnswer
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.load import empty_model
from echo2d.learner.model.policy import Policy
from echo2d.learner.ranks.ranks import Ranks


def memory(name: str) -> int:
    """Bytes by /proc: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) * 1024


def main(path: Path) -> None:
    config = LearnerConfig.load(path)
    vocabulary = empty_model(config.model).config.vocab_size
    before = memory("VmRSS")
    policy, rng = Policy(config, Ranks()), np.random.default_rng(0)
    tokens = config.micro_batch_tokens
    answers = [
        PackedAnswer(
            group_id=0,
            sample=sample,
            tokens=rng.integers(0, vocabulary, tokens, dtype=np.int32),
            counts=np.arange(tokens) > 0,
            logprobs_n=np.full(tokens - 1, -5.0, dtype=np.float32),
            staleness_n=np.zeros(tokens - 1, dtype=np.int64),
            advantage=np.float32(1 - 2 * sample),
        )
        for sample in range(2)
    ]
    for step in (1, 2):
        if config.penalizes:
            policy.penalties(answers)
        policy.train_step(step, policy.lay_out([answers]), 2)
    print(memory("VmHWM") - before)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
