"""The cost of computing KV caches again: tokens of this refit, at the speed of the waves before it."""

from collections.abc import Iterator

import pytest

from echo2d.engines.server.recompute import WAVES_MAX, RecomputeMeter


@pytest.fixture
def meter() -> Iterator[RecomputeMeter]:
    meter = RecomputeMeter()
    yield meter
    meter.check()


def wave(meter: RecomputeMeter, tokens: int, seconds: float, *, at: float = 0.0) -> None:
    meter.sent("a", tokens // 2, now=at)
    meter.sent("b", tokens - tokens // 2, now=at)
    meter.wrote("a", now=at + seconds / 2)
    meter.wrote("b", now=at + seconds)


def test_the_first_refit_knows_its_tokens_but_not_what_they_cost(meter: RecomputeMeter) -> None:
    meter.dropped(300)
    meter.dropped(700)
    assert meter.take() == (1000, None)
    assert meter.take() == (0, 0.0), "nothing was dropped since"


def test_the_cost_of_a_refit_is_its_tokens_at_the_speed_of_earlier_waves(
    meter: RecomputeMeter,
) -> None:
    wave(meter, 1000, 2.0)
    wave(meter, 3000, 4.0, at=100.0)
    meter.dropped(2000)
    tokens, seconds = meter.take()
    assert tokens == 2000
    assert seconds == pytest.approx(2000 * 6.0 / 4000)


def test_only_the_newest_waves_count(meter: RecomputeMeter) -> None:
    wave(meter, 1000, 1000.0)
    for number in range(WAVES_MAX):
        wave(meter, 100, 1.0, at=2000.0 + 10 * number)
    assert meter.seconds(100) == pytest.approx(1.0)


def test_a_request_that_ends_without_a_token_measures_nothing(meter: RecomputeMeter) -> None:
    meter.sent("a", 100, now=0.0)
    meter.sent("b", 900, now=0.0)
    meter.wrote("a", now=1.0)
    meter.gone("b", now=50.0)
    assert meter.seconds(100) == pytest.approx(50.0), "the engine was busy until then"
    meter.sent("c", 100, now=60.0)
    meter.gone("c", now=61.0)
    assert meter.seconds(100) == pytest.approx(50.0), "a wave without a token is none"


def test_a_wave_that_the_next_stop_interrupts_measures_nothing(meter: RecomputeMeter) -> None:
    meter.sent("a", 100, now=0.0)
    meter.sent("b", 100, now=0.0)
    meter.wrote("a", now=1.0)
    meter.interrupted()
    meter.wrote("b", now=9.0)
    meter.gone("b", now=9.0)
    assert meter.seconds(100) is None


def test_later_tokens_of_a_request_do_not_change_its_measurement(meter: RecomputeMeter) -> None:
    wave(meter, 100, 1.0)
    meter.wrote("a", now=70.0)
    meter.wrote("stranger", now=80.0)
    assert meter.seconds(100) == pytest.approx(1.0)
