"""Write the sums below 20 as rows: 320 to train on, and every fifth of the 400 held out.

reasoning-gym draws the sums; they come in the order in which it drew each pair first.
"""

import json
from pathlib import Path

import reasoning_gym

BELOW = 20
HELD_OUT_EVERY = 5
DRAWS_MAX = 10_000_000


def sums() -> list[dict[str, str]]:
    """Each pair of numbers below 20 once, with its sum."""
    drawn = reasoning_gym.create_dataset(
        "basic_arithmetic",
        seed=0,
        size=DRAWS_MAX,
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=2,
        operators=["+"],
        allow_parentheses=False,
        allow_negation=False,
        whitespace="single",
    )
    found: dict[str, dict[str, str]] = {}
    for each in drawn:
        sum_of = each["metadata"]["expression"]
        if all(int(term) < BELOW for term in sum_of.split(" + ")):
            answer = each["answer"]
            found.setdefault(
                sum_of,
                {
                    "question": f"What is {sum_of}?",
                    "answer": answer,
                    "worked": f"{sum_of} = {answer}",
                },
            )
        if len(found) == BELOW**2:
            break
    return list(found.values())


def write_sums(directory: Path) -> tuple[Path, Path]:
    """Write train.jsonl and heldout.jsonl, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = sums()
    sides = {
        "heldout": rows[::HELD_OUT_EVERY],
        "train": [row for place, row in enumerate(rows) if place % HELD_OUT_EVERY],
    }
    for name, side in sides.items():
        text = "".join(json.dumps(row) + "\n" for row in side)
        (directory / f"{name}.jsonl").write_text(text)
    return directory / "train.jsonl", directory / "heldout.jsonl"
