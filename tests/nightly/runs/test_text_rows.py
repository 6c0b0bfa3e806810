"""A run whose task is a file of questions: messages, a chat template and a scorer, and no code."""

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.support.polling import START_S, poll
from tests.support.programs import Site, run

pytestmark = [pytest.mark.timeout(900)]

STEPS = 3
ROWS = 200
# The tiny model sorts what stands before ">".
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}>"
SAMPLING = 'sampling = { temperature = 0.8, stop = ["5"] }'
EVAL = """
[[eval]]
every = 2
samples = 2
rows = 15
sampling = { temperature = 0.7 }
"""


def write_rows(path: Path) -> None:
    rng = random.Random(0)
    questions = ["".join(rng.choices("0123456789", k=8)) for _ in range(ROWS)]
    rows = [{"digits": each, "sorted": "".join(sorted(each))} for each in questions]
    path.write_text("\n".join(map(json.dumps, rows)))


def configure(site: Site, more: str) -> None:
    """Ask the rows of a file by the tiny model. more: further tables."""
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


def test_rows_are_asked_scored_and_trained_on(site: Site) -> None:
    configure(site, EVAL)
    site.coordinate()
    site.join("box", "--threads=1")
    learner = site.learn(STEPS)
    assert learner.wait(3 * START_S) == 0, learner.tail()
    poll(lambda: site.serving() == STEPS)
    metrics = (site.directory / "learner" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in metrics]
    rewards = [row["reward_mean"] for row in rows if "eval" not in row]
    assert len(rewards) == STEPS
    # The tiny model is right about every third time.
    assert all(0.05 < reward < 0.95 for reward in rewards)
    shown = run("samples", f"--run-dir={site.run_dir}", "--step=2", "--json", "--count=9")
    lines = [json.loads(line) for line in shown.splitlines()]
    assert len(lines) == 4
    for line in lines:
        digits = line["prompt"].removesuffix(">")
        right = {each["answer"] for each in line["samples"] if each["reward"]}
        assert right <= {"".join(sorted(digits)) + "<eos>"}
        assert {each["reward"] for each in line["samples"]} == {0.0, 1.0}
    # The first version, one every two, and the last.
    scored = [row["eval"]["digits/heldout"] for row in rows if "eval" in row]
    assert [each["version"] for each in scored] == [0, 2, 3]
    assert {(each["rows"], each["of"], each["samples"]) for each in scored} == {(15, 15, 2)}
    assert all(0 < each["mean"] < 1 and each["se"] > 0 for each in scored)
    told = run("eval", f"--run-dir={site.run_dir}", "--json").splitlines()
    assert [json.loads(line) for line in told] == scored
    assert "pass@2" in run("eval", f"--run-dir={site.run_dir}", "--version=2")
    assert "step 2" in run("samples", f"--run-dir={site.run_dir}", "--step=2", "--worst")


def test_two_tasks_share_every_step_and_one_ends_its_answers_at_a_text(site: Site) -> None:
    configure(site, "")
    text = site.config.read_text()
    start, end = text.index("[task]"), text.index("[", text.index("[task]") + 1)
    task = text[start:end].replace("[task]", "[[task]]")
    second = task.replace('name = "digits"', 'name = "first"\nweight = 0.25\n' + SAMPLING)
    first = task.replace('name = "digits"', 'name = "digits"\nweight = 0.75')
    site.config.write_text(text[:start] + first + second + text[end:])
    site.coordinate()
    site.join("box", "--threads=1")
    learner = site.learn(STEPS)
    assert learner.wait(3 * START_S) == 0, learner.tail()
    metrics = (site.directory / "learner" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in metrics]
    found = [{name: each["groups"] for name, each in row["tasks"].items()} for row in rows]
    assert found == [{"digits": 3, "first": 1}] * STEPS
    shown = run("samples", f"--run-dir={site.run_dir}", "--json", "--count=40").splitlines()
    lines = [json.loads(line) for line in shown]
    stopped = [
        each["answer"]
        for line in lines
        if line["task"] == "first"
        for each in line["samples"]
        if each["finish"] == "stop_string"
    ]
    assert stopped
    assert all(answer.endswith("5") and answer.count("5") == 1 for answer in stopped)
    assert all(
        each["finish"] != "stop_string"
        for line in lines
        if line["task"] == "digits"
        for each in line["samples"]
    )
