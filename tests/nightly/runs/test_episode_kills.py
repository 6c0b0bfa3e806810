"""`kill -9` during episodes of several turns: no acknowledged turn is lost, repeated, or trained twice.

Outside agents play one task of the run with tickets, and the run's own processes play another one.
"""

import random
from pathlib import Path

import pytest

from echo2d.demo.processes import Programs
from echo2d.demo.tiny_model import make_tiny_model
from tests.support.connection_tap import Tap
from tests.support.crash import watch_ledger
from tests.support.episode_kills import EPISODES, KILLS, STEPS_MAX, Books, EpisodeSite
from tests.support.paths import REPO
from tests.support.witnessed_game import Witness


@pytest.mark.timeout(1500)
def test_thirty_kills_lose_and_repeat_no_acknowledged_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    rng_seed = request.config.getoption("--rng-seed")
    rng_seed = random.randrange(1 << 32) if rng_seed is None else rng_seed
    print(f"rng_seed={rng_seed}")  # noqa: T201 - shown when it fails
    rng = random.Random(rng_seed)
    kills = [kind for kind, count in KILLS.items() for _ in range(count)]
    rng.shuffle(kills)
    assert len(kills) == 30
    # The agent and the environment are among the tests.
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    model = make_tiny_model(Path.home() / ".cache" / "echo2d")
    with Witness() as witness, Programs(tmp_path / "logs") as programs:
        site = EpisodeSite(tmp_path, model, programs, witness, rng)
        watch_ledger(site.ledger, EPISODES)
        with Tap(site.run_dir) as site.tap:
            site.coordinate()
            for number in (1, 2):
                site.join(f"worker-{number}", f"--name=worker-{number}", "--threads=1")
            site.play()
            site.learn(STEPS_MAX)
            site.strike(kills)
            site.run_out()
            Books.of(site).balance()
