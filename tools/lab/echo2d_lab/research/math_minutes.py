"""SmolLM2-135M learns sums in equal minutes: RL alone, supervised rows before RL, and a cut pupil from its teacher.

    python -m echo2d_lab.research.math_minutes OUT [--minutes 15] [--supervised 5] [--seeds 0 1 2] [--only NAME ...]

    rl          the run of `make math`, for all minutes
    sft+rl      `echo2d learn --sft` on its rows for the first minutes, then the same run from that model
    teacher     `objective = "distill"`: the pupil has 27 of the 30 layers of the model, which is its teacher

Minutes are of the clock, with the start of the programs, on a machine that does nothing else. When they are over, the
learner saves its step; the model of its checkpoint answers the 80 held-out sums greedily. OUT/results.jsonl gets a line
for each run, and a run that is in it is not made again. Run it in the root of the checkout.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo2d.demo.processes import Programs, start_worker, wait_for
from examples.math.run import NEW_TOKENS, PROMPT, _prepare
from examples.one_machine import CACHE, SLOTS, START_S, STOP_S, WORKERS
from examples.smollm2 import model_directory

ENDLESS = 10_000  # steps: the minutes end a run
DRAWS = 8
# The rows' answers are the sums written out: "4 + 1 = 5".
SFT = ("sft.lr=2e-5", "sft.threads=2", f"sft.steps={ENDLESS}", "sft.heldout_every=10")
# After that an answer has one or two undecided tokens, so that a step of Adam moves them farther.
AFTER_SFT = ("learner.lr=1e-5",)
DISTILLED = (
    'learner.objective="distill"',
    "policy.filter_zero_variance=false",
    # The learner's step takes longer than the answers.
    "learner.threads=2",
    "policy.staleness_max=1",
)
LEFT_OUT = (12, 17, 22)  # of 30 layers; the pupil without them answers hardly anything right


def config_of(run: Path, seed: int, *settings: str) -> Path:
    """The config of `make math`, with these settings besides."""
    run.mkdir(parents=True)
    chosen = argparse.Namespace(
        steps=ENDLESS, staleness=None, seed=seed, every=ENDLESS, set=list(settings)
    )
    _prepare(chosen, run)
    return run / "run.toml"


def learn(run: Path, minutes: float, *options: str) -> None:
    """Run the programs of a run until the minutes are over; with --sft only the learner."""
    end, config = time.monotonic() + 60 * minutes, run / "run.toml"
    supervised = "--sft" in options
    with Programs(run / f"logs{'-sft' if supervised else ''}", stop_s=STOP_S) as programs:
        if not supervised:
            programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
            said = wait_for(run / "coordinator" / "coordinator.json", programs, START_S)
            for number in range(1, WORKERS + 1):
                limits = (f"--slots={SLOTS}", "--threads=1")
                start_worker(programs, f"worker-{number}", run, json.loads(said)["url"], *limits)
        learner = programs.start(
            "learner", "-m", "echo2d", "learn", "--config", str(config), *options
        )
        while time.monotonic() < end:
            programs.check()
            time.sleep(1.0)
        learner.terminate()
        learner.wait(STOP_S)


def exported(run: Path, *options: str) -> Path:
    """The model of the last checkpoint."""
    made = run / f"model{''.join(options)}"
    command = ("learn", "--config", str(run / "run.toml"), *options, "--export", "last", str(made))
    subprocess.run([sys.executable, "-m", "echo2d", *command], check=True)
    return made


def accuracy(model: Path, rows: Path) -> tuple[float, float]:
    """The share of the sums that the model answers right: greedily, and of DRAWS answers drawn at temperature 1.

    The last number of an answer counts.
    """
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    sums = [json.loads(line) for line in rows.read_text().splitlines()]
    asked = [
        [{"role": "user", "content": PROMPT.format(question=each["question"])}] for each in sums
    ]
    read = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    shares = []
    for draws, drawn in ((1, {}), (DRAWS, {"do_sample": True, "top_k": 0})):
        with torch.no_grad():
            written = loaded.generate(
                **read, max_new_tokens=NEW_TOKENS, num_return_sequences=draws, **drawn
            )
        answers = tokenizer.batch_decode(
            written[:, read["input_ids"].shape[1] :], skip_special_tokens=True
        )
        numbers = [re.findall(r"\d+", answer) for answer in answers]
        right = [
            bool(found) and found[-1] == sums[place // draws]["answer"]
            for place, found in enumerate(numbers)
        ]
        shares.append(sum(right) / len(right))
    return shares[0], shares[1]


def last_rows(run: Path, name: str) -> list[float]:
    """This figure of all steps of the run."""
    lines = (run / "learner" / "metrics.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if row.get(name) is not None]


def rl(run: Path, seed: int, minutes: float, _: float) -> dict[str, Any]:
    config_of(run, seed)
    learn(run, minutes)
    return {"steps": len(last_rows(run, "loss")), "model": str(exported(run))}


def supervised_first(run: Path, seed: int, minutes: float, first: float) -> dict[str, Any]:
    config_of(run / "sft", seed, f'sft.rows={{ rng_seed = {seed}, answer = "worked" }}', *SFT)
    learn(run / "sft", first, "--sft")
    warm = exported(run / "sft", "--sft")
    config_of(run / "rl", seed, f'run.base_model="{warm}"', *AFTER_SFT)
    learn(run / "rl", minutes - first)
    greedy, drawn = accuracy(warm, held_out(run / "rl"))
    return {
        "steps": len(last_rows(run / "rl", "loss")),
        "model": str(exported(run / "rl")),
        "supervised_accuracy": greedy,
        "supervised_drawn": drawn,
    }


def distilled(run: Path, seed: int, minutes: float, _: float) -> dict[str, Any]:
    teacher, pupil = model_directory(CACHE), run.parent / "pupil"
    if not pupil.exists():
        cut: Any = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
        kept = [layer for each, layer in enumerate(cut.model.layers) if each not in LEFT_OUT]
        cut.model.layers = torch.nn.ModuleList(kept)
        cut.config.num_hidden_layers = len(cut.model.layers)
        cut.save_pretrained(pupil)
        AutoTokenizer.from_pretrained(teacher).save_pretrained(pupil)
    config_of(run, seed, f'run.base_model="{pupil}"', f'learner.teacher="{teacher}"', *DISTILLED)
    learn(run, minutes)
    distances, rewards = last_rows(run, "kl_teacher"), last_rows(run, "reward_mean")
    return {
        "steps": len(distances),
        "model": str(exported(run)),
        "kl_teacher_first": sum(distances[:4]) / 4,
        "kl_teacher_last": sum(distances[-4:]) / 4,
        "reward_first": sum(rewards[:4]) / 4,
        "reward_last": sum(rewards[-4:]) / 4,
        "pupil_accuracy": accuracy(pupil, held_out(run))[0],
    }


def held_out(run: Path) -> Path:
    return run / "rows" / "heldout.jsonl"


RUNS: dict[str, Callable[[Path, int, float, float], dict[str, Any]]] = {
    "rl": rl,
    "sft+rl": supervised_first,
    "teacher": distilled,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="SmolLM2-135M learns sums in equal minutes.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=15.0, help="of each run (15)")
    parser.add_argument("--supervised", type=float, default=5.0, help="of these with --sft (5)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out.absolute() / "results.jsonl"
    results.touch()
    done = {(row["run"], row["seed"]) for row in map(json.loads, results.read_text().splitlines())}
    for seed in options.seeds:
        for name in options.only:
            if (name, seed) in done:
                continue
            run = options.out.absolute() / f"{name}-{seed}"
            found = RUNS[name](run, seed, options.minutes, options.supervised)
            rows = held_out(run / "rl" if name == "sft+rl" else run)
            found["accuracy"], found["drawn"] = accuracy(Path(found["model"]), rows)
            row = {"run": name, "seed": seed, "minutes": options.minutes, **found}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row))


if __name__ == "__main__":
    main()
