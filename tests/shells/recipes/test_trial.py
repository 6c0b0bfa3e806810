"""`echo2d try`: it shows what a run would read, and the mistakes over which it would fail, before a box costs money."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from echo2d.cli import main
from echo2d.runtime.coordinator import data_plane
from tests.support.paths import REPO
from tests.support.texts import EMPTY_WEIGHTS, write_text_model

SCORERS = """
from echo2d.tasks.base import Reward

def right(answer, expected):
    return Reward(float(answer.text == expected.text), {"length": len(answer.text)})

def broken(answer, expected):
    raise ValueError("my judge is broken")

def needs_a_number(answer, expected):
    return float(int(answer.text) == int(expected.text))

def tags_only(answer, expected):
    return float("<answer>" in answer.text)

def nothing(answer, expected):
    return None

def text(answer, expected):
    return "0.5"

def pair(answer, expected):
    return 1.0, {"right": 1}

def of_level(answer, expected):
    return float(expected.row["level"])

def writes(answer, expected):
    with open("/usr/log.txt", "a") as file:
        file.write(answer.text)

def reads(answer, expected):
    open("words.txt").read()

def of_variable(answer, expected):
    import os
    return os.environ["JUDGE_KEY"]

def talks(answer, expected):
    print("judged", answer.text, "against", expected.text)
    return 1.0

async def elsewhere(answer, expected):
    raise ConnectionError("All connection attempts failed")

def of_letters(answer, expected):
    return float(expected.text.isdigit())
