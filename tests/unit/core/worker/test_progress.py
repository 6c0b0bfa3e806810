"""The owner's view of a version that is arriving at the worker."""

import pytest

from echo2d.core.base.ids import Version
from echo2d.core.worker.progress import (
    LINE_S,
    LINE_SERVING_S,
    RATE_S,
    ProgressMeter,
    Stage,
    amount,
    clock,
)

GB, MB = 10**9, 10**6


def receiving(done: int, total: int | None = 16_100 * MB, version: int = 0) -> Stage:
    return Stage("receiving", Version(version), done, total)


def test_progress_shows_the_bytes_the_rate_and_the_remaining_time() -> None:
    meter = ProgressMeter()
    assert meter.update(receiving(0), 0.0).words() == "0.0/16.1 GB"
    assert meter.update(receiving(480 * MB), 10.0).words() == "0.5/16.1 GB 48 MB/s eta 5:25"
    for second in range(20, 70, 10):
        progress = meter.update(receiving(second * 48 * MB), float(second))
    assert progress.words() == "2.9/16.1 GB 48 MB/s eta 4:35"
    stalled = meter.update(receiving(2880 * MB), 60.0 + 2 * RATE_S)
    assert (stalled.rate, stalled.eta_s) == (0.0, None)
    assert stalled.words() == "2.9/16.1 GB 0 B/s"


def test_the_end_of_a_version_that_is_still_encoded_is_not_known() -> None:
    meter = ProgressMeter()
    meter.update(receiving(0, None), 0.0)
    progress = meter.update(receiving(5 * MB, None), 1.0)
    assert progress.words() == "5.0 MB 5.0 MB/s"
    assert (progress.stage.share, progress.eta_s) == (None, None)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    meter = ProgressMeter()
    for second in range(200):
        # 1 MB/s for 100 s, then 3 MB/s.
        done = (second + 2 * max(0, second - 100)) * MB
        progress = meter.update(receiving(done), float(second))
    assert progress.rate == pytest.approx(3 * MB)


def test_the_time_before_the_first_frame_does_not_count() -> None:
    meter = ProgressMeter()
    for second in range(6):
        assert meter.update(receiving(0), float(second)).rate is None
    assert meter.update(receiving(48 * MB), 6.0).rate == 48 * MB


def test_frames_that_are_lost_again_give_no_negative_rate() -> None:
    meter = ProgressMeter()
    meter.update(receiving(10 * MB), 0.0)
    assert meter.update(receiving(9 * MB), 1.0).rate is None
    assert meter.update(receiving(10 * MB), 2.0).rate == MB


def lines(meter: ProgressMeter, stages: list[Stage], *, serving: bool) -> list[int]:
    """The seconds at which the log gets a line, of a stage a second."""
    found = []
    for second, stage in enumerate(stages):
        meter.update(stage, float(second))
        if meter.line_due(float(second), serving=serving):
            found.append(second)
    return found


def test_the_first_version_is_reported_every_ten_seconds() -> None:
    stages = [*[receiving(1)] * 25, *[Stage("loading", Version(0))] * 12, *[Stage("")] * 30]
    assert lines(ProgressMeter(), stages, serving=False) == [10, 20, 35]
    assert LINE_S == 10.0


def test_a_worker_that_serves_a_version_reports_little() -> None:
    deltas = [receiving(1, version=second // 40) for second in range(400)]
    assert lines(ProgressMeter(), deltas, serving=True) == []
    slow = [receiving(1)] * 200
    assert lines(ProgressMeter(), slow, serving=True) == [60, 120, 180]
    assert LINE_SERVING_S == 60.0


def test_other_stages_show_their_share_and_their_duration() -> None:
    meter = ProgressMeter()
    meter.update(Stage("applying", Version(0), 0, 2000), 0.0)
    assert meter.update(Stage("applying", Version(0), 500, 2000), 7.0).words() == "25%, 0:07"
    meter.update(Stage("loading", Version(0)), 10.0)
    assert meter.update(Stage("loading", Version(0)), 3700.0).words() == "1:01:30"


@pytest.mark.parametrize(
    ("count", "of", "text"),
    [
        (0, None, "0 B"),
        (999, None, "999 B"),
        (48_000, None, "48 kB"),
        (4_800_000, None, "4.8 MB"),
        (48_000_000, None, "48 MB"),
        (3_100_000_000, 16_100_000_000, "3.1/16.1 GB"),
        (0, 275_000_000, "0/275 MB"),
    ],
)
def test_amounts_are_shown_in_suitable_units(count: int, of: int | None, text: str) -> None:
    assert amount(count, of) == text


def test_a_duration_is_shown_as_a_clock() -> None:
    assert [clock(each) for each in (0, 59.4, 271, 3599.6)] == ["0:00", "0:59", "4:31", "1:00:00"]
