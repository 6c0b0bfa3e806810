"""The samples of a run on page and boards: few groups of few steps, shortened."""

from typing import Any

from echo2d.runtime.coordinator.shown_samples import (
    CHARS_MAX,
    ENDS_SHOWN,
    SHOWN_TOKENS_MAX,
    STEPS_KEPT,
    ShownSamples,
)


def line(group: int, step: int | None, *rewards: float, answer: Any = "a") -> dict[str, Any]:
    samples = [
        {"sample": number, "reward": reward, "answer": answer}
        for number, reward in enumerate(rewards)
    ]
    return {"group": group, "step": step, "prompt": "p" * (CHARS_MAX + 1), "samples": samples}


def test_the_worst_and_the_best_groups_of_a_step_are_shown() -> None:
    shown = ShownSamples()
    for group in (*range(0, 20, 2), *range(1, 20, 2)):
        shown.add([line(group, 3, group / 20)])
    shown.add([line(99, None, 0.0)])
    found = shown.of(3)
    ends = [*range(ENDS_SHOWN), *range(20 - ENDS_SHOWN, 20)]
    assert [each["group"] for each in found["groups"]] == ends
    assert found["groups"][0]["prompt"] == "p" * CHARS_MAX + "..."


def test_the_worst_and_best_samples_of_a_group_are_shown_with_its_mean() -> None:
    shown = ShownSamples()
    shown.add([line(1, 1, *range(100), answer="x" * 9999)])
    (group,) = shown.of(1)["groups"]
    assert [each["reward"] for each in group["samples"]] == [0, 1, 2, 3, 96, 97, 98, 99]
    assert group["mean"] == 49.5
    assert len(group["samples"][0]["answer"]) == CHARS_MAX + 3


def test_token_ids_are_shortened_as_well() -> None:
    shown = ShownSamples()
    shown.add([line(1, 1, 0.0, answer=list(range(9999)))])
    (group,) = shown.of(1)["groups"]
    assert group["samples"][0]["answer"] == list(range(SHOWN_TOKENS_MAX))


def test_the_newest_step_is_shown_and_old_steps_are_forgotten() -> None:
    shown = ShownSamples()
    assert shown.of(None) == {"step": None, "groups": []}
    for step in range(1, STEPS_KEPT + 2):
        shown.add([line(step, step, 0.0)])
    assert shown.of(None)["step"] == STEPS_KEPT + 1
    assert shown.of(1) == {"step": 1, "groups": []}
    assert [each["group"] for each in shown.of(2)["groups"]] == [2]
