"""Train on rollouts in int8, with and without decoupled PPO, adaptive clipping and a rescaled base.

    python -m echo2d_lab.research.quantized_training OUT [--of demo|math] [--steps 80] [--seeds 0 1 2] [--only NAME ...]

    bfloat16    workers in bfloat16, the default recipe
    int8        workers in int8 (bfloat16 between the layers), the default recipe
    decoupled   int8, proximal = "recomputed"
    adaptive    as decoupled, correction = "adaptive_clip"
    scaled      as decoupled; the norms of the base are RESCALED times as large, the layers after them so much smaller
    both        as scaled, correction = "adaptive_clip"

The programs are those of a user: coordinator, two workers of one thread each, learner. All runs have as many train
steps, and two optimizer steps in each, since with one of them decoupled PPO clips nothing. OUT/results.jsonl gets a
line for each run: greedy accuracy on held-out questions; mean reward of the last quarter of the steps; means over all
steps of the share of tokens outside the clip, of that with a truncated ratio, and of KL(rollout || learner) in nats;
seconds of a step. A run that is in the file is not made again. Run it in the root of the checkout.

A power of two is exact in any floating-point format, so the rescaled base computes what the base does. With a scale for
each output channel, int8 rounds it to the same numbers too: only the optimizer's steps weigh more, relatively.
"""

import argparse
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file

from echo2d.demo.processes import Programs, start_worker, wait_for
from echo2d.demo.results import read_metrics
from echo2d.demo.run import CACHE, CONFIG, DEMO_LEARNER, SLOTS, START_S
from echo2d.demo.tiny_model import TinyRecipe, greedy_accuracy, held_out_prompts, make_tiny_model
from echo2d_lab.research.math_minutes import accuracy, config_of, exported, held_out
from examples.one_machine import SLOTS as MATH_SLOTS
from examples.one_machine import STOP_S, WORKERS
from examples.smollm2 import model_directory

RESCALED = 2.0
STEPS = {"demo": 80, "math": 30}
NORMS, LAYERS = (
    re.compile(r"\.(input_layernorm|post_attention_layernorm)\.weight$"),
    re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$"),
)


class Arm(NamedTuple):
    quantized: bool
    scaled: bool
    recipe: dict[str, Any]


DECOUPLED = {"proximal": "recomputed"}
ADAPTIVE = {**DECOUPLED, "correction": "adaptive_clip"}
ARMS = {
    "bfloat16": Arm(quantized=False, scaled=False, recipe={}),
    "int8": Arm(quantized=True, scaled=False, recipe={}),
    "decoupled": Arm(quantized=True, scaled=False, recipe=DECOUPLED),
    "adaptive": Arm(quantized=True, scaled=False, recipe=ADAPTIVE),
    "scaled": Arm(quantized=True, scaled=True, recipe=DECOUPLED),
    "both": Arm(quantized=True, scaled=True, recipe=ADAPTIVE),
}


def rescaled(base: Path, out: Path) -> Path:
    """The same function of a Llama, Qwen2 or Qwen3, with larger norms before smaller linear layers."""
    if not out.exists():
        shutil.copytree(base, out)
        for path in out.glob("*.safetensors"):
            tensors = load_file(path)
            for name, tensor in tensors.items():
                if NORMS.search(name):
                    tensor *= RESCALED
                elif LAYERS.search(name):
                    tensor /= RESCALED
            save_file(tensors, path, metadata={"format": "pt"})
    return out


def demo_run(run: Path, base: Path, arm: Arm, steps: int, seed: int) -> None:
    """The config of `echo2d demo` with an arm's settings."""
    run.mkdir(parents=True)
    (run / "snapshots").mkdir()
    facts = {"model": base, "staleness": 2, "kappa": 1, "seed": seed, "task": "sort_digits"}
    text = CONFIG.format(**facts, delta="true") + "\n[link]\nport = 0\n"
    quantized = f"quantized_workers = {json.dumps(arm.quantized)}"
    text = text.replace("[policy]", f"[policy]\n{quantized}")
    learner = DEMO_LEARNER.format(seed=seed, steps=steps)
    settings = {"optimizer_steps": 2, **arm.recipe}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    (run / "run.toml").write_text(text + learner + lines)


