"""`echo2d init` for each kind of task: the config that it writes runs unchanged; a mistake is one line."""

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.cli.recipes import TASK_CHOICES
from echo2d.cli.recipes import init as init_command
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.net.security.auth import read_token_file
from echo2d.runtime.run_dir.tokens import list_tokens
from learner.config import LearnerConfig
from tests.support.texts import EMPTY_WEIGHTS, write_text_model

ROWS = [{"question": f"{n} birds and {n} more?", "answer": str(2 * n)} for n in range(1, 41)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def text_model(folder: Path) -> Path:
    model = write_text_model(folder / "base")
    (model / "config.json").write_text('{"vocab_size": 512}')
    (model / "model.safetensors").write_bytes(EMPTY_WEIGHTS)
    return model


def init(options: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["init", *shlex.split(options)])
    assert result.exit_code == code, result.output
    if code:
        assert result.output.count("\n") == 1, result.output
        assert not Path("run").exists()
    return result.output


def test_init_writes_a_whole_run_from_an_address_alone(folder: Path) -> None:
    said = init("--yes --host 10.0.0.1")
    config, learner = (
        CoordinatorConfig.load(Path("run/run.toml")),
        LearnerConfig.load(Path("run/run.toml")),
    )
    assert (config.link.host, config.link.port) == ("10.0.0.1", 7701)
    assert config.run.run_dir == folder / "run" / "coordinator"
    assert learner.model == config.run.base_model == folder / "run" / "model"
    assert (learner.model / "model.safetensors").is_file()
    assert learner.snapshot_root == config.run.snapshot_root
    assert config.run.snapshot_root.is_dir()
    box = read_token_file(Path("run/box-1.token"))
    assert (box.role, box.url) == ("worker", "https://10.0.0.1:7700")
    assert read_token_file(learner.token_file).role == "learner"
    assert read_token_file(learner.token_file).url == box.url
    for line in (
        "  echo2d try --config run/run.toml",
        "  echo2d run --config run/run.toml --workers 0",
        "  echo2d status --run-dir run/coordinator --watch",
        "  echo2d join --token-file box-1.token --state-dir state",
    ):
        assert f"{line}\n" in said


@pytest.mark.parametrize(
    ("options", "names", "machines"),
    [
        ("--boxes 3", ["box-1", "box-2", "box-3"], [1, 1, 1]),
        ("--boxes 50 --one-token", ["boxes"], [50]),
    ],
)
def test_each_box_gets_its_own_token_file_or_all_share_one(
    options: str, names: list[str], machines: list[int]
) -> None:
    facts = json.loads(init(f"--json --host 127.0.0.1 {options}"))
    assert facts["tokens"] == {"boxes": [f"run/{name}.token" for name in names], "agents": None}
    assert facts["there"] == [f"echo2d join --token-file {names[0]}.token --state-dir state"]
    rows = [row for row in list_tokens(Path("run/coordinator")) if row["role"] == "worker"]
    assert [(row["name"], row["max_workers"]) for row in rows] == list(
        zip(names, machines, strict=True)
    )


def test_the_named_scorer_judges_the_answers(text_model: Path) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    init(f"--yes --task questions --rows rows.jsonl --base-model {text_model} --scorer exact")
    (task,) = CoordinatorConfig.load(Path("run/run.toml")).tasks
    assert (task.kind, task.options["scorer"]) == ("rows", "exact")
    assert Path("run/box-1.token").is_file()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ("--task class --kind tests.support.even_tokens_task:EvenTokens", "even_tokens"),
        ("--task environment --kind echo2d.demo.two_turns:TwoTurnDigits", "two_turn_digits"),
    ],
)
def test_a_class_is_started_before_anything_is_written(options: str, kind: str) -> None:
    assert json.loads(init(f"--json --base-model tiny {options}"))["task"] == kind
    (task,) = CoordinatorConfig.load(Path("run/run.toml")).tasks
    assert task.kind == options.rpartition(" ")[2]


def test_agents_outside_get_the_gateway_and_a_token(text_model: Path) -> None:
    for out, model in (("tiny", "tiny"), ("text", str(text_model))):
        facts = json.loads(init(f"--json --task agents --base-model {model} --out {out}"))
        assert CoordinatorConfig.load(Path(out) / "run.toml").gateway.enabled
        assert read_token_file(Path(facts["tokens"]["agents"])).role == "agent"


def test_keys_given_to_init_are_set_and_checked() -> None:
    init("--yes --set learner.steps=3 --set coordinator.port=9000 --host 127.0.0.1")
    document = tomllib.loads(Path("run/run.toml").read_text())
    assert document["learner"]["steps"] == 3
    assert read_token_file(Path("run/box-1.token")).url == "http://127.0.0.1:9000"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--task class --base-model tiny", "--kind: expected an answer to: Which one: package.module"),
        ("--task class --kind parity --base-model tiny", "task parity: expected a task of echo2d (rows, "),
        ("--task class --kind nowhere:X --base-model tiny", "task nowhere:X: there is no module 'nowhere'"),
        ("--task environment --kind examples.environments.calculator:Calculator --base-model tiny",
         "task calculator: prompt 0: "),
        ("--task class --kind sort_digits --base-model nix", "--base-model: there is no directory nix; expected"),
        ("--task class --kind sort_digits", "--base-model: expected an answer to: Model to train"),
        ("--task questions --base-model tiny", "--base-model: the tiny model reads no text"),
        ("--set policy.group_size=7", "policy.group_size: expected a divisor"),
        ("--set learner.stepz=7", "learner.stepz: unknown key"),
        ("--boxes 0", "--boxes: expected 1 to 1000; found 0"),
        ("--host ''", "--host: expected an address or a name; found ''"),
        ("--host 'a b'", "--host: expected an address or a name; found 'a b'"),
        ("--out /proc/nix", "--out: cannot write /proc/nix/run.toml"),
    ],
)  # fmt: skip
def test_wrong_input_gives_one_line_and_writes_nothing(options: str, complaint: str) -> None:
    assert init(f"--yes {options}", code=2).startswith(f"echo2d: {complaint}")


def test_an_existing_run_is_kept(folder: Path) -> None:
    init("--yes --host 127.0.0.1")
    before = Path("run/box-1.token").read_text()
    result = CliRunner().invoke(main, ["init", "--yes"])
    assert result.exit_code == 2
    assert result.output == "echo2d: run/run.toml exists already; choose another --out\n"
    assert Path("run/box-1.token").read_text() == before


@pytest.mark.parametrize(("task", "count"), [("tiny", 4), ("environment", 6), ("questions", 6)])
def test_init_asks_few_questions(
    task: str, count: int, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    answers = {
        "What": task,
        "Which": "echo2d.demo.two_turns:TwoTurnDigits",
        "Model": "tiny",
        "At": "127.0.0.1",
    }

    def answer(question: str, default: Any, **_: Any) -> Any:
        asked.append(question)
        return default if task == "questions" else answers.get(question.split()[0], default)

    monkeypatch.setattr("echo2d.cli.recipes.sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "prompt", answer)
    given = {option.name: option.default for option in init_command.params}
    given |= {name: None for name in given if given[name] is None or "UNSET" in str(given[name])}
    given |= {"settings": (), "one_token": False, "yes": False, "as_json": False}
    given["list_tasks"] = False
    if task == "questions":
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        given |= {"rows": "rows.jsonl", "base_model": text_model}
    with click.Context(init_command):
        init_command.callback(**given)  # type: ignore[misc]
    assert len(asked) == count
    assert Path("run/run.toml").is_file()
    assert len(TASK_CHOICES) == 5
