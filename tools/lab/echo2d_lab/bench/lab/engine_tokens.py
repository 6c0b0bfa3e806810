"""Measure the torch engine's tokens/s with a model so small that the engine's own work dominates.

    python -m echo2d_lab.bench.lab.engine_tokens [--samples 32] [--tokens 100] [--runs 7]

It prints the median, the smallest and the largest figure of the runs. To compare two commits, run it by turns in each.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from echo2d.demo.tiny_model import TinyRecipe, make_tiny_model
from echo2d.engines.base import GenerateRequest
from echo2d.engines.torch_engine.engine import TorchEngine


async def measure(model: Path, samples: int, tokens: int, runs: int) -> list[float]:
    """Tokens/s of each run, after one run that warms up."""
    engine = TorchEngine(slots_max=samples, threads=1)
    await engine.start()
    await engine.refit(model, "0-a")
    rates = []
    for run in range(runs + 1):
        started = time.perf_counter()
        request = GenerateRequest(str(run), [3, 4, 5], samples, tokens)
        made = 0
        async for delta in engine.generate(request):
            made += len(delta.tokens)
        rates.append(made / (time.perf_counter() - started))
    await engine.close()
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--runs", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = TinyRecipe(accuracy_stop=0.0, batch=8, layers=1)
        model = make_tiny_model(Path(folder), recipe)
        # No end token, so that no engine of any commit ends an answer early.
        for name in ("config.json", "generation_config.json"):
            facts = json.loads((model / name).read_text()) if (model / name).exists() else {}
            (model / name).write_text(json.dumps({**facts, "eos_token_id": None}))
        rates = asyncio.run(measure(model, asked.samples, asked.tokens, asked.runs))
    print(
        f"tokens/s: median {statistics.median(rates):.0f}, "
        f"from {min(rates):.0f} to {max(rates):.0f}, {asked.runs} runs"
    )


if __name__ == "__main__":
    main()
