"""Workers that come back late: the schedules, the bytes of each route, and the table of what composing saves."""

from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import numpy as np

from echo2d_lab.research.late_joiners import absences, measure, table
from echo2d_lab.standins.snapshots import write_model

VERSIONS = 6
OPTIONS = Namespace(workers=2, versions=VERSIONS, mib=1, leave=1.0, away=[4, 4], fresh=0.0)


def test_a_schedule_depends_on_its_rng_seed_alone() -> None:
    options = Namespace(workers=8, versions=40, leave=0.2, away=[2, 6], fresh=0.3)
    drawn = absences(options, 1)
    assert drawn == absences(options, 1) != absences(options, 2)
    assert {each.worker for each in drawn} == {*range(1, 8)}
    assert {each.back - each.left for each in drawn} == {2, 3, 4, 5, 6}
    assert {each.fresh for each in drawn} == {True, False}
    for worker in range(1, 8):
        mine = [each for each in drawn if each.worker == worker]
        assert all(one.back <= two.left for one, two in pairwise(mine))


def a_trained_run(folder: Path) -> Path:
    """Versions of which each changes one word in a hundred of the one before."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 16, 1 << 19, dtype=np.uint16)
    for version in range(1, VERSIONS + 1):
        words[rng.integers(0, words.size, words.size // 100)] += 1
        write_model(folder / f"v{version}", [words.data])
    return folder


def test_each_route_of_a_late_joiner_takes_its_bytes(tmp_path: Path) -> None:
    """Four versions behind: no copy is kept any more of the one that it has."""
    options = Namespace(**vars(OPTIONS), out=tmp_path / "lines.jsonl")
    line = measure(options, a_trained_run(tmp_path / "1e-6"), 0, "composed")
    [late] = line["late"]
    assert late["behind"] == 4
    assert late.keys() <= {"behind", "composed", "delta"}
    assert line["stayed"].keys() == {"full", "delta"}
    assert 0 < 10 * late["composed"] < line["stayed"]["full"]


def test_the_table_shows_what_composing_saves() -> None:
    def lines(rng_seed: int, composed: int) -> list[dict[str, object]]:
        about = {"run": "1e-6", "away": [1, 6], "rng_seed": rng_seed, "stayed": {"full": 1000}}
        sizes = {"full": 500, "copies": 200, "composed": composed}
        return [
            {
                **about,
                "routes": routes,
                "late": [{"behind": 5, routes: size}, {"behind": None, "full": 500}],
            }
            for routes, size in sizes.items()
        ]

    rows = [*table([*lines(0, 100), *lines(1, 50), *lines(2, 100)[:2]])]
    assert rows[2:] == [
        "| 1e-6 | 1-6 | 2 | 2 | 2 | `full` | 85.0 % (80.0-90.0) | 42.5 % (40.0-45.0) | 21.2 % (20.0-22.5) |",
        "| 1e-6 | 1-6 | 2 | 2 | 2 | `copies` | 62.5 % (50.0-75.0) | 17.9 % (14.3-21.4) | 7.4 % (5.9-8.8) |",
    ]
    assert {row.count(" |") for row in rows} == {9}
