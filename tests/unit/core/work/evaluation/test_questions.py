"""Questions are drawn once, a few at a time, until there are enough or no more."""

from echo2d.core.rules.tasks import EvalRules, TaskRules
from echo2d.core.work.evaluation.questions import QUESTIONS_AHEAD_MAX, EvalQuestion, Questions
from echo2d.core.work.events import DrawPrompt


def questions(rows: int) -> Questions:
    return Questions(
        EvalRules(
            TaskRules(
                "held",
                max_new_tokens=1024,
            ),
            rows=rows,
            every=1,
            samples=1,
            hold_s=60.0,
            solved_at=1.0,
        )
    )


def test_an_evaluation_draws_the_requested_number_of_questions() -> None:
    made = questions(3)
    assert made.ask() == [DrawPrompt(number, "held") for number in range(3)]
    assert made.ask() == []
    made.drawn(EvalQuestion(1, b"1"))
    made.drawn(EvalQuestion(7, b"never asked for"))
    made.skip(0)
    found = [made.complete]
    made.drawn(EvalQuestion(2, b"2"))
    made.check()
    assert [*found, made.complete] == [False, True]
    assert sorted(made.all) == [1, 2]


def test_an_evaluation_without_a_number_draws_all_questions() -> None:
    made = questions(0)
    assert len(made.ask()) == QUESTIONS_AHEAD_MAX
    for cursor in range(QUESTIONS_AHEAD_MAX):
        if cursor < 5:
            made.drawn(EvalQuestion(cursor, b""))
        else:
            made.ended(cursor)
            made.check()
    assert made.ask() == []
    assert made.complete
    assert len(made.all) == 5


def test_many_questions_are_drawn_a_few_at_a_time() -> None:
    made = questions(QUESTIONS_AHEAD_MAX + 2)
    made.ask()
    made.drawn(EvalQuestion(0, b""))
    assert made.ask() == [DrawPrompt(QUESTIONS_AHEAD_MAX, "held")]
    assert not made.complete
