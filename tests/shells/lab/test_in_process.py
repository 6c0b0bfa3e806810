"""The real core with an eager worker: staleness is exactly as large as S and kappa allow."""

from collections.abc import Sequence

import pytest

from echo2d.client import read_batch
from echo2d.core.base.canonical import digest_of
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.learner.batch.checks import staleness_histogram
from echo2d.tasks.sort_digits import EOS, SortDigits
from echo2d_lab.bench.lab.in_process import InProcess, Written
from tests.support.coordinator_world import rules

R = 8


class Scribe:
    """Writes its version; of one answer in each group nothing else."""

    def __init__(self) -> None:
        self.version = -1

    def refit(self, version: VersionKey) -> None:
        self.version = version.version

    def write(
        self, prompts: Sequence[Sequence[int]], samples: Sequence[int]
    ) -> list[list[Written]]:
        token = 2 + self.version % 14
        return [
            [Written([token] * (1 + n % 2) + [EOS], [-0.5] * (2 + n % 2)) for n in range(count)]
            for count in samples
        ]


def play(staleness: int, kappa: int, steps: int) -> tuple[list[dict[int, int]], list[bytes]]:
    """Histogram and bytes of each batch."""
    numbers = {
        "staleness_max": staleness,
        "publish_every": kappa,
        "trajectories_per_step": R,
        "shape": "star",
    }
    run = InProcess(rules(**numbers, filter_zero_variance=False), SortDigits(0), Scribe(), slots=R)
    run.open_session()
    run.publish(0, digest_of(b"0"))
    ages, bodies = [], []
    for step in range(1, steps + 1):
        body, digest = run.take(step)
        ages.append(staleness_histogram(read_batch(1, digest.hex(), body)))
        bodies.append(body)
        assert run.commit(step, digest) == kappa
        if step % kappa == 0:
            run.publish(step, digest_of(str(step).encode()))
        run.state.check()
    return ages, bodies


@pytest.mark.parametrize(
    ("staleness", "kappa"), [(0, 1), (1, 1), (3, 1), (3, 2), (6, 5), (11, 1), (11, 10)]
)
def test_the_worker_runs_ahead_as_far_as_it_may(staleness: int, kappa: int) -> None:
    ages, _ = play(staleness, kappa, 3 * staleness + 2)
    first, later = ages[: staleness + 1], ages[staleness + 1 :]
    assert first == [{age: R} for age in range(staleness + 1)]
    assert {age for each in later for age in each} == set(
        range(staleness - kappa + 1, staleness + 1)
    ) or not later
    assert all(sum(each.values()) == R for each in ages)


def test_the_same_run_gives_the_same_result_again() -> None:
    assert play(3, 2, 8) == play(3, 2, 8)
