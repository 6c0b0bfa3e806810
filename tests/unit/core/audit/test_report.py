"""The report about a worker, from the lines of the audit log."""

from typing import Any

from echo2d.core.audit.report import SHOWN_MAX, summed_up


def line(worker: str = "w1", **changes: Any) -> dict[str, Any]:
    return {
        "at": 1.0, "worker": worker, "name": "box", "group": 7, "sample": 1, "versions": [3],
        "tokens": 10, "k": 0.5, "z": -1.0, "misses": [2, 1, 0], "flags": [], "verdict": "", **changes,
    }  # fmt: skip


def test_means_and_counts_cover_all_lines_of_a_worker() -> None:
    lines = [line(), line(k=1.5, z=2.0, misses=None, tokens=30), line("w2", flags=["seed"])]
    reports = summed_up(lines)
    first = reports[lines[0]["worker"]]
    assert (first.audited, first.flagged, first.tokens, first.misses) == (2, 0, 40, 2)
    assert (first.k, first.z, first.evidence) == (1.0, 0.5, [])
    assert reports[lines[2]["worker"]].flags == {"seed": 1}


def test_the_report_shows_the_last_flagged_answers_as_evidence() -> None:
    lines = [line(group=number, flags=["logprobs"]) for number in range(2 * SHOWN_MAX)]
    (report,) = summed_up([line(), *lines]).values()
    assert [each["group"] for each in report.evidence] == [*range(SHOWN_MAX, 2 * SHOWN_MAX)]