"""
ROWS = [{"question": f"{n} birds and {n} more?", "answer": str(2 * n)} for n in range(100, 140)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = write_text_model(tmp_path / "base")
    (model / "config.json").write_text('{"vocab_size": 512, "max_position_embeddings": 400}')
    (tmp_path / "judge.py").write_text(SCORERS)
    (tmp_path / "relative.py").write_text("from .helper import score")
    (tmp_path / "variable.py").write_text("import os\nKEY = os.environ['JUDGE_KEY']")
    (tmp_path / "absent.py").write_text("from nltk_not_there import score")
    (tmp_path / "bare.csv").write_text("1 + 1,2\n2 + 2,4\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def write_run(scorer: str, more: str = "", **options: Any) -> Path:
    table = {"files": "rows.jsonl", "prompt": "question", "scorer": scorer, **options}
    lines = [f"{name} = {json.dumps(value)}" for name, value in table.items()]
    path = Path("run.toml")
    path.write_text(
        "\n".join(
            [
                *('[run]\nbase_model = "base"', "[sampling]\nmax_new_tokens = 20"),
                *('[task]\nkind = "rows"', "[task.options]", *lines, more),
            ]
        )
    )
    return path


def tried(options: str, code: int = 0) -> dict[str, Any]:
    command = ["try", "--config", "run.toml", "--json", *shlex.split(options)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_given_answers_are_scored_as_in_the_run() -> None:
    write_run("judge:right")
    trial = tried("--answer 200 --answer nonsense --prompts 3")
    (task,) = trial["tasks"]
    assert (task["judged"], task["worthless"], task["questions"]) == (40, 0, 40)
    assert len(task["prompts"]) == 3
    for prompt in task["prompts"]:
        assert prompt["text"].startswith("<user>1")
        assert prompt["where"].startswith("row ")
        rewards = [each["reward"] for each in prompt["answers"]]
        assert rewards == [float(prompt["expected"] == "200"), 0.0]
        assert [each["parts"] for each in prompt["answers"]] == [{"length": 3.0}, {"length": 8.0}]
    assert trial["problems"] == []
    assert task["groups"] == 3


@pytest.mark.parametrize(
    ("scorer", "said", "at"),
    [
        ("judge:broken", r"ValueError: my judge is broken (", "judge.py:8 in broken)"),
        ("judge:nothing", "TypeError: expected a number or Reward; found NoneType None (", "in nothing)"),
        ("judge:text", "TypeError: expected a number or Reward; found str '0.5' (", "in text)"),
        ("judge:pair", "TypeError: expected a number or Reward; found tuple (1.0, {'right': 1}) (", "in pair)"),
        ("judge:of_level", "has no 'level'; its columns are question, answer", "in of_level)"),
        ("judge:reads", "'words.txt' (", "task.read_paths: a task runs in the folder /"),
        ("judge:writes", "'/usr/log.txt' (", "may write only in its own temporary folder"),
        ("judge:of_variable", "KeyError: 'JUDGE_KEY' (", "only the variables of this host that task.environment names"),
        ("judge:elsewhere", "All connection attempts failed", "unless task.network = true"),
    ],
)  # fmt: skip
def test_a_scorer_that_fails_at_the_expected_answer_is_a_problem(
    scorer: str, said: str, at: str
) -> None:
    write_run(scorer)
    (problem,) = tried("--answer 1", 1)["problems"]
    assert problem.startswith("task rows: the reward of the expected answer '")
    assert ": row " in problem
    assert " of rows.jsonl: " in problem
    assert said in problem
    assert at in problem


def test_the_first_lines_that_a_reward_prints_are_shown() -> None:
    write_run("judge:talks")
    (task,) = tried("--answer nonsense --prompts 1")["tasks"]
    first, *_, last = task["printed"].splitlines()
    assert first.startswith("judged 2")
    assert last.startswith("judged nonsense against 2")
    result = CliRunner().invoke(main, ["try", "--config=run.toml", "--answer=nonsense"])
    assert f"The first lines that the task's code printed:\n\n  {first}\n" in result.output
    write_run("judge:right")
    assert tried("--no-answers")["tasks"][0]["printed"] == ""


def test_a_scorer_that_fails_at_an_answer_is_reported_once_with_its_place() -> None:
    write_run("judge:needs_a_number")
    trial = tried("--answer nonsense --answer 7", 1)
    (problem,) = trial["problems"]
    assert "invalid literal for int()" in problem
    assert "judge.py:11 in needs_a_number)" in problem
    (task,) = trial["tasks"]
    failed, scored = task["prompts"][0]["answers"]
    assert failed["reward"] is None
    assert "return float(int(answer.text) == int(expected.text))" in failed["trace"]
    assert scored["reward"] == 0.0


def test_a_users_scorer_that_rewards_no_expected_answer_gives_a_caution() -> None:
    write_run("judge:tags_only")
    trial = tried("--answer '<answer>'")
    assert trial["problems"] == []
    (said,) = trial["cautions"][:1]
    assert "40 of 40 expected answers get a reward of 0 from the scorer, e.g. row " in said


def test_expected_answers_that_the_scorer_cannot_read_are_counted() -> None:
    odd = [{**row, "answer": "C"} if at % 4 == 0 else row for at, row in enumerate(ROWS)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    write_run("judge:of_letters")
    cautions = tried("--no-answers")["cautions"]
    (said,) = [each for each in cautions if "0 from the scorer" in each]
    assert said.startswith("task rows: 10 of 40 expected answers get a reward of 0 from the ")
    assert said.endswith(" of rows.jsonl 'C'")


def test_questions_with_two_answers_are_counted_over_all_rows() -> None:
    more = [{"question": f"{n}?", "answer": "1"} for n in range(300)]
    rows = [*ROWS, *more, {**ROWS[3], "answer": "7"}, {**more[0], "answer": "2"}, more[1]]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_run("exact")
    cautions = tried("--no-answers")["cautions"]
    (said,) = [each for each in cautions if "ask the question" in each]
    assert said == (
        "task rows: 2 of 343 rows ask the question of another row, and expect another answer, e.g. "
        "row 3 of rows.jsonl '206' and row 340 of rows.jsonl '7'"
    )


def test_a_prompt_that_is_too_long_names_its_row() -> None:
    rows = [*ROWS, {"question": "why? " * 76, "answer": "7"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_run("exact")
    (problem,) = tried("--no-answers", 1)["problems"]
    assert problem.startswith("task rows: row 40 of rows.jsonl: a prompt of ")
    assert problem.endswith(" tokens fills the model's context of 392: leave it out, or shorten it")


def test_prompts_that_hold_their_answers_are_counted() -> None:
    write_run("exact", prompt="{question} It is about {half}.")
    rows = [{**row, "half": row["answer"] if at < 7 else "1"} for at, row in enumerate(ROWS)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cautions = tried("--no-answers")["cautions"]
    assert any("7 of 40 prompts hold the text of their expected answer, e.g." in each for each in cautions)  # fmt: skip


def test_mistakes_of_a_run_are_reported_without_given_answers() -> None:
    write_run("exact", "[[eval]]\noptions = {}\nrows = 9", held_out=0.2)
    cautions = tried("--no-answers --set sampling.max_new_tokens=500")["cautions"]
    said = "sampling.max_new_tokens: an answer may have 500 tokens, but the model reads 400 tokens"
    assert any(each.startswith(said) for each in cautions)
    assert any(each.startswith("eval rows/heldout: with ") for each in cautions)


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ("[learner]\nsteps = 1\n[policy]\ngroup_size = 1", {}, "policy.group_size: grpo compares the answers"),
        ("[learner]\nsteps = 'many'", {}, "learner.steps: expected an integer, at least 1; found 'many'"),
        ("[learner]\nsteps = 1\nloss = 'judge:absent'", {}, "learner.loss: module 'judge', "),
        ("[learner]\nsteps = 1\nloss = 'judge:right'", {},
         "learner.loss: judge:right takes (answer, expected); expected one argument"),
        ("[learner]\nsteps = 1\nloss = 'ppo2'", {}, "found 'ppo2'; learner.objective is one of grpo, "),
        ("", {"prompt": "{question} {answer}"}, "it shows the column 'answer', which holds the expected answer"),
        ("", {"scorer": "judge:nowhere"}, "judge.py, has no 'nowhere'"),
        ("", {"scorer": "random:score"}, "random.py, has no 'score'; your module has the name of a module of Python"),
        ("", {"scorer": "relative:score"}, "relative import with no known parent package (/"),
        ("", {"scorer": "absent:score"}, "absent.py:1 in <module>); put the module beside run.toml"),
        ("", {"scorer": "variable:KEY"}, "variable.py:2 in <module>); a task has only the variables of this host"),
        ("", {"scorer": "jugde:right"}, "there is no module 'jugde'; put it beside run.toml"),
        ("", {"files": "row.jsonl"}, "there is no "),
        ("", {"files": "bare.csv"}, "its columns are 1 + 1, 2; the first row of CSV names the columns"),
        ("", {"scorrer": "exact"}, "got an unexpected keyword argument 'scorrer'"),
        ("[polcy]\ngroup_size = 2", {}, "[polcy]: unknown table; did you mean policy?"),
        ("[policy]\ngroup_sise = 2", {}, "policy.group_sise: unknown key; did you mean group_size?"),
    ],
)  # fmt: skip
def test_an_operators_mistake_gives_one_line(more: str, options: dict[str, Any], said: str) -> None:
    write_run(options.pop("scorer", "judge:right"), more, **options)
    result = CliRunner().invoke(main, ["try", "--config", "run.toml"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
    assert said in result.output


def test_the_trial_reads_the_table_of_the_learner_too() -> None:
    write_run("exact", "[learner]\nsteps = 'many'")
    result = CliRunner().invoke(main, ["coordinate", "--config", "run.toml"])
    assert result.exit_code == 2
    assert result.output == "echo2d: learner.steps: expected an integer, at least 1; found 'many'\n"


def test_a_model_that_cannot_be_loaded_is_a_problem(folder: Path) -> None:
    write_run("exact")
    (note,) = tried("")["notes"]
    assert note.endswith(
        "base has no *.safetensors here, so no answers were made; --answer TEXT gives some"
    )
    (folder / "base" / "model.safetensors").write_bytes(EMPTY_WEIGHTS)
    (problem,) = tried("", 1)["problems"]
    assert problem.startswith("run.base_model: ")


def test_the_folder_of_a_run_may_move_and_be_used_from_anywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run("judge:right")
    moved = folder / "elsewhere"
    moved.mkdir()
    for name in ("run.toml", "judge.py", "rows.jsonl", "base"):
        (folder / name).rename(moved / name)
    monkeypatch.chdir("/")
    result = CliRunner().invoke(main, ["try", "--config", f"{moved}/run.toml", "--answer=1"])
    assert result.exit_code == 0, result.output
    assert "The scorer gives 40 of the first 40 expected answers a reward" in result.output
    assert "reward 0 (length 1), scored in 0.0" in result.output


def test_a_task_without_rows_can_be_tried_too() -> None:
    Path("own.py").write_text("""
