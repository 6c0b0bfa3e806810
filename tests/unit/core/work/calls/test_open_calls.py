"""Open calls, and their limit."""

from echo2d.core.work.calls.events import CallId
from echo2d.core.work.calls.open_calls import (
    CHOICES_MAX,
    CHOICES_OF_CALLER_MAX,
    CHOICES_OPEN_MAX,
    OpenCalls,
)
from tests.support.gateway import call


def test_a_call_is_done_with_its_last_choice() -> None:
    calls = OpenCalls()
    first, second = calls.open(call(1, choices=2))
    calls.end(first)
    assert (CallId(1) in calls, calls.get(CallId(1), 0), calls.get(CallId(1), 1)) == (
        True,
        None,
        second,
    )
    calls.check()
    calls.end(second)
    assert (len(calls), calls.ended) == (0, {"done": 1})
    calls.check()


def test_a_call_that_is_given_up_names_its_unfinished_choices() -> None:
    calls = OpenCalls()
    first, second = calls.open(call(1, choices=2))
    calls.end(first)
    assert calls.end_call(CallId(1), "gone") == [second]
    assert (list(calls), calls.ended) == ([], {"gone": 1})
    calls.check()


def test_a_caller_has_a_limited_share_of_the_open_calls() -> None:
    calls = OpenCalls()
    for number in range(CHOICES_OF_CALLER_MAX // CHOICES_MAX):
        assert calls.too_many(call(number, caller="a", choices=CHOICES_MAX)) == ""
        calls.open(call(number, caller="a", choices=CHOICES_MAX))
    assert calls.too_many(call(100, caller="a")).startswith(
        f"{CHOICES_OF_CALLER_MAX} choices of yours"
    )
    for number in range(CHOICES_OF_CALLER_MAX // CHOICES_MAX):
        calls.open(call(200 + number, caller="b", choices=CHOICES_MAX))
    assert calls.too_many(call(300, caller="c")).startswith(f"{CHOICES_OPEN_MAX} choices are open")
    calls.check()
