"""A site whose task is a file of questions, asked by the tiny model: to sort digits."""

import csv
import json
import random
import shutil
from pathlib import Path

from tests.support.programs import Site

ROWS = 200
ROWS_OF_TABLE = 300
# The tiny model sorts what stands before ">".
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}>"

JUDGE = """
from helper import right

def score(answer, expected):
    return right(answer.text, expected.row["sorted"])
"""


def write_own_questions(folder: Path, model: Path) -> None:
    """Write the files of an operator: a model with a chat template, a table of rows, and a scorer in two files."""
    base = Path(shutil.copytree(model, folder / "base"))
    (base / "chat_template.jinja").write_text(TEMPLATE)
    rng = random.Random(0)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["digits", "sorted"])
        for _ in range(ROWS_OF_TABLE):
            digits = "".join(rng.choices("0123456789", k=8))
            writer.writerow([digits, "".join(sorted(digits))])
    (folder / "judge.py").write_text(JUDGE)
    (folder / "helper.py").write_text("def right(a, b):\n    return float(a == b)\n")


def write_rows(path: Path) -> None:
    rng = random.Random(0)
    questions = ["".join(rng.choices("0123456789", k=8)) for _ in range(ROWS)]
    rows = [{"digits": each, "sorted": "".join(sorted(each))} for each in questions]
    path.write_text("\n".join(map(json.dumps, rows)))


def ask_rows(site: Site, more: str) -> None:
    """Change the run's config so that its task is a file of rows, and its model the tiny one. more: further tables."""
    model = site.directory / "model"
    shutil.copytree(str(site.facts["model"]), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    write_rows(site.directory / "rows.jsonl")
    options = {"prompt": "digits", "answer": "sorted", "held_out": 0.2}
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    text = site.config.read_text()
    for old, new in (
        ('kind = "sort_digits"', 'kind = "rows"\nname = "digits"'),
        (
            "options = { rng_seed = 0 }",
            f'options = {{ files = "{site.directory}/*.jsonl", {table} }}',
        ),
        (str(site.facts["model"]), str(model)),
    ):
        assert old in text
        text = text.replace(old, new)
    site.config.write_text(text + more)
    site.facts["model"] = model
