"""Measures what slow boxes with many slots cost a real run: steps/s with these boxes cordoned and in use, by turns.

    python -m echo2d_lab.research.hostage_table [--work answers] [--boxes 4] [--pairs 5] [--seconds 30]

Coordinator, two workers of 48 slots with the torch engine, and the learner are processes of this machine, with the
demo's tiny model; S = 2, R = 64. Every second measurement has the boxes in use, and is compared with the mean of its
two neighbours, because a run gets slower with its age. A box makes the same tokens/s in total for any number of slots.
--work says which work the boxes get besides answers to train on: scores of every fifth version, calls of the gateway
(one after another, with the median of their seconds), or an audit; or episodes of two turns instead of answers.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

import openai

from echo2d.demo.processes import Programs, start_worker, wait_for
from echo2d.demo.run import CACHE, CONFIG, DEMO_LEARNER
from echo2d.demo.tiny_model import TinyRecipe, make_tiny_model
from echo2d.recipes.recipe_file import changed
from echo2d.runtime.run_dir.tokens import create_token

SLOTS = 48
# Number of boxes, slots of each, and total tokens/s of each.
BOXES = {
    "an honest box of 1,024 slots": (1, 1024, 30.0),
    "an honest box of 64 slots": (1, 64, 30.0),
    "a liar of 4,096 slots, 1 token/s": (1, 4096, 1.0),
    "ten keys of one token, 4,096 slots and 1 token/s each": (10, 4096, 1.0),
}
START_S, SETTLED_S, POLL_S = 120.0, 20.0, 3.0
POLICY = ("policy.trajectories_per_step=64",)
# For each kind of work: the task, and text that is appended to the config.
WORKS = {
    "answers": ("sort_digits", ""),
    "episodes": ("echo2d.demo.two_turns:TwoTurnDigits", ""),
    "scores": ("sort_digits", "\n[[eval]]\nevery = 5\nrows = 32\n"),
    "calls": ("sort_digits", "\n[gateway]\nenabled = true\n"),
    "audit": ("sort_digits", '\n[audit]\nenabled = true\ntrusted = ["a"]\n'),
}
CALL: Any = {"model": "policy", "prompt": "3141>", "max_tokens": 6}
PACE = ("learner.checkpoint_every=250",)


class Run:
    """The run's programs, and its operator's requests and orders."""

    def __init__(self, folder: Path, model: Path, programs: Programs, work: str) -> None:
        self._folder, self._programs = folder, programs
        task, added = WORKS[work]
        (folder / "snapshots").mkdir(parents=True)
        config = folder / "run.toml"
        facts = {
            "run": folder,
            "model": model,
            "seed": 0,
            "staleness": 2,
            "kappa": 1,
            "delta": "true",
            "task": task,
        }
        text = changed(CONFIG.format(**facts), POLICY) + added
        config.write_text(text)
        programs.start("coordinator", "-m", "echo2d", "coordinate", "--config", str(config))
        announced = wait_for(folder / "coordinator" / "coordinator.json", programs, START_S)
        self._url = str(json.loads(announced)["url"])
        learner_table = DEMO_LEARNER.format(**facts, steps=1_000_000, url=self._url)
        config.write_text(text + changed(learner_table, PACE))
        for name in ("a", "b"):
            self.join(name, SLOTS)
        programs.start("learner", "-m", "echo2d", "learn", "--config", str(config))
        self.call_s: list[float] = []
        if work == "calls":
            threading.Thread(target=self._call_on, daemon=True).start()

    def _call_on(self) -> None:
        """Make one call after another; calls are refused until their token is known and a version is served."""
        out = self._folder / "app.token"
        self._create_token("app", "gateway", out, None)
        client = openai.OpenAI(
            base_url=f"{self._url}/v1",
            api_key=json.loads(out.read_text())["secret"],
            max_retries=0,
        )
        while True:
            began = time.monotonic()
            try:
                client.completions.create(**CALL)
                self.call_s.append(time.monotonic() - began)
            except openai.OpenAIError:
                time.sleep(1.0)

    def _create_token(
        self, name: str, role: Literal["gateway", "worker"], out: Path, max_workers: int | None
    ) -> None:
        create_token(
            self._folder / "coordinator",
            name,
            role=role,
            url=self._url,
            out=out,
            max_workers=max_workers,
            expires="7d",
        )

    def join(self, name: str, slots: int, *flags: str) -> None:
        limits = (f"--slots={slots}", "--threads=1", *flags)
        start_worker(self._programs, name, self._folder, self._url, *limits)

    def asked(self, *words: str) -> str:
        command = [
            sys.executable,
            "-m",
            "echo2d",
            *words,
            f"--run-dir={self._folder / 'coordinator'}",
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.asked("status", "--json")))

    def join_slow(self, count: int, slots: int, tokens_per_s: float) -> list[str]:
        """Start boxes with one token. Returns their names."""
        names = [f"slow-{number}" for number in range(count)]
        token = self._folder / "slow.token"
        self._create_token("slow", "worker", token, count)
        for name in names:
            shutil.copy(token, self._folder / f"{name}.token")
            self.join(name, slots, "--set", f"tokens_per_s_max={tokens_per_s}")
        return names

    def measured(self, order: str, names: list[str], seconds: float) -> tuple[float, float | None]:
        """Give this order for these boxes. Returns steps/s over about this many seconds, which begin SETTLED_S later,
        and the seconds until an alert named one of the boxes; None: no alert within SETTLED_S."""
        for name in names:
            self.asked("worker", order, name)
        started, named_s = time.monotonic(), None
        while (passed := time.monotonic() - started) < SETTLED_S:
            if any(each["subject"] in names for each in self.status()["alerts"]):
                named_s = passed if named_s is None else named_s
            time.sleep(POLL_S)
        at, steps = [], []
        self.call_s.clear()
        for wait_s in (0.0, seconds):
            time.sleep(wait_s)
            steps.append(self.status()["committed_step"])
            at.append(time.monotonic())
        return float((steps[1] - steps[0]) / (at[1] - at[0])), named_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=WORKS, default="answers")
    parser.add_argument(
        "--boxes", type=int, default=len(BOXES), help="use the first this many of the boxes"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    chosen = parser.parse_args()
    model = make_tiny_model(CACHE, TinyRecipe(rng_seed=0))
    for title, box in islice(BOXES.items(), chosen.boxes):
        with tempfile.TemporaryDirectory() as folder, Programs(Path(folder) / "logs") as programs:
            run = Run(Path(folder) / "run", model, programs, chosen.work)
            slow = run.join_slow(*box)
            while sum(each["serving"] is not None for each in run.status()["workers"]) < 2 + len(
                slow
            ):
                programs.check()
                time.sleep(1.0)
            ratios = []
            before, _ = run.measured("cordon", slow, chosen.seconds)
            for _ in range(chosen.pairs):
                beside, named_s = run.measured("uncordon", slow, chosen.seconds)
                status, calls = run.status(), [*run.call_s]
                alerts = status["alerts"]
                when = "not named" if named_s is None else f"named after {named_s:.0f} s"
                named = [each["sentence"] for each in alerts if each["subject"] in slow]
                after, _ = run.measured("cordon", slow, chosen.seconds)
                ratios.append(2 * beside / (before + after))
                if calls and run.call_s:
                    print(
                        f"a call: {median(run.call_s):.2f} s alone, {median(calls):.2f} s beside it"
                    )
                for score in status["evaluations"]:
                    print(f"score: {score}")
                print(
                    f"{title}: {before:.2f} and {after:.2f} steps/s alone, {beside:.2f} between; "
                    f"{when}, and at the end: {named}",
                    flush=True,
                )
                before = after
            low, high = min(ratios), max(ratios)
            print(
                f"{title}: {median(ratios):.2f} of the control ({low:.2f} to {high:.2f})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
