"""A run whose task is a file of questions: messages, a chat template and a scorer, without code."""

import json

import pytest

from tests.support.polling import START_S, poll
from tests.support.programs import Site, run
from tests.support.rows_site import ask_rows

pytestmark = [pytest.mark.timeout(900)]

STEPS = 3
SAMPLING = 'sampling = { temperature = 0.8, stop = ["5"] }'
EVAL = """
[[eval]]
every = 2
samples = 2
rows = 15
sampling = { temperature = 0.7 }
"""


def test_rows_are_asked_scored_and_trained_on(site: Site) -> None:
    ask_rows(site, EVAL)
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
    told = run("status", f"--run-dir={site.run_dir}", "--scores", "--json").splitlines()
    assert [json.loads(line) for line in told] == scored
    assert "pass@2" in run("status", f"--run-dir={site.run_dir}", "--scores")
    assert "step 2" in run("samples", f"--run-dir={site.run_dir}", "--step=2", "--worst")


def test_two_tasks_share_every_step_and_one_ends_its_answers_at_a_text(site: Site) -> None:
    ask_rows(site, "")
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