def math_run(run: Path, base: Path, arm: Arm, steps: int, seed: int) -> None:
    """The config of `make math` with an arm's settings."""
    recipe = {"optimizer_steps": 2, "steps": steps, **arm.recipe}
    settings = {"run.base_model": str(base), "policy.quantized_workers": arm.quantized}
    settings |= {f"learner.{name}": value for name, value in recipe.items()}
    config_of(run, seed, *(f"{name}={json.dumps(value)}" for name, value in settings.items()))


def train(run: Path, slots: int, *, quantized: bool) -> float:
    """Seconds from the learner's start to its end."""
    config = run / "run.toml"
    with Programs(run / "logs", stop_s=STOP_S) as programs:
        programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
        said = wait_for(run / "coordinator" / "coordinator.json", programs, START_S)
        kind = f"--set=quantization={'int8' if quantized else 'none'}"
        for number in range(1, WORKERS + 1):
            flags = (f"--slots={slots}", "--threads=1", "--set=dtype=bfloat16", kind)
            start_worker(programs, f"worker-{number}", run, json.loads(said)["url"], *flags)
        began = time.monotonic()
        learner = programs.start("learner", "-m", "echo2d", "learn", "--config", str(config))
        while learner.returncode is None:
            programs.check()
            time.sleep(0.5)
        return time.monotonic() - began


def result(run: Path, seconds: float, right: float) -> dict[str, Any]:
    # Evaluations have rows of their own.
    rows = [each for each in read_metrics(run / "learner" / "metrics.jsonl") if "loss" in each]
    late = rows[-len(rows) // 4 :]

    def mean(name: str, of: list[dict[str, Any]] = rows) -> float:
        return fmean(float(row[name]) for row in of)

    return {
        "accuracy": right,
        "reward": mean("reward_mean", late),
        "outside_clip": mean("clip_share"),
        "truncated": mean("corrected_share"),
        "kl": mean("kl"),
        "step_s": seconds / len(rows),
    }


def demo(run: Path, arm: Arm, steps: int, seed: int) -> dict[str, Any]:
    recipe = TinyRecipe(rng_seed=seed)
    base = make_tiny_model(CACHE, recipe)
    if arm.scaled:
        base = rescaled(base, run.parent / f"base-{seed}")
    demo_run(run, base, arm, steps, seed)
    seconds = train(run, SLOTS, quantized=arm.quantized)
    return result(run, seconds, greedy_accuracy(exported(run), held_out_prompts(recipe)))


def math(run: Path, arm: Arm, steps: int, seed: int) -> dict[str, Any]:
    base = model_directory(CACHE)
    if arm.scaled:
        base = rescaled(base, run.parent / "base")
    math_run(run, base, arm, steps, seed)
    seconds = train(run, MATH_SLOTS, quantized=arm.quantized)
    return result(run, seconds, accuracy(exported(run), held_out(run))[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on rollouts in int8.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--of", choices=STEPS, default="demo")
    parser.add_argument("--steps", type=int, help=f"train steps ({STEPS})")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS))
    chosen = parser.parse_args()
    made: Callable[..., dict[str, Any]] = demo if chosen.of == "demo" else math
    out = chosen.out.absolute() / chosen.of
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    results.touch()
    done = {(row["arm"], row["seed"]) for row in map(json.loads, results.read_text().splitlines())}
    for seed in chosen.seeds:
        for name in chosen.only:
            if (name, seed) in done:
                continue
            run = out / f"{name}-{seed}"
            shutil.rmtree(run, ignore_errors=True)  # of a start that was cut off
            found = made(run, ARMS[name], chosen.steps or STEPS[chosen.of], seed)
            line = json.dumps({"arm": name, "seed": seed, **found})
            with results.open("a") as file:
                file.write(line + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
