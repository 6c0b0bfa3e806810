"""A worker's result is joined to the sample's earlier tokens."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import LeaseId, PeerId
from echo2d.core.protocol.control_messages import Finish, SampleFinished, VersionSpan
from echo2d.core.protocol.trajectory import NOTHING, Partial, pack_logprobs, pack_tokens
from echo2d.core.rules.run import RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.results import Written, written_by
from tests.support.coordinator_world import RULES, version_key

TASK = TaskRules(max_new_tokens=6, stop_token_ids=(1,))
PROMPT = pack_tokens([5] * 4)


def result(*tokens: int, finish: Finish = "stop") -> SampleFinished:
    span = VersionSpan(0, len(tokens), *version_key(0))
    logprobs = pack_logprobs([-0.5] * len(tokens))
    return SampleFinished(LeaseId(1), 0, 0, pack_tokens(tokens), logprobs, (span,), finish)


def judged(
    message: SampleFinished, base: Partial = NOTHING, rules: RunRules = RULES
) -> Written | str:
    return written_by(
        PeerId("w"),
        message,
        base,
        rules=rules,
        task=TASK,
        prompt=PROMPT,
        believed=lambda key: key == version_key(0),
    )


def test_a_result_is_appended_to_the_samples_earlier_tokens() -> None:
    base = judged(result(3, 1))
    assert not isinstance(base, str)
    more = judged(result(4, 1), base[0])
    assert not isinstance(more, str)
    assert more[0].tokens == pack_tokens([3, 1, 4, 1])
    assert [(each.start, each.end, each.author) for each in more[0].spans] == [(0, 4, "w")]


def test_a_result_without_its_end_token_is_a_fault() -> None:
    assert isinstance(judged(result(3, 4)), str)


@pytest.mark.parametrize(
    ("finish", "context", "tokens", "said"),
    [
        ("length", None, 6, "length"),
        ("length", 9, 5, "context"),
        ("context", None, 3, "context"),
    ],
    ids=["the task's limit", "the run's context", "a context that only the worker knows"],
)
def test_a_result_without_an_end_token_names_the_limit_that_ended_it(
    finish: Finish, context: int | None, tokens: int, said: Finish
) -> None:
    rules = replace(RULES, context_max=context)
    found = judged(result(*[3] * tokens, finish=finish), rules=rules)
    assert not isinstance(found, str)
    assert found[1] == said


def test_a_result_of_a_version_that_the_worker_did_not_serve_is_a_fault() -> None:
    message = replace(result(3, 1), spans=(VersionSpan(0, 2, *version_key(1)),))
    assert isinstance(judged(message), str)
