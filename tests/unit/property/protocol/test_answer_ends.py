"""Every end that an engine can draw is accepted; an end that no engine can have made is not."""

from dataclasses import dataclass
from typing import get_args

from hypothesis import assume, given
from hypothesis import strategies as st

from echo2d.core.protocol.answer_end import OutputLimit, end_fault, output_limit
from echo2d.core.protocol.control_messages import Finish

VOCAB = 6
token_ids = st.integers(0, VOCAB - 1)


@dataclass(frozen=True)
class Ask:
    """What a lease says. written: tokens that the sample has already, of another lease."""

    stops: frozenset[int]
    limit: OutputLimit
    written: int


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    most, prompt = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    context = draw(st.none() | st.integers(prompt + 1, 20))
    limit = output_limit(most, prompt_tokens=prompt, context_max=context)
    written = draw(st.integers(0, limit.tokens - 1))
    return Ask(frozenset(draw(st.sets(token_ids, max_size=3))), limit, written)


def engine(ask: Ask, stream: list[int]) -> tuple[list[int], Finish]:
    """What an engine makes of the tokens that it draws, one by one: the rule, told another way."""
    tokens = []
    for token in stream:
        tokens.append(token)
        if token in ask.stops:
            return tokens, "stop"
        if ask.written + len(tokens) == ask.limit.tokens:
            return tokens, ask.limit.finish
    raise AssertionError("the stream is as long as any answer")


def fault(ask: Ask, tokens: list[int], finish: Finish) -> str:
    return end_fault(tokens, finish, before=ask.written, limit=ask.limit, stop_token_ids=ask.stops)


streams = st.lists(token_ids, min_size=9, max_size=9)


@given(ask=asks(), stream=streams)
def test_an_answer_that_an_engine_makes_is_accepted(ask: Ask, stream: list[int]) -> None:
    tokens, finish = engine(ask, stream)
    assert fault(ask, tokens, finish) == ""
    if finish == "context":
        # A worker sees a limit of tokens only.
        assert fault(ask, tokens, "length") == ""


@given(
    ask=asks(),
    tokens=st.lists(token_ids, min_size=1, max_size=12),
    finish=st.sampled_from(get_args(Finish)),
)
def test_an_answer_that_no_engine_makes_is_refused(
    ask: Ask, tokens: list[int], finish: Finish
) -> None:
    made, ended = engine(ask, [*tokens, *[0] * 9])
    honest = made == tokens and (finish == ended or (finish, ended) == ("length", "context"))
    assert (fault(ask, tokens, finish) == "") == honest


@given(ask=asks(), stream=streams, cut=st.integers(1, 9))
def test_no_answer_can_be_cut_short(ask: Ask, stream: list[int], cut: int) -> None:
    tokens, _ = engine(ask, stream)
    assume(cut < len(tokens))
    assert all(fault(ask, tokens[:cut], finish) for finish in get_args(Finish))
