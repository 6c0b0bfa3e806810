"""How answers may end."""

import pytest

from echo2d.core.protocol.answer_end import OutputLimit, end_fault, output_limit
from echo2d.core.protocol.control_messages import Finish

STOP = (1, 2)


@pytest.mark.parametrize(
    ("prompt", "context", "limit"),
    [
        (10, None, OutputLimit(8, "length")),
        (10, 18, OutputLimit(8, "length")),
        (10, 17, OutputLimit(7, "context")),
        (10, 10, OutputLimit(0, "context")),
    ],
)
def test_the_lease_or_the_context_limits_an_answer(
    prompt: int, context: int | None, limit: OutputLimit
) -> None:
    assert output_limit(8, prompt_tokens=prompt, context_max=context) == limit


@pytest.mark.parametrize(
    ("tokens", "finish", "before", "limit", "says"),
    [
        ([5, 1], "stop", 0, OutputLimit(4, "length"), ""),
        ([5, 6, 7, 2], "stop", 0, OutputLimit(4, "length"), ""),
        ([5, 6, 7, 8], "length", 0, OutputLimit(4, "length"), ""),
        ([8], "length", 3, OutputLimit(4, "length"), ""),
        ([5, 6], "context", 0, OutputLimit(2, "context"), ""),
        ([5], "stop", 0, OutputLimit(4, "length"), "it ends after 1 tokens, without a stop token"),
        ([1] + [5] * 3, "stop", 0, OutputLimit(4, "length"), "tokens after a stop token"),
        ([1, 1], "stop", 0, OutputLimit(4, "length"), "tokens after a stop token"),
        ([5, 6], "length", 0, OutputLimit(2, "context"), ""),
        ([5, 6], "context", 0, OutputLimit(2, "length"), "but it ended with 'length'"),
        ([5, 1], "length", 0, OutputLimit(2, "length"), "but it ended with 'stop'"),
        ([5, 1], "stop_string", 0, OutputLimit(4, "length"), "but it ended with 'stop'"),
        ([5, 6], "stop_string", 0, OutputLimit(4, "length"), "without a stop token"),
    ],
)
def test_an_end_that_no_engine_can_have_made_is_refused(
    tokens: list[int], finish: Finish, before: int, limit: OutputLimit, says: str
) -> None:
    found = end_fault(tokens, finish, before=before, limit=limit, stop_token_ids=STOP)
    assert says in found if says else not found
