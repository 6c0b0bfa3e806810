"""The rule by which a result is not believed, clause by clause."""

import math
from dataclasses import replace

import pytest

from echo2d.core.base.ids import LeaseId, Version
from echo2d.core.protocol.answer_end import OutputLimit
from echo2d.core.protocol.control_messages import (
    SampleAnswered,
    SampleFinished,
    VersionKey,
    VersionSpan,
)
from echo2d.core.protocol.result_check import result_fault
from echo2d.core.protocol.trajectory import pack_logprobs, pack_tokens
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.column_engine import columns_of
from tests.support.coordinator_world import World, version_digest, version_key
from tests.support.rollouts import world_of

KNOWN = {version_key(2), version_key(3)}


def span(start: int, end: int, version: int = 2) -> VersionSpan:
    return VersionSpan(start, end, Version(version), version_digest(version))


GOOD = SampleFinished(
    LeaseId(1),
    0,
    0,
    pack_tokens([0, 5, 31]),
    pack_logprobs([-0.1, 0.0, 1e-4]),
    (span(0, 2), span(2, 3, 3)),
    "stop",
)


def fault(result: SampleFinished, known: set[VersionKey] = KNOWN) -> str:
    return result_fault(
        result,
        vocab_size=32,
        limit=OutputLimit(4, "length"),
        stop_token_ids=(31,),
        believed=known.__contains__,
    )


def test_a_good_result_has_no_fault() -> None:
    assert fault(GOOD) == ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (replace(GOOD, tokens=pack_tokens([0, 5, 32])), "vocabulary"),
        (
            replace(GOOD, columns=columns_of([0, 5])),
            "column experts: expected 36 bytes for 3 tokens",
        ),
        (replace(GOOD, tokens=pack_tokens([0, -1, 3])), "vocabulary"),
        (replace(GOOD, tokens=b"", logprobs=b"", spans=()), "0 tokens"),
        (replace(GOOD, tokens=pack_tokens([1] * 5), logprobs=pack_logprobs([0.0] * 5)), "5 tokens"),
        (replace(GOOD, tokens=GOOD.tokens + b"x"), "tokens: expected a multiple of 4"),
        (replace(GOOD, logprobs=GOOD.logprobs[:-1]), "logprobs: expected a multiple of 4"),
        (replace(GOOD, logprobs=GOOD.logprobs[:-4]), "2 logprobs for 3"),
        (replace(GOOD, logprobs=pack_logprobs([0.0, math.nan, 0.0])), "between -50 and 0"),
        (replace(GOOD, logprobs=pack_logprobs([0.0, -math.inf, 0.0])), "between -50 and 0"),
        (replace(GOOD, logprobs=pack_logprobs([0.0, 2e-4, 0.0])), "between -50 and 0"),
        (replace(GOOD, logprobs=pack_logprobs([0.0, -50.1, 0.0])), "between -50 and 0"),
        (replace(GOOD, tokens=pack_tokens([0, 31, 31])), "tokens after a stop token"),
        (replace(GOOD, tokens=pack_tokens([0, 5, 5])), "ends after 3 tokens"),
        (replace(GOOD, finish="length"), "finish 'length', but it ended with 'stop'"),
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
def test_a_bad_result_has_its_fault_named(wrong: SampleFinished, says: str) -> None:
    assert says in fault(wrong)


@pytest.mark.parametrize(
    "right",
    [
        replace(GOOD, tokens=pack_tokens([30, 0, 31])),
        replace(
            GOOD,
            tokens=pack_tokens([1] * 4),
            logprobs=pack_logprobs([0.0] * 4),
            spans=(span(0, 4),),
            finish="length",
        ),
        replace(
            GOOD, tokens=pack_tokens([31]), logprobs=pack_logprobs([-50.0]), spans=(span(0, 1),)
        ),
        replace(GOOD, logprobs=pack_logprobs([1e-4, 1e-4, 1e-4])),
        replace(GOOD, spans=(span(0, 1), span(1, 2), span(2, 3))),
    ],
)
def test_a_result_at_the_limits_is_allowed(right: SampleFinished) -> None:
    assert fault(right) == ""


def a_late_result() -> tuple[World, FakePeer, SampleFinished]:
    """Of a worker that serves version 0 while version 1 is published and verified here, but not served yet."""
    world, (slow, fast) = world_of(2, 4)
    world.ask_batch(1)
    while 1 not in world.digests:
        while fast.open:
            world.say(fast, fast.finish(*fast.open[0]))
        world.drain()
    world.commit(1, world.digests[1])
    world.publish(1)
    world.drain()
    assert slow.ready == version_key(1)
    return world, slow, slow.finish(*slow.open[0])


def answer_to(world: World, peer: FakePeer, result: SampleFinished) -> tuple[bool, str]:
    world.say(peer, result)
    answer = [message for message in peer.inbox if isinstance(message, SampleAnswered)][-1]
    return answer.accepted, answer.reason


@pytest.mark.parametrize(
    "key", [version_key(1), version_key(7), version_key(0, 1)], ids=["not served", "none", "twin"]
)
def test_a_span_names_only_versions_that_this_worker_is_known_to_have_served(
    key: VersionKey,
) -> None:
    world, peer, result = a_late_result()
    lie = replace(result, spans=(VersionSpan(0, 3, key.version, key.digest),))
    assert answer_to(world, peer, lie)[1].endswith(
        "is not published, revoked, or not acknowledged by this worker"
    )


def test_a_span_of_a_revoked_version_is_refused() -> None:
    world, peer, result = a_late_result()
    world.open_session(0)
    world.publish(0, salt=1)
    assert "revoked" in answer_to(world, peer, result)[1]


def test_an_honest_result_is_accepted_and_its_repeat_is_acknowledged() -> None:
    world, peer, result = a_late_result()
    assert answer_to(world, peer, result) == (True, "")
    assert answer_to(world, peer, result) == (True, "")
    assert answer_to(world, peer, replace(result, finish="length"))[0] is False


def test_no_worker_answers_for_another_one() -> None:
    world, _, result = a_late_result()
    assert answer_to(world, world.peers["w1"], result) == (False, "the lease is over")
