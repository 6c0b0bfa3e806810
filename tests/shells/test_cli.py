"""The command line: fast help, every command documented, mistakes in one line."""

import errno
import json
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from echo2d.cli import main, parts
from tests.support.paths import REPO

HELP_COST_MAX = 6.0  # of the CPU seconds in which Python starts; 4 when this was written


def commands(
    group: click.Group = main, prefix: str = "echo2d"
) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments), prog_name="echo2d")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def children_s() -> float:
    """CPU time of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_help_is_printed_fast() -> None:
    """Compared with a Python that does nothing. The best of several counts, because machines are shared."""
    times: dict[str, list[float]] = {"pass": [], "help": []}
    for _ in range(5):
        for name, arguments in (("pass", ["-c", "pass"]), ("help", ["-m", "echo2d", "--help"])):
            before = children_s()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=REPO)
            times[name].append(children_s() - before)
    assert min(times["help"]) < HELP_COST_MAX * min(times["pass"]), times


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_every_command_is_documented(name: str, command: click.Command) -> None:
    assert command.help, f"{name} has no help"
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert [option.name for option in options if not option.help] == []
    assert name in (REPO / "README.md").read_text(), f"README does not name {name}"


def test_a_long_command_without_a_terminal_prints_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for interval_s, lines in ((0.0, 2), (10.0, 0)):
        monkeypatch.setattr(parts, "_LINE_S", interval_s)
        with parts.progress_bar("exporting version 3") as tell:
            tell(0.25)
            tell(1.0)
        said = capsys.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == lines
        if lines:
            assert "exporting version 3: 25% in 0 s, 0 s to go\n" in said.err


def test_a_long_copy_prints_its_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.0, 12.0, 12.0])
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with parts.progress_bar("exporting version 3", size=4_800_000_000) as tell:
        tell(0.25)
    assert capsys.readouterr().err == "exporting version 3: 25% in 12 s, 36 s to go, 100 MB/s\n"


def test_coordinate_needs_a_config() -> None:
    code, output = run("coordinate")
    assert code == 2
    assert output.startswith("echo2d: coordinate needs --config")


def test_the_option_print_config_names_every_table() -> None:
    code, output = run("coordinate", "--print-config")
    assert code == 0
    for table in ("run", "coordinator", "policy", "sampling", "task", "dissemination", "link"):
        assert f"[{table}]" in output


def test_a_malformed_config_gives_one_line(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[policy]\nstaleness_max = "two"\n')
    code, output = run("coordinate", "--config", str(config))
    assert code == 2
    assert output.count("\n") == 1


def test_the_command_plan_answers_as_json_and_as_tables() -> None:
    small = str(REPO / "scenarios" / "fleet-small.toml")
    code, output = run("plan", small, "--json")
    assert code == 0
    facts = json.loads(output)
    assert facts["feasible"]
    assert {"staleness_max", "publish_every", "usd_per_step"} <= facts["what_if"][0].keys()
    code, output = run("plan", small, "--no-p2p", "--no-cost")
    assert code == 0
    assert "star" in output
    code, output = run("plan", str(REPO / "scenarios" / "mixed.toml"))
    assert code == 2
    assert output.count("\n") == 1


def test_the_command_simulate_plays_a_fleet_if_the_file_has_one() -> None:
    small = str(REPO / "scenarios" / "fleet-small.toml")
    code, output = run("simulate", small, "--set=simulate.hours=0.3", "--json")
    assert code == 0
    facts = json.loads(output)
    assert facts["steps"] > 0
    # A group may lack the answer that it has waited for too long.
    assert 0.95 < facts["trajectories"]["trained"] / (256 * facts["steps"]) <= 1.0
    assert {
        "bubble",
        "mu_min",
        "usd_per_step",
        "max_staleness",
        "egress_gb",
        "wall_s",
    } <= facts.keys()
    for wrong in (
        ["simulate", small, "--peers", "3"],
        ["simulate", small, "--set=simulate.hourz=3"],
        ["simulate", str(REPO / "scenarios" / "mixed.toml"), "--set=simulate.hours=1"],
    ):
        code, output = run(*wrong)
        assert (code, output.count("\n")) == (2, 1)


def test_the_result_of_simulate_is_printed_for_people(tmp_path: Path) -> None:
    small = str(REPO / "scenarios" / "fleet-small.toml")
    code, output = run("simulate", small, "--set=simulate.hours=0.1")
    assert code == 0
    assert "trajectories/h" in output
    assert "usd per 1,000 trajectories" in output
    path = tmp_path / "three.toml"
    path.write_text('bytes = "1MiB"\n[[peers]]\n[[peers]]\ncount = 3\n')
    code, broadcast = run("simulate", str(path))
    assert code == 0
    assert broadcast.startswith("verified 3 peers hold the version; the last had it after ")
    for raw in ("{", "mu_min", "None", "True", "_s "):
        assert raw not in output + broadcast


def test_the_command_simulate_reports_how_the_broadcast_went(tmp_path: Path) -> None:
    path = tmp_path / "three.toml"
    path.write_text('bytes = "1MiB"\n[[peers]]\n[[peers]]\ncount = 3\n')
    code, output = run("simulate", str(path), "--json")
    facts = json.loads(output)
    assert (code, facts["verified_peers"]) == (0, 3)
    assert 1 < facts["ratio"] < 5
    assert facts.keys() >= {
        "t_verify_s",
        "bound_s",
        "predicted_s",
        "seed_copies",
        "refetched",
        "wall_s",
    }


@pytest.mark.parametrize(
    ("text", "code"), [("bytes = 1", 2), ('bytes = "1GiB"\nlimit = "1s"\n[[peers]]\n[[peers]]', 1)]
)
def test_the_command_simulate_reports_a_mistake_in_one_line(
    tmp_path: Path, text: str, code: int
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    found, output = run("simulate", str(path))
    assert (found, output.count("\n")) == (code, 1)


def test_the_command_status_needs_a_coordinator_to_ask() -> None:
    code, output = run("status")
    assert (code, output.count("\n")) == (2, 1)


def test_the_option_scores_cannot_be_combined_with_others() -> None:
    for other in ("--watch", "--worker=box"):
        code, output = run("status", "--run-dir=nowhere", "--scores", other)
        assert (code, output.count("\n")) == (2, 1)
        assert "--scores cannot be used with" in output


def test_no_sentence_of_the_help_is_truncated() -> None:
    for words in ([], ["token"], ["bench"], ["worker"], ["keep"]):
        shown = CliRunner().invoke(main, [*words, "--help"], terminal_width=80).output
        assert "..." not in shown.partition("--help")[2], shown


def test_the_help_shows_every_command_under_one_of_four_headings() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    headings = [line for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == ["Options:", "Run:", "Look:", "Operate:", "Measure:"]
    for name in main.commands:
        assert shown.count(f"\n  {name} ") == 1, name


def test_the_options_of_join_are_grouped_under_headings() -> None:
    shown = CliRunner().invoke(main, ["join", "--help"]).output
    headings = [line for line in shown.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "What it joins, and as what:",
        "Its engines:",
        "When it works:",
        "What it gives to other workers:",
        "A script instead:",
        "Other options:",
    ]
    for option in main.commands["join"].params:
        assert option.param_type_name == "argument" or option.opts[0] in shown


def test_the_template_has_the_learners_table_too() -> None:
    shown = CliRunner().invoke(main, ["coordinate", "--print-config"]).output
    tables = tomllib.loads(shown)
    assert {"run", "coordinator", "link", "task", "worker", "learner"} <= tables.keys()
    for choices in ('"drop" or "mask"', '"torch" or "sglang"', '"grpo" or "dr_grpo"'):
        assert choices in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("keep", "export"), "echo2d: Missing option '--run-dir'. See `echo2d keep export --help`.\n"),
        (("init", "--port", "70000"), "echo2d: Invalid value for '--port': 70000 is not in the range "),
        (("nothing",), "echo2d: No such command 'nothing'. See `echo2d --help`.\n"),
        (("cordn",), "echo2d: No such command 'cordn'. Did you mean `echo2d worker cordon`? See "),
    ],
)  # fmt: skip
def test_a_wrong_option_gives_one_line(arguments: tuple[str, ...], said: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert output.startswith(said)
    assert output.count("\n") == 1


def test_a_run_of_another_user_names_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(Path, "iterdir", refuse)
    for command in (["samples"], ["status"], ["token", "list"], ["keep", "export", "DIR"]):
        code, output = run(*command, f"--run-dir={tmp_path}")
        assert (code, output.count("\n")) == (2, 1)
        assert f"{tmp_path} belongs to the user {tmp_path.owner()}: type this as" in output


def test_a_python_without_the_packages_says_so_in_one_line() -> None:
    program = "import runpy, sys; sys.modules['click'] = None; runpy.run_module('echo2d', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    said = f"echo2d: {sys.executable} has no package click: use the Python"
    assert (done.returncode, done.stderr.count("\n"), done.stderr[: len(said)]) == (2, 1, said)
