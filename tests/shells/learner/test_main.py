"""The learner's program: its config file, its output, and its exit code."""

import json
import subprocess
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
import torch

from echo2d.learner.__main__ import _parse, main
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model.policy import Policy
from echo2d.net.security.auth import TokenFile, write_token_file
from tests.support.learner import write_config
from tests.support.scripted_coordinator import ScriptedCoordinator


@pytest.mark.parametrize("option", ["--ranks=2", "--gpu-gib=80"])
def test_an_option_of_the_plan_is_refused_without_the_plan(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parse(["--config=run.toml", option])
    assert ended.value.code == 2
    assert f"{option.partition('=')[0]} needs --plan" in capsys.readouterr().err


def test_a_config_file_is_read_back_as_written(config: LearnerConfig, tmp_path: Path) -> None:
    assert LearnerConfig.load(write_config(tmp_path / "run.toml", config)) == config


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lr": "high"}, "learner.lr: expected a number, more than 0.0; found 'high'"),
        ({"lr": 0}, "learner.lr: expected a number, more than 0.0; found 0"),
        ({"steps": 1.5}, "learner.steps: expected an integer, at least 1; found 1.5"),
        ({"steps": True}, "learner.steps: expected an integer, at least 1; found True"),
        ({"betas": [0.9]}, "learner.betas: expected [a number, a number]"),
        ({"betas": [0.9, 1.0]}, "learner.betas: expected [a number, a number]"),
        (
            {"objective": "ppo"},
            'learner.objective: expected "grpo" or "dr_grpo" or "gspo" or "cispo" or "rloo" or "distill"; ',
        ),
        ({"speed": 1}, "learner.speed: unknown key; expected one of objective, "),
    ],
)
def test_a_wrong_key_gives_one_line_and_exit_code_2(
    config: LearnerConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    line: str,
) -> None:
    assert main(["--config", str(write_config(tmp_path / "run.toml", config, **changes))]) == 2
    assert capsys.readouterr().err.startswith(f"learner: {line}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[learner]\nlr = 1", "learner.token_file: expected "),
        ("[run]", "expected a table [learner]"),
        ("a = ", "is not TOML"),
    ],
)
def test_a_file_without_a_whole_table_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert main(["--config", str(path)]) == 2
    assert line in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "none.toml")]) == 2


def test_an_abbreviated_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--config", "run.toml", "--resum"])
    assert "unrecognized arguments: --resum" in capsys.readouterr().err


def test_a_gradient_that_is_no_number_ends_the_learner_without_a_restart(
    config: LearnerConfig,
    served: ScriptedCoordinator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first step leaves weights that give no finite number. A service must not restart the learner for ever."""
    path = write_config(tmp_path / "run.toml", config, lr=1e30, warmup_steps=0)
    assert main(["--config", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "learner: the gradient of train step 2 is not finite"
    assert served.said("commit") == [1]


@pytest.mark.usefixtures("served")
def test_an_unexpected_error_has_a_traceback_and_a_last_line(
    config: LearnerConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So other ranks do not wait for this rank, and this rank does not wait for exit handlers of libraries."""

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Policy, "train_step", full)
    assert main(["--config", str(write_config(tmp_path / "run.toml", config))]) == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent call last):" in said
    assert said.splitlines()[-1] == "learner: OutOfMemoryError: CUDA out of memory"


def test_the_learner_logs_like_the_other_programs(
    config: LearnerConfig, tmp_path: Path, served: ScriptedCoordinator
) -> None:
    path, log = write_config(tmp_path / "run.toml", config), tmp_path / "learner.log"
    assert main(["--config", str(path), "--log-json", f"--log-file={log}"]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert served.events
    assert {line["area"] for line in lines} == {"echo2d.learner"}
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    trained = [line for line in lines if line.get("kind") == "trained"]
    assert [(line["step"], line["of"]) for line in trained] == [(n, 4) for n in range(1, 5)]
    assert all(line["tokens_per_s"] > 0 for line in trained)
    assert trained[-1]["eta"] == "0:00:00"
    assert not any("group=" in line["message"] for line in lines)
    kinds = Counter(line.get("kind") for line in lines)
    assert (kinds["published"], kinds["saved"]) == (5, 2)


def test_a_learner_without_torch_ends_with_one_line(config: LearnerConfig, tmp_path: Path) -> None:
    path = write_config(tmp_path / "run.toml", config)
    write_token_file(config.token_file, TokenFile("t", "learner", "secret", "00" * 32))
    program = (
        "import sys; sys.modules['torch'] = None; from echo2d.learner.__main__ import main; "
        f"sys.exit(main(['--config', {str(path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("learner: the learner needs torch: ")
    assert "Traceback" not in done.stderr


def test_a_learner_started_before_its_coordinator_prints_one_line(
    config: LearnerConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path / "run.toml", config)
    assert main(["--config", str(path)]) == 2
    (line,) = [
        each for each in capsys.readouterr().err.splitlines() if each.startswith("learner: ")
    ]
    assert line.startswith(
        f"learner: there is no token file {config.token_file}: start `echo2d coordinate` first"
    )
