"""`echo2d init` for questions: both programs read the config that it writes; a mistake is one line."""

import builtins
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.errors import OperatorFault, StoreFault
from echo2d.extras import install_command
from echo2d.learner.config import LearnerConfig
from echo2d.net.security.auth import read_token_file
from echo2d.recipes import run_folder
from echo2d.tasks.scorers.base import load_scorer
from tests.support.texts import EMPTY_WEIGHTS, write_text_model

GSM8K = [
    {"question": f"{n} birds and {n} more?", "answer": f"They are {n} + {n}.\n#### {2 * n}"}
    for n in range(40)
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = write_text_model(tmp_path / "model")
    (directory / "config.json").write_text('{"vocab_size": 512}')
    (directory / "model.safetensors").write_bytes(EMPTY_WEIGHTS)
    return directory


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    return path


def init(base: Path, rows: Path, *more: str) -> tuple[int, str]:
    out = base.parent / "out"
    command = (
        "init",
        "--host=127.0.0.1",
        f"--base-model={base}",
        f"--rows={rows}",
        f"--out={out}",
        *more,
    )
    result = CliRunner().invoke(main, command)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if result.exit_code:
        assert not out.exists()
    return result.exit_code, result.output


def written(base: Path) -> Mapping[str, Any]:
    return tomllib.loads((base.parent / "out" / "run.toml").read_text())


def test_coordinator_and_learner_can_read_the_config(base: Path, rows: Path) -> None:
    code, output = init(base, rows, "--host=10.0.0.1")
    assert code == 0, output
    assert "birds and" in output
    assert "that of https://10.0.0.1:7700 and the next one" in output
    path = base.parent / "out" / "run.toml"
    config, learner = CoordinatorConfig.load(path), LearnerConfig.load(path)
    (task,) = config.tasks
    assert task.options["answer_after"] == "####"
    assert task.options["prompt"] == "question"
    assert [each.name for each in config.evals] == ["sampled", "greedy"]
    assert config.link.port == 7701
    assert read_token_file(learner.token_file).url == "https://10.0.0.1:7700"
    assert learner.token_file == config.run.run_dir / "tokens" / "learner.token"
    assert learner.snapshot_root == config.run.snapshot_root
    assert learner.snapshot_root.is_dir()


def test_the_json_output_describes_what_the_run_will_see(base: Path, rows: Path) -> None:
    code, output = init(base, rows, "--json")
    assert code == 0
    trial = json.loads(output)["trial"]
    (task,) = trial["tasks"]
    assert {task["questions"] + each for each in trial["held_out"].values()} == {len(GSM8K)}
    (prompt,) = task["prompts"]
    assert prompt["expected"] in {str(2 * n) for n in range(40)}
    assert prompt["where"].endswith(" of gsm8k.jsonl")
    assert prompt["text"].startswith("<user>")
    assert task["longest"] == len("<user>39 birds and 39 more?<answer>")


def test_settings_replace_keys_and_add_others(base: Path, rows: Path) -> None:
    settings = ("policy.group_size=4", "learner.lr=3e-5", "eval.rows=7", "learner.device=cpu")
    code, output = init(base, rows, *(f"--set={each}" for each in settings))
    assert code == 0, output
    document = written(base)
    assert document["policy"]["group_size"] == 4
    assert document["learner"]["lr"] == 3e-5
    assert document["learner"]["device"] == "cpu"
    assert [each["rows"] for each in document["eval"]] == [7, 7]


def test_settings_may_have_any_table_and_any_text(base: Path, rows: Path) -> None:
    prompt = "{question}\u2028\x85\x7f\U0001f600 \\"
    settings = (
        "samples.viewers=true",
        "task.template.enable_thinking=false",
        "coordinator.port=9000",
    )
    code, output = init(base, rows, f"--prompt={prompt}", *(f"--set={each}" for each in settings))
    assert code == 0, output
    document = written(base)
    assert document["task"]["options"]["prompt"] == prompt
    assert document["task"]["template"] == {"enable_thinking": False}
    assert document["samples"] == {"viewers": True}
    assert document["coordinator"]["port"] == 9000
    # A worker of this host needs no token file of a box.
    assert "echo2d run --config" in output
    assert "echo2d join" not in output


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:7700"),
        ("127.0.0.2", "http://127.0.0.2:7700"),
        ("fd00::2", "https://[fd00::2]:7700"),
        ("box.example.org", "https://box.example.org:7700"),
    ],
)
def test_the_url_of_the_learner_is_that_of_the_coordinator(
    base: Path, rows: Path, host: str, url: str
) -> None:
    assert init(base, rows, f"--host={host}")[0] == 0
    assert read_token_file(base.parent / "out" / "box-1.token").url == url


def test_held_out_questions_are_not_counted_among_those_to_train_on(base: Path, rows: Path) -> None:
    others = base.parent / "test.jsonl"
    others.write_text("".join(json.dumps(row) + "\n" for row in [*GSM8K[:10], GSM8K[0]]))
    code, output = init(base, rows, f"--held-out-rows={others}", "--json")
    assert code == 0, output
    trial = json.loads(output)["trial"]
    assert trial["tasks"][0]["questions"] == 30
    assert set(trial["held_out"].values()) == {11}


