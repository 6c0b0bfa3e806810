"""Problems of reasoning-gym: repeatable, split by their question, scored by their generator."""

import pytest

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Answer, Split
from echo2d.tasks.gym import GymTask

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_the_same_index_gives_the_same_problem_and_its_own_answer_is_right() -> None:
    made, again = GymTask("chain_sum", SUMS), GymTask("chain_sum", SUMS)
    for index in (0, 1, 10_000):
        prompt = made.prompt(index)
        assert prompt == again.prompt(index)
        right = str(eval(prompt.messages[0]["content"].partition(":")[2].strip(" =")))
        assert made.reward(prompt, Answer(f" {right}", "stop", 1)) == 1.0
        assert made.reward(prompt, Answer("1000", "stop", 1)) < 1.0


def test_held_out_questions_never_come_in_training() -> None:
    train = GymTask("chain_sum", SUMS)
    held_out = GymTask("chain_sum", SUMS, split="heldout")
    asked = [{each.prompt(index).row for index in range(500)} for each in (train, held_out)]
    assert not asked[0] & asked[1]
    assert len(asked[1]) > 20


@pytest.mark.parametrize(("share", "split"), [(0.02, "heldout"), (0.98, "train")])
def test_a_small_held_out_side_does_not_end(share: float, split: Split) -> None:
    made = GymTask("chain_sum", {"max_terms": 4}, held_out=share, split=split)
    assert all(made.prompt(index) for index in range(40))


def test_a_prompt_may_be_put_in_words() -> None:
    made = GymTask("chain_sum", SUMS, prompt="{question} Only the number.")
    assert made.prompt(0).messages[0]["content"].endswith("= Only the number.")


@pytest.mark.parametrize(
    ("dataset", "settings"),
    [("no_such", {}), ("chain_sum", {"no": 1}), ("chain_sum", {"min_terms": 0})],
)
def test_an_unknown_problem_is_the_operators_fault(dataset: str, settings: dict[str, int]) -> None:
    with pytest.raises(OperatorFault, match=dataset):
        GymTask(dataset, settings)
