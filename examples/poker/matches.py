"""Let versions of a run's model play against each opponent, by the engine and the environment of the run.

    run_dir/versions --> TorchEngine <--> Episodes of the environment, with other seeds --> matches.json

The hands are dealt from all hole cards, by seeds that training never used.
"""

import asyncio
import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from echo2d.core.protocol.sampling import Sampling
from echo2d.engines.torch_engine.engine import TorchEngine
from echo2d.tasks.pool import Score, TaskPool
from echo2d.views.status import plain_console
from examples.episode_player import EpisodePlayer, version_directory

SEED_DISTANCE = 1_000_000  # from the seed of the training's hands to that of these
THREADS = 1
SLOTS = 256  # hands that are played at once
Z95 = 1.96
DRAWN = {"sampled": Sampling(), "greedy": Sampling(temperature=0.0)}


@dataclass(frozen=True, slots=True)
class PokerMatch:
    """What a version won in many hands against one opponent. drawn: how its decisions were.

    mean, low, high: big blinds a hand, penalties included, and the ends of its 95 % interval.
    illegal: answers a hand that were no legal decision.
    """

    version: int
    drawn: str
    opponent: str
    hands: int
    stack: int
    mean: float
    low: float
    high: float
    illegal: float

    def __str__(self) -> str:
        return (
            f"version {self.version:>3}  {self.drawn:<7}  against {self.opponent:<5}  "
            f"{self.mean:+.3f} big blinds a hand ({self.low:+.3f} to {self.high:+.3f})"
        )


def summed_up(
    version: int, drawn: str, options: dict[str, Any], scores: Sequence[Score]
) -> PokerMatch:
    """options: of the environment. scores: of at least two hands."""
    rewards = [score.reward for score in scores]
    mean, half = fmean(rewards), Z95 * stdev(rewards) / len(rewards) ** 0.5
    return PokerMatch(
        version,
        drawn,
        options["opponent"],
        len(scores),
        options["stack"],
        mean,
        mean - half,
        mean + half,
        -fmean(score.parts["illegal"] for score in scores) / options["illegal_penalty"],
    )


def read_matches(run: Path) -> list[PokerMatch]:
    """The matches so far, in the order played."""
    path = run / "matches.json"
    found = json.loads(path.read_text()) if path.exists() else []
    return [PokerMatch(**match) for match in found]


def play_matches(run: Path, *, hands: int) -> list[PokerMatch]:
    """Play the matches of the model as it began and of the last version that are missing; return all."""
    asyncio.run(_play_matches(run, hands))
    return read_matches(run)


def print_matches(matches: Sequence[PokerMatch]) -> None:
    titles = ("train steps", "decisions", "opponent", "hands", "big blinds a hand", "95 %")
    table = Table(*titles, box=None)
    for match in matches:
        table.add_row(
            str(match.version),
            match.drawn,
            match.opponent,
            f"{match.hands:,}",
            f"{match.mean:+.3f}",
            f"{match.low:+.3f} to {match.high:+.3f}",
        )
    plain_console().print(table)


async def _play_matches(run: Path, hands: int) -> None:
    config = tomllib.loads((run / "run.toml").read_text())
    done = {
        (match.version, match.drawn, match.opponent, match.hands) for match in read_matches(run)
    }
    engine = TorchEngine(threads=THREADS, slots_max=SLOTS)
    await engine.start()
    try:
        last = config["learner"]["steps"]
        for version, drawn in ((0, "sampled"), (last, "sampled"), (last, "greedy")):
            for task in config["task"]:
                if (version, drawn, task["options"]["opponent"], hands) in done:
                    continue
                if engine.label != str(version):
                    await engine.refit(version_directory(run, version), str(version))
                scores = await _scores(run, engine, task, hands, drawn)
                match = summed_up(version, drawn, task["options"], scores)
                print(match, flush=True)
                found = [asdict(each) for each in (*read_matches(run), match)]
                (run / "matches.json").write_text(json.dumps(found, indent=2) + "\n")
    finally:
        await engine.close()


async def _scores(
    run: Path, engine: TorchEngine, task: dict[str, Any], hands: int, drawn: str
) -> list[Score]:
    """Those of hands that the engine's version plays."""
    options = task["options"]
    fresh = {"rng_seed": options["rng_seed"] + SEED_DISTANCE, "held_out": 0.0}
    async with TaskPool(task["kind"], {**options, **fresh}) as pool:
        player = EpisodePlayer(engine, pool, 1, run / "model")
        free = asyncio.Semaphore(SLOTS)

        async def play(row: int) -> Score:
            async with free:
                return await player.play(row, DRAWN[drawn], f"{engine.label} {drawn}")

        return await asyncio.gather(*map(play, range(hands)))