def test_a_split_that_holds_out_all_questions_gives_one_line(base: Path, rows: Path) -> None:
    code, output = init(base, rows, f"--held-out-rows={rows}")
    assert (code, output.count("\n")) == (2, 1)
    assert "none is left to train on" in output


def test_a_judge_that_does_not_answer_gives_one_line(base: Path, rows: Path) -> None:
    options = "task.options.scorer_options={ url = 'http://127.0.0.1:9/', tries = 1 }"
    settings = ("task.options.scorer=remote", "task.network=true", options)
    code, output = init(base, rows, *(f"--set={each}" for each in settings))
    assert (code, output.count("\n")) == (2, 1), output
    assert "JudgeError: the judge at 127.0.0.1:9" in output


def test_other_held_out_questions_leave_all_rows_to_train_on(base: Path, rows: Path) -> None:
    others = base.parent / "test.jsonl"
    others.write_text(json.dumps({"question": "1 bird?", "answer": "#### 1"}) + "\n")
    code, output = init(base, rows, f"--held-out-rows={others}", "--json")
    assert code == 0, output
    trial = json.loads(output)["trial"]
    assert trial["tasks"][0]["questions"] == len(GSM8K)
    assert set(trial["held_out"].values()) == {1}
    assert "with 1 questions a score is hardly more than chance" in trial["cautions"][0]
    assert [each["options"]["files"] for each in written(base)["eval"]] == [[str(others)]] * 2


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--prompt=problem"], "echo2d: task rows: rows: row 0 of gsm8k.jsonl has no 'problem'; its columns are "),
        (["--answer=question"], "echo2d: task rows: rows: prompt: it shows the column 'question', which holds"),
        (["--set=policy.group_size=0"], "echo2d: policy.group_size: expected an integer, at least 1"),
        (["--set=nothing.at_all=0"], "echo2d: [nothing]: unknown table"),
        (["--set=learner.stepz=2"], "echo2d: learner.stepz: unknown key"),
        (["--set=learner.lr=fast"], "echo2d: learner.lr: expected a number"),
        (["--set=policy"], "echo2d: --set: expected TABLE.KEY=VALUE; found 'policy'"),
        (["--set=task.options.scorer=oracle"], 'echo2d: task rows: scorer: expected "math"'),
    ],
)  # fmt: skip
def test_a_wrong_option_gives_one_line(
    base: Path, rows: Path, more: list[str], complaint: str
) -> None:
    code, output = init(base, rows, *more)
    assert (code, output.count("\n")) == (2, 1), output
    assert output.startswith(complaint)


def test_answers_that_the_scorer_cannot_read_give_one_line(base: Path, rows: Path) -> None:
    capitals = {"France": "Paris", "Italy": "Rome"}
    asked = [{"question": f"The capital of {k}?", "answer": v} for k, v in capitals.items()]
    rows.write_text(json.dumps(asked[0]) + "\n")
    others = rows.with_name("others.jsonl")
    others.write_text(json.dumps(asked[1]) + "\n")
    code, output = init(base, rows, f"--held-out-rows={others}")
    assert (code, output.count("\n")) == (2, 1)
    assert (
        "1 of 1 expected answers get a reward of 0 from the scorer, e.g. row 0 of rows.jsonl"
        not in output
    )
    assert (
        "expected answers get a reward of 0 from the scorer, e.g. row 0 of gsm8k.jsonl 'Paris'"
        in output
    )
    exact = "--set=task.options.scorer=exact"
    assert init(base, rows, f"--held-out-rows={others}", exact)[0] == 0


def test_a_model_without_a_template_gives_one_line(base: Path, rows: Path) -> None:
    (base / "tokenizer_config.json").write_text("{}")
    code, output = init(base, rows)
    assert (code, output.count("\n")) == (2, 1)
    assert "has no chat template; take an -Instruct model" in output
    assert output.count("row ") == 1


