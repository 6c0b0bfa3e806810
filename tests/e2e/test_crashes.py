"""`kill -9` of each process of a short real run: it completes, nothing is lost, nothing is trained twice.

`-m soak` does it at 50 moments more, each drawn from an rng_seed: `--soak-from N` begins with another one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2d.bench.programs import Programs
from echo2d.bench.tiny_model import make_tiny_model
from tests.e2e.crash_kit import CrashSite, Point, run_with_crash

POINTS = (
    Point("learner", 5),  # between two checkpoints
    Point("coordinator", 3),
    Point("worker", 2),
    Point("seed", 2),
    Point("task process", 2),
)
SOAK_POINTS = 50


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CrashSite]:
    model = make_tiny_model(Path.home() / ".cache" / "echo2d")
    with Programs(tmp_path / "logs") as programs:
        yield CrashSite(tmp_path, model, programs)


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.kind)
def test_a_run_survives(site: CrashSite, point: Point) -> None:
    run_with_crash(site, point, workers=2 if point.kind == "worker" else 1)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(SOAK_POINTS))
def test_a_run_survives_at_any_moment(site: CrashSite, number: int, soak_from: int) -> None:
    rng_seed = soak_from + number
    point = Point.draw(rng_seed)
    print(f"rng_seed={rng_seed} {point}")  # noqa: T201 - shown when it fails
    run_with_crash(site, point, workers=2)
