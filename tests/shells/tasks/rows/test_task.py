"""The task "rows": when each row is asked, and the messages about rows that do not fit."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Answer, NoMorePrompts
from echo2d.tasks.rows.task import RowsTask, permuted


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "sums.jsonl"
    rows = [
        {"question": f"{n} + 1?", "answer": f"We add. #### {n + 1} ", "level": n % 3}
        for n in range(50)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def task(file: str, **options: Any) -> RowsTask:
    return RowsTask(file, **{"prompt": "question", "answer_after": "####", **options})


def asked(made: RowsTask, count: int) -> list[str]:
    return [made.prompt(index).messages[0]["content"] for index in range(count)]


def test_each_epoch_asks_each_row_once_in_another_order(file: str) -> None:
    made = task(file)
    first, second = asked(made, 100)[:50], asked(made, 100)[50:]
    assert sorted(first) == sorted(second) == sorted(f"{n} + 1?" for n in range(50))
    assert first != second
    assert asked(task(file), 100) == first + second
    assert asked(task(file, rng_seed=1), 50) != first
    assert asked(task(file, shuffle=False), 3) == ["0 + 1?", "1 + 1?", "2 + 1?"]


def test_the_prompts_end_after_the_last_epoch(file: str) -> None:
    made = task(file, epochs=2)
    assert made.prompt(99)
    with pytest.raises(NoMorePrompts):
        made.prompt(100)


def test_the_splits_share_no_question(file: str) -> None:
    train, held_out = task(file, held_out=0.2), task(file, held_out=0.2, split="heldout")
    assert len(train) + len(held_out) == 50
    assert 0 < len(held_out) < 25
    assert not set(asked(train, len(train))) & set(asked(held_out, len(held_out)))


def test_other_words_around_a_question_do_not_change_its_side(file: str) -> None:
    plain, worded = task(file), task(file, prompt="What is {question} Only the number.")
    assert [plain.prompt(n).row for n in range(50)] == [worded.prompt(n).row for n in range(50)]


def test_the_expected_answer_is_the_text_behind_the_marker(file: str) -> None:
    made = task(file, shuffle=False, tags=["level"])
    prompt = made.prompt(4)
    assert made.reward(prompt, Answer(" 5\n", "stop", 2)) == 1.0
    assert made.reward(prompt, Answer("6", "stop", 1)) == 0.0
    assert prompt.tags == {"level": "1"}
    assert prompt.row == task(file).prompt(asked(task(file), 50).index("4 + 1?")).row


def test_a_prompt_may_be_a_text_with_columns(file: str) -> None:
    made = task(file, prompt="What is {question} Only the number.", shuffle=False)
    assert asked(made, 1) == ["What is 0 + 1? Only the number."]


def test_messages_are_read_from_a_column(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path.write_text(json.dumps({"chat": messages, "answer": 3}))
    made = RowsTask(str(path), messages="chat")
    assert made.prompt(0).messages == messages
    assert made.reward(made.prompt(0), Answer("3", "stop", 1)) == 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt": "ask"}, "has no 'ask'; its columns are question, answer, level"),
        (
            {"prompt": "{ask}"},
            "has no 'ask'; its columns are .*braces of the text itself are doubled",
        ),
        ({"prompt": "Think first."}, "in a text, columns are in braces, such as"),
        ({"prompt": "{question} \\boxed{}"}, "braces of the text itself are doubled"),
        ({"answer": "gold"}, "has no 'gold'"),
        ({"tags": ["no"]}, "has no 'no'"),
        ({"messages": "question"}, "expected a list of messages"),
        ({"split": "test"}, '"train" or "heldout"'),
        ({"held_out": 1.0}, "0 to less than 1"),
        ({"split": "heldout"}, "is empty"),
        ({"scorer": "no"}, 'expected "math", "exact"'),
        ({"scorer": "no_module:score"}, "no_module"),
        ({"scorer": "regex"}, "pattern"),
        ({"scorer": "regex", "scorer_options": {"pattern": "("}}, "pattern"),
    ],
)
def test_a_row_that_does_not_fit_is_reported_in_one_line(
    options: dict[str, Any], says: str, file: str
) -> None:
    with pytest.raises(OperatorFault, match=says) as fault:
        task(file, **options)
    assert "\n" not in str(fault.value)


MESSAGES = [{"role": "user", "content": "1?"}]


@pytest.mark.parametrize(
    ("change", "rows", "says"),
    [
        ({323: {"answer": None}}, 400, r"1 of 400 rows has no 'answer', e\.g\. row 323 of sums\.jsonl: leave them"),
        ({8: {"answer": ""}, 9: {"answer": ""}}, 400, "2 of 400 rows have no 'answer', e"),
        ({n: {"question": ""} for n in range(400)}, 400, "400 of 400 rows have no 'question'"),
        ({0: {"question": MESSAGES}}, 400, "'question' holds a list of messages; name it in task.options.messages"),
        ({7: {"answer": ["23"]}}, 400, r"row 7 of sums\.jsonl: 'answer' holds list \['23'\]; expected a text or a"),
        ({n: {"question": "1?"} for n in range(400)}, 400, "is empty: the number of different questions is 1, and"),
        ({}, 1, "is empty: the number of different questions is 1, and held_out = 0.2"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_reported_at_the_start(
    change: dict[int, dict[str, Any]], rows: int, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "sums.jsonl"
    made = [{"question": f"{n}?", "answer": "1", **change.get(n, {})} for n in range(rows)]
    path.write_text("\n".join(map(json.dumps, made)))
    said = []
    for split in ("train", "heldout"):
        try:
            RowsTask(str(path), prompt="question", held_out=0.2, split=split)
        except OperatorFault as fault:
            said.append(str(fault))
    assert re.search(says, said[0])


def test_a_users_scorer_may_take_any_expected_answer(tmp_path: Path) -> None:
    path = tmp_path / "tests.jsonl"
    path.write_text(json.dumps({"prompt": "1?", "answer": ["assert f()"]}))
    made = RowsTask(str(path), scorer="operator:eq")
    assert made.expected(made.prompt(0)).text == "['assert f()']"


def test_an_expected_answer_may_be_nested_in_a_column(tmp_path: Path) -> None:
    path = tmp_path / "nested.jsonl"
    row = {"question": "1 + 1?", "reward_model": {"ground_truth": "2"}, "a.b": "3"}
    path.write_text(json.dumps(row))
    options: dict[str, Any] = {"prompt": "question", "answer": "reward_model.ground_truth"}
    made = RowsTask(str(path), **options)
    assert made.expected(made.prompt(0)).text == "2"
    assert RowsTask(str(path), **{**options, "answer": "a.b"}).expected(made.prompt(0)).text == "3"
    with pytest.raises(OperatorFault, match=r"row 0 of nested\.jsonl has no 'reward_model\.other'"):
        RowsTask(str(path), **{**options, "answer": "reward_model.other"})


@pytest.mark.parametrize(
    ("option", "found", "expected"),
    [
        ("held_out", "0.1", "0.0"),
        ("answer_after", 3, '""'),
        ("shuffle", "no", "true"),
        ("tags", ["level", 3], '["level"]'),
        ("messages", ["chat"], '""'),
        ("scorer_options", "strict", '{"key": 1}'),
    ],
)
def test_an_option_of_a_wrong_type_is_the_operators_fault(
    file: str, option: str, found: object, expected: str
) -> None:
    line = f"rows: {option}: expected a value such as {expected}; found {found!r}"
    with pytest.raises(OperatorFault, match=f"^{re.escape(line)}$"):
        task(file, **{option: found})


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 400, 1023])
def test_an_epoch_contains_each_row_once(count: int) -> None:
    for epoch in range(3):
        order = [permuted(place, count, rng_seed=7, epoch=epoch) for place in range(count)]
        assert sorted(order) == list(range(count))


def test_orders_differ_between_epochs_and_seeds_and_repeat_exactly() -> None:
    def order(rng_seed: int, epoch: int) -> list[int]:
        return [permuted(place, 1000, rng_seed=rng_seed, epoch=epoch) for place in range(1000)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    # Neighbours are scattered: a sorted data set does not come sorted.
    steps = [b - a for a, b in zip(order(1, 0), order(1, 0)[1:], strict=False)]
    assert len(set(steps)) > 700


def test_finding_a_row_costs_the_same_in_a_data_set_of_any_size() -> None:
    assert 0 <= permuted(10**15, 10**15 + 1, rng_seed=0, epoch=0) <= 10**15