from echo2d.tasks.base import TextPrompt, TextTask

class Own(TextTask):
    name = "own"
    def prompt(self, index):
        return TextPrompt([{"role": "user", "content": f"{index}?"}])
    def reward(self, prompt, answer):
        return len(answer.text)
""")
    Path("run.toml").write_text('[run]\nbase_model = "base"\n[task]\nkind = "own:Own"')
    trial = tried("--answer abc")
    (task,) = trial["tasks"]
    assert (task["name"], task["questions"], task["judged"]) == ("own", None, 0)
    assert [each["reward"] for each in task["prompts"][0]["answers"]] == [3.0]


def test_a_start_that_takes_long_says_what_is_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_plane, "SLOW_START_S", 0.1)
    Path("slow.py").write_text("import time\ntime.sleep(1)\ndef score(*_): return 1.0")
    write_run("slow:score")
    tried("--no-answers")
    assert caplog.messages == ["task=rows still starts after 0.1 s: it imports slow:score"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("'What is 1 + 1?'", "own.py:5 in prompt)"),
        ("TextPrompt([{'role': 'user', 'content': str(random.random())}])", "another prompt at each call"),
    ],
)  # fmt: skip
def test_a_task_that_gives_no_prompt_is_reported(made: str, said: str) -> None:
    Path("own.py").write_text(f"""import random
