"""Prompts are drawn ahead, taken by cursor, and used again when their group aged out."""

from echo2d.core.work.events import DrawPrompt
from echo2d.core.work.training.prompts import PROMPTS_AHEAD_MAX, DrawnPrompt, Prompts
from echo2d.core.work.training.sampler import Sampler


def taken(prompts: Prompts) -> DrawnPrompt | None:
    prompt = prompts.next(None)
    if prompt is not None:
        prompts.take(prompt)
    return prompt


def test_prompts_are_drawn_ahead_and_taken_in_order() -> None:
    prompts = Prompts(7, Sampler(None))
    assert prompts.ask(2) == [DrawPrompt(7), DrawPrompt(8)]
    assert prompts.ask(2) == []
    prompts.drawn(DrawnPrompt(8, b"8"))
    prompts.drawn(DrawnPrompt(7, b"7"))
    prompts.drawn(DrawnPrompt(99, b"?"))  # never asked for
    prompts.check()
    assert [taken(prompts), taken(prompts), taken(prompts)] == [
        DrawnPrompt(7, b"7"),
        DrawnPrompt(8, b"8"),
        None,
    ]


def test_prompts_that_were_given_back_come_first_and_count() -> None:
    prompts = Prompts(0, Sampler(None))
    prompts.give_back(DrawnPrompt(3, b"3"))
    assert prompts.ask(1) == []
    assert taken(prompts) == DrawnPrompt(3, b"3")
    assert prompts.ask(1) == [DrawPrompt(0)]


def test_prompts_given_back_before_a_restart_are_drawn_again_also_after_the_end() -> None:
    prompts = Prompts(9, Sampler(None), again=[2, 5])
    assert prompts.ask(1) == [DrawPrompt(2)]
    prompts.drawn(DrawnPrompt(2, b"2"))
    assert taken(prompts) == DrawnPrompt(2, b"2")
    assert prompts.ask(2) == [DrawPrompt(5), DrawPrompt(9)]
    prompts.ended(9)
    prompts.drawn(DrawnPrompt(5, b"5"))
    assert taken(prompts) == DrawnPrompt(5, b"5")
    assert prompts.over


def test_the_prompts_do_not_end_before_those_given_back_are_used() -> None:
    prompts = Prompts(9, Sampler(None), again=[2, 5])
    prompts.ended(9)
    assert not prompts.over
    assert prompts.ask(2) == [DrawPrompt(2), DrawPrompt(5)]


def test_the_number_of_prompts_drawn_ahead_is_limited() -> None:
    prompts = Prompts(0, Sampler(None))
    assert len(prompts.ask(10 * PROMPTS_AHEAD_MAX)) == PROMPTS_AHEAD_MAX
    prompts.check()
