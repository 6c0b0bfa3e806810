"""Measures how fast one task process scores answers, and what that costs the coordinator.

    python -m echo2d_lab.research.reward_speed [--answers 20000] [--rounds 5]

`exact` and `math` score the same sums through one process, 64 at a time. For `math` each round also
calls math-verify in a plain loop in this process, on the same answers; a ratio compares the two in one
round. Coordinator: CPU time of this process per reward.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.tasks.pool import PIPELINED_MAX, Score, ScoreCall, TaskPool, TextSettings

ROWS = 1000
END = 0  # the last token of an answer that stopped; any id will do


def write_model(directory: Path) -> Tokenizer:
    """A tokenizer with a token per byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return made


def write_rows(path: Path) -> None:
    rows = [{"prompt": f"{n} + {n}", "answer": str(2 * n)} for n in range(ROWS)]
    path.write_text("\n".join(map(json.dumps, rows)))


def words(index: int, *, right: bool) -> str:
    return f"The sum is {2 * index + (not right)}."


async def through_pool(
    directory: Path, tokenizer: Tokenizer, scorer: str, answers: int
) -> tuple[float, float]:
    """Rewards per second, and CPU seconds of this process per reward."""
    told = [
        str(2 * (n % ROWS)) if scorer == "exact" else words(n % ROWS, right=n % 2 == 0)
        for n in range(answers)
    ]
    calls = [
        ScoreCall(n % ROWS, pack_tokens([*tokenizer.encode(text).ids, END]))
        for n, text in enumerate(told)
    ]
    options = {"files": str(directory / "rows.jsonl"), "scorer": scorer, "shuffle": False}
    async with TaskPool("rows", options, texts=TextSettings(str(directory))) as pool:
        # These calls do not count: the process imports and parses what it needs.
        await _scored(pool, calls[:ROWS])
        wall, cpu = time.monotonic(), time.process_time()
        right = await _scored(pool, calls)
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    assert right == (answers if scorer == "exact" else (answers + 1) // 2), right
    return answers / wall, cpu / answers


async def _scored(pool: TaskPool, calls: Sequence[ScoreCall]) -> float:
    """The sum of the rewards."""
    total = 0.0
    for first in range(0, len(calls), PIPELINED_MAX):
        async for score in pool.rewards(calls[first : first + PIPELINED_MAX]):
            assert isinstance(score, Score), score
            total += score.reward
    return total


def math_alone(answers: int) -> float:
    """Rewards per second of math-verify in a loop, without processes, tokens or rows."""
    from math_verify import parse, verify

    # math-verify warns at every call; the warnings must not be part of the measured time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    wanted = [parse(f"${2 * n}$", parsing_timeout=0) for n in range(ROWS)]
    began = time.monotonic()
    for n in range(answers):
        found = parse(words(n % ROWS, right=n % 2 == 0), parsing_timeout=0)
        assert verify(wanted[n % ROWS], found, timeout_seconds=0) == (n % 2 == 0)
    return answers / (time.monotonic() - began)


def run(answers: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        tokenizer = write_model(directory)
        write_rows(directory / "rows.jsonl")
        exact, ratios, alone, cpu = [], [], [], []
        for _ in range(rounds):
            rate, cost = asyncio.run(through_pool(directory, tokenizer, "exact", answers))
            exact.append(rate)
            cpu.append(cost)
            loop = math_alone(answers // 10)
            rate, _ = asyncio.run(through_pool(directory, tokenizer, "math", answers // 10))
            alone.append(loop)
            ratios.append(rate / loop)
    for what, found, form in (
        ("exact, rewards/s", exact, ".0f"),
        ("coordinator, CPU ms a reward", [1e3 * each for each in cpu], ".4f"),
        ("math-verify in a loop, rewards/s", alone, ".0f"),
        ("math through the pool, of that", ratios, ".2f"),
    ):
        print(f"{what}: {median(found):{form}} ({min(found):{form}} to {max(found):{form}})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    run(options.answers, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
