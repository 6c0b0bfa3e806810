"""Play held-out questions with versions of a run's model, by the engine and the environment of the run.

    run_dir/versions --> TorchEngine <--> Episodes of the environment, split "heldout" --> held_out.jsonl

Every version gets the same questions, and for each sample the same seed. A question is not in the
training split, so no version was trained on it.
"""

import asyncio
import json
import tomllib
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path

from echo2d.core.protocol.sampling import Sampling
from echo2d.engines.torch_engine.engine import TorchEngine
from echo2d.tasks.pool import TaskPool, TextSettings
from examples.episode_player import EpisodePlayer, version_directory

DRAWN = {"sampled": Sampling(), "greedy": Sampling(temperature=0.0)}
THREADS = 1
SLOTS = 64


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """right, called: the share of questions with a right answer, and with a well-formed call. name: how
    the answers were drawn, one to each question.
    """

    version: int
    name: str
    right: float
    called: float
    questions: int

    def se(self, share: float) -> float:
        """The standard error of a share of the questions."""
        return sqrt(share * (1 - share) / self.questions)

    def __str__(self) -> str:
        right, called = (f"{x:.3f} +- {self.se(x):.3f}" for x in (self.right, self.called))
        return f"version {self.version:>3}  {self.name:<7}  right {right}  called {called}"


def read_scores(run: Path) -> list[HeldOutScore]:
    """The scores so far, oldest version first."""
    path = run / "held_out.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [HeldOutScore(**json.loads(line)) for line in lines]


def score_versions(run: Path, *, questions: int) -> None:
    """Score the base model and the versions that the run kept, unless they have scores."""
    asyncio.run(_score_versions(run, questions))


async def _score_versions(run: Path, questions: int) -> None:
    config = tomllib.loads((run / "run.toml").read_text())
    task, last, every = config["task"], config["learner"]["steps"], config["run"]["keep_every"]
    done = {(score.version, score.name) for score in read_scores(run)}
    # Greedy answers take as long, and say less: of the first and the last version only.
    wanted = [(version, "sampled") for version in range(every, last, every)]
    wanted = [(0, "sampled"), (0, "greedy"), *wanted, (last, "sampled"), (last, "greedy")]
    missing = [each for each in wanted if each not in done]
    engine = TorchEngine(threads=THREADS, slots_max=SLOTS)
    await engine.start()
    try:
        options, model = {**task["options"], "split": "heldout"}, run / "model"
        async with TaskPool(task["kind"], options, texts=TextSettings(str(model))) as pool:
            player = EpisodePlayer(engine, pool, config["sampling"]["max_new_tokens"], model)
            for version, name in missing:
                if engine.label != str(version):
                    await engine.refit(version_directory(run, version), str(version))
                score = await _score(player, version, name, questions)
                print(score, flush=True)
                with (run / "held_out.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(score)) + "\n")
    finally:
        await engine.close()


async def _score(player: EpisodePlayer, version: int, name: str, questions: int) -> HeldOutScore:
    label = f"{version} {name}"
    found = await asyncio.gather(
        *(player.play(row, DRAWN[name], label) for row in range(questions))
    )
    return HeldOutScore(
        version,
        name,
        sum(each.parts["right"] > 0 for each in found) / questions,
        sum(each.parts["call"] > 0 for each in found) / questions,
        questions,
    )
