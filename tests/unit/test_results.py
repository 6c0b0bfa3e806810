"""What makes a result incredible: every clause of the rule, one by one."""

import math
from dataclasses import replace

import pytest

from echo2d.core.ids import LeaseId, Version
from echo2d.core.messages import SampleFinished, Span, VersionKey
from echo2d.core.results import result_fault
from echo2d.core.trajectory import pack_logprobs, pack_tokens
from tests.coordinator_world import version_digest, version_key

KNOWN = {version_key(2), version_key(3)}


def span(start: int, end: int, version: int = 2) -> Span:
    return Span(start, end, Version(version), version_digest(version))


GOOD = SampleFinished(
    LeaseId(1), 0, 0, pack_tokens([0, 5, 31]), pack_logprobs([-0.1, 0.0, 1e-4]), (span(0, 2), span(2, 3, 3)), "stop"
)


def fault(result: SampleFinished, known: set[VersionKey] = KNOWN) -> str:
    return result_fault(result, vocab_size=32, max_new_tokens=4, believed=known.__contains__)


def test_a_good_one() -> None:
    assert fault(GOOD) == ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (replace(GOOD, tokens=pack_tokens([0, 5, 32])), "vocabulary"),
        (replace(GOOD, tokens=pack_tokens([0, -1, 3])), "vocabulary"),
        (replace(GOOD, tokens=b"", logprobs=b"", spans=()), "0 tokens"),
        (replace(GOOD, tokens=pack_tokens([1] * 5), logprobs=pack_logprobs([0.0] * 5)), "5 tokens"),
        (replace(GOOD, tokens=GOOD.tokens + b"x"), "whole int32"),
        (replace(GOOD, logprobs=GOOD.logprobs[:-1]), "whole float32"),
        (replace(GOOD, logprobs=GOOD.logprobs[:-4]), "2 logprobs for 3"),
        (replace(GOOD, logprobs=pack_logprobs([0.0, math.nan, 0.0])), "logarithm"),
        (replace(GOOD, logprobs=pack_logprobs([0.0, -math.inf, 0.0])), "logarithm"),
        (replace(GOOD, logprobs=pack_logprobs([0.0, 2e-4, 0.0])), "logarithm"),
        (replace(GOOD, spans=()), "cover 0 of 3"),
        (replace(GOOD, spans=(span(0, 2),)), "cover 2 of 3"),
        (replace(GOOD, spans=(span(0, 4),)), "cover 4 of 3"),
        (replace(GOOD, spans=(span(0, 2), span(1, 3))), "contiguous"),
        (replace(GOOD, spans=(span(0, 0), span(0, 3))), "contiguous"),
        (replace(GOOD, spans=(span(1, 3),)), "contiguous"),
        (replace(GOOD, spans=(span(0, 2, 3), span(2, 3, 2))), "decrease"),
        (replace(GOOD, spans=(span(0, 3, 4),)), "not published"),
    ],
)
def test_a_bad_one(wrong: SampleFinished, says: str) -> None:
    assert says in fault(wrong)
