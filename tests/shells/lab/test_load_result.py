"""A sentence states what the figures of `echo2d bench coordinator` mean."""

from dataclasses import fields, replace
from typing import Any

from echo2d_lab.bench.coordinator.load import Load
from echo2d_lab.bench.coordinator.load_result import LoadResult

LOAD = Load()
ZERO: dict[str, Any] = {field.name: 0 for field in fields(LoadResult)}
FOUND = LoadResult(
    **{
        **ZERO,
        "lease_p50_ms": 200.0,
        "cpu_share": 0.68,
        "cpu_share_parts": (0.6, 0.72),
        "trajectories_per_s": 199.0,
        "results_refused": {},
    }
)


def test_a_sentence_says_that_a_load_is_carried() -> None:
    assert FOUND.verdict(LOAD) == (
        "This host carries 1,000 workers and 200 trajectories/s: the coordinator's one thread is busy "
        "68% of the time (at most 72%), and a slot is empty for 1.0% of it."
    )


def test_a_sentence_says_that_a_load_is_too_large() -> None:
    slow = replace(FOUND, trajectories_per_s=120.0, links_lost=3)
    assert slow.verdict(LOAD) == (
        "This host does not carry 1,000 workers and 200 trajectories/s: only 120.0 of 200 "
        "trajectories/s were accepted; 3 control links were lost."
    )