def _weights(dtype: str, numbers: int = 4) -> bytes:
    tensor = {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}
    header = json.dumps({"layer.weight": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(numbers)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
INDEX = b'{"weight_map": {"layer.weight": "model-00002-of-00002.safetensors"}}'
MISTAKES = [
    ({"model.safetensors": LFS}, "model.safetensors is a pointer of git-lfs, not the file itself; type git"),
    ({"tokenizer.json": LFS}, "tokenizer.json is a pointer of git-lfs, not the file itself"),
    ({"model.safetensors": b""}, "is cut off or damaged (too short for a safetensors header); download"),
    ({"model.safetensors": _weights("F8_E4M3", 3)}, "(its header describes 4 data bytes, but the file has 3)"),
    ({"model.safetensors": _weights("I8")}, "layer.weight has the dtype I8; expected BF16, F16 or F32"),
    ({"model.safetensors": b"", "model.safetensors.index.json": INDEX}, "cut off or damaged"),
    ({"model.safetensors": None, "model-1.safetensors": EMPTY_WEIGHTS, "model.safetensors.index.json": INDEX},
     "lacks model-00002-of-00002.safetensors, which model.safetensors.index.json names; download it again"),
    ({"model.safetensors": None, "pytorch_model.bin": b"x"}, "has pytorch_model.bin, and no *.safetensors"),
    ({"config.json": b'{"vocab_size": 51'}, "config.json holds no JSON: "),
    ({"tokenizer.json": b'{"model": {'}, "tokenizer.json holds no JSON: "),
    ({"config.json": b'{"vocab_size": 200}'}, "its tokenizer has 256 tokens, its config.json says vocab_size = 200"),
    ({"config.json": b'{"quantization_config": {"quant_method": "awq"}}'}, "is quantized (awq); convert it"),
    ({"config.json": b'{"is_encoder_decoder": true, "model_type": "t5"}'}, "is an encoder-decoder (t5)"),
    ({"config.json": None, "it.gguf": b"GGUF"}, "is GGUF, which cannot be trained; use"),
    ({"config.json": None, "adapter_config.json": b'{"base_model_name_or_path": "Org/Base"}'},
     "is a LoRA adapter of Org/Base; use that model, or merge it into that model"),
    ({"config.json": None, "inner/config.json": b"{}"}, "inner?"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "said"), MISTAKES)
def test_a_model_that_cannot_be_used_gives_one_line(
    base: Path, rows: Path, files: Mapping[str, bytes | None], said: str
) -> None:
    for name, content in files.items():
        (base / name).parent.mkdir(exist_ok=True)
        if content is None:
            (base / name).unlink()
        else:
            (base / name).write_bytes(content)
    code, output = init(base, rows)
    assert (code, output.count("\n")) == (2, 1), output
    assert output.startswith("echo2d: --base-model: ")
    assert said in output


def test_added_tokens_beyond_the_vocabulary_are_accepted(base: Path, rows: Path) -> None:
    tokenizer = json.loads((base / "tokenizer.json").read_bytes())
    tokenizer["added_tokens"] = [
        {
            "id": 256, "content": "<image>", "special": True, "normalized": False,
            "single_word": False, "lstrip": False, "rstrip": False,
        }
    ]  # fmt: skip
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    (base / "config.json").write_text('{"vocab_size": 256}')
    code, output = init(base, rows)
    assert code == 0, output


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_directory_that_is_no_model_gives_one_line(base: Path, rows: Path, name: str) -> None:
    (base / name).unlink()
    code, output = init(base, rows)
    assert (code, output.count("\n")) == (2, 1)
    assert f"{base} has no" in output


def test_rows_that_cannot_be_read_give_one_line(base: Path, rows: Path) -> None:
    code, output = init(base, rows.with_name("nowhere.jsonl"))
    assert (code, output.count("\n")) == (2, 1)
    assert "nowhere.jsonl" in output
    rows.write_text("no json\n")
    code, output = init(base, rows)
    assert (code, output.count("\n")) == (2, 1)
    assert "row 0 is not JSON" in output


def test_a_missing_extra_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("math_verify"):
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(OperatorFault) as refused:
        load_scorer("math", {})
    assert str(refused.value) == f"scorer math: it needs math-verify: {install_command('math')}"


def test_init_asks_for_columns_that_it_cannot_guess(base: Path, rows: Path) -> None:
    rows.write_text(json.dumps({"frage": "1 + 1?", "antwort": "2"}) + "\n")
    code, output = init(base, rows, "--yes")
    assert (code, output.count("\n")) == (2, 1)
    assert (
        "echo2d: --prompt: expected an answer to: frage, antwort: which column is the question?"
        in output
    )


def test_the_error_about_a_csv_file_without_column_names_says_where_they_belong(
    base: Path, rows: Path
) -> None:
    path = rows.with_suffix(".csv")
    path.write_text("What is 7 + 10?,17\nWhat is 7 + 11?,18\n")
    code, output = init(base, path, "--yes")
    assert (code, output.count("\n")) == (2, 1)
    assert "17 (the first row of CSV names the columns): which column is the question?" in output


def test_a_full_disk_leaves_nothing_of_a_run(
    base: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreFault("the disk is full")

    monkeypatch.setattr(run_folder, "create_token", fail)
    assert init(base, rows)[0] == 1
    out = base.parent / "out"
    out.mkdir()
    (out / "mine").touch()
    result = CliRunner().invoke(
        main, ["init", f"--base-model={base}", f"--rows={rows}", f"--out={out}"]
    )
    assert result.exit_code == 1
    assert "the disk is full" in result.output
    assert [each.name for each in out.iterdir()] == ["mine"]


def test_an_existing_config_is_kept(base: Path, rows: Path) -> None:
    assert init(base, rows)[0] == 0
    before = written(base)
    result = CliRunner().invoke(
        main, ["init", f"--base-model={base}", f"--rows={rows}", f"--out={base.parent}/out"]
    )
    assert result.exit_code == 2
    assert "exists already; choose another --out" in result.output
    assert written(base) == before