from echo2d.tasks.base import TextPrompt, TextTask
class Own(TextTask):
    name = "own"
    def prompt(self, index):
        return {made}
    def reward(self, prompt, answer):
        return 1.0
""")
    Path("run.toml").write_text('[run]\nbase_model = "base"\n[task]\nkind = "own:Own"')
    result = CliRunner().invoke(main, ["try", "--config", "run.toml", "--no-answers"])
    assert result.exit_code in (1, 2)
    assert said in result.output
    if "prompt)" in said:
        assert "TypeError: expected a TextPrompt; found str 'What is 1 + 1?' (" in result.output


def test_the_base_model_answers_and_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiny model: digits to sort, and episodes of two turns."""
    for task in (
        "",
        "--task environment --kind echo2d.demo.two_turns:TwoTurnDigits --base-model tiny ",
    ):
        out = tmp_path / f"run{len(task)}"
        command = ["init", "--yes", "--host=127.0.0.1", *shlex.split(task), f"--out={out}"]
        assert CliRunner().invoke(main, command).exit_code == 0
        result = CliRunner().invoke(main, ["try", f"--config={out}/run.toml", "--json"])
        assert result.exit_code == 0, result.output
        (tried_task,) = json.loads(result.output)["tasks"]
        assert tried_task["groups"] == 2
        for prompt in tried_task["prompts"]:
            assert len(prompt["answers"]) == 8
            rewards = [each["reward"] for each in prompt["answers"]]
            assert all(0 <= each <= 1 for each in rewards)
            assert {each["turns"] for each in prompt["answers"]} == ({2} if task else {1})


def test_a_base_model_with_a_weight_that_is_no_number_is_a_problem(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["init", "--yes", "--host=127.0.0.1", f"--out={run}"]
    assert CliRunner().invoke(main, command).exit_code == 0
    weights = run / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    result = CliRunner().invoke(main, ["try", f"--config={run}/run.toml", "--json"])
    assert result.exit_code == 1, result.output
    (problem,) = json.loads(result.output)["problems"]
    said = f"run.base_model: model.norm.weight in {weights} holds NaN or infinity: download it"
    assert problem.startswith(said)


def test_the_reward_in_the_readme_works() -> None:
    text = (REPO / "README.md").read_text()
    code = "#" + text.partition("```python\n# judge.py")[2].partition("```")[0]
    assert len(code.strip().splitlines()) <= 10
    Path("judge.py").write_text(code)
    write_run("judge:score")
    (task,) = tried("--answer 'It is 200'")["tasks"]
    assert task["worthless"] == 0
    for prompt in task["prompts"]:
        (answer,) = prompt["answers"]
        right = float(prompt["expected"] == "200")
        assert answer["parts"] == {"right": right, "short": 1.0}
        assert answer["reward"] == right + 0.1
