"""`kill -9` of each process of a short real run: the run completes, nothing is lost, nothing is trained twice.

`-m soak` kills at 50 more moments, each drawn from an rng_seed: `--soak-from N` begins with another one.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.demo.chaos import VictimKind
from echo2d.demo.processes import Programs
from echo2d.demo.tiny_model import make_tiny_model
from tests.support.crash import STEP_FLOOR_S, STEPS, CrashSite, Point, run_with_crashes

SEED_WORKER = (Point("seed", 1), Point("worker", 4))
TASK_COORDINATOR_LEARNER = (
    Point("task process", 1),
    Point("coordinator", 3),
    Point("learner", 5),  # between two checkpoints
)
SOAK_POINTS = 50


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CrashSite]:
    model = make_tiny_model(Path.home() / ".cache" / "echo2d")
    with Programs(tmp_path / "logs") as programs:
        yield CrashSite(tmp_path, model, programs)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("points", "workers"),
    [
        pytest.param(SEED_WORKER, 2, id="seed-worker"),
        pytest.param(
            TASK_COORDINATOR_LEARNER, 1, id="task-coordinator-learner", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_run_survives_a_kill_of_each_process(
    site: CrashSite, points: tuple[Point, ...], workers: int
) -> None:
    """The steps between two kills need what the first one took: the second brings nothing back."""
    run_with_crashes(site, *points, workers=workers)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_survives_kills_of_learner_and_coordinator_alone_and_together(
    site: CrashSite,
) -> None:
    """At drawn moments: no step is missing, none has two digests, and what is trained again is the same batch."""
    rng_seed = random.randrange(1 << 32)
    print(f"rng_seed={rng_seed}")  # noqa: T201 - shown when it fails
    rng = random.Random(rng_seed)
    steps = sorted(rng.sample(range(1, STEPS - 1), 3))
    delays_s = [(rng.uniform(0.0, STEP_FLOOR_S),) for _ in steps]
    deaths: list[tuple[VictimKind, tuple[VictimKind, ...]]] = [
        ("learner", ()),
        ("coordinator", ()),
        ("coordinator", ("learner",)),
    ]
    rng.shuffle(deaths)
    points = [
        Point(kind, step, delay_s, also)
        for (kind, also), step, delay_s in zip(deaths, steps, delays_s, strict=True)
    ]
    run_with_crashes(site, *points, workers=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(SOAK_POINTS))
def test_a_run_survives_a_kill_at_any_moment(site: CrashSite, number: int, soak_from: int) -> None:
    rng_seed = soak_from + number
    point = Point.draw(rng_seed)
    print(f"rng_seed={rng_seed} {point}")  # noqa: T201 - shown when it fails
    run_with_crashes(site, point, workers=2)
