"""The script for a box is a valid program for any names, options and secrets."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from echo2d.cli import main
from echo2d.errors import OperatorFault
from echo2d.net.security.auth import TokenFile, write_token_file
from echo2d.runtime.box.script import SERVERS, BoxJob, BoxStart, box_script, join_options

NASTY = "a 'b' \"c\" $HOME `id` \\ 100% #"
TOKEN = TokenFile("box-1", "worker", "s3cret", "00" * 32, "https://h:1", "PEM\nof 'it'\n")
JOB = BoxJob("https://10.0.0.1:7700", TOKEN, ("--name", NASTY), "torch", None)
SHELLCHECK = shutil.which("shellcheck")


def shell(script: str, *, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=check, timeout=30
    )


@pytest.mark.parametrize("start", ["systemd", "onstart"])
@pytest.mark.parametrize("source", [None, "git+https://h/r@abc"])
def test_shellcheck_accepts_the_script(tmp_path: Path, start: BoxStart, source: str | None) -> None:
    path = tmp_path / "box.sh"
    path.write_text(box_script(replace(JOB, source=source, options=("--engines", "2")), start))
    subprocess.run(["bash", "-n", str(path)], check=True)
    if SHELLCHECK is not None:
        done = subprocess.run([SHELLCHECK, str(path)], capture_output=True, text=True, check=False)
        assert done.stdout == ""


def test_the_shell_expands_no_value_in_the_script() -> None:
    head = box_script(replace(JOB, source=NASTY), "onstart").partition("# --- from here on")[0]
    said = shell(head + 'printf "%s\\0" "$url" "$from" "$token"').stdout.split("\0")
    assert said[:2] == [JOB.url, NASTY]
    assert TokenFile(**json.loads(said[2])) == TOKEN


def test_the_options_reach_join_unchanged() -> None:
    (line,) = [
        each for each in box_script(JOB, "onstart").splitlines() if each.startswith("options=(")
    ]
    assert shell(line + '; printf "%s\\0" "${options[@]}"').stdout.split("\0")[:-1] == [
        "--name",
        NASTY,
    ]


def test_systemd_gets_the_options_quoted_in_its_own_way() -> None:
    script = box_script(JOB, "systemd")
    assert (
        '--state-dir ${STATE_DIRECTORY} "--name" '
        '"a \'b\' \\"c\\" $$HOME `id` \\\\ 100%% #"\n' in script
    )
    assert "RestartSteps=6" in script


def test_user_data_holds_the_same_script() -> None:
    text = box_script(JOB, "cloud-init")
    first, _, rest = text.partition("\n")
    (file,) = json.loads(rest)["write_files"]
    assert first == "#cloud-config"
    assert (file["content"], file["permissions"]) == (box_script(JOB, "systemd"), "0700")


def test_a_box_name_that_is_a_path_is_refused() -> None:
    with pytest.raises(OperatorFault, match="the token's name becomes a file's"):
        box_script(replace(JOB, token=replace(TOKEN, name="../x")), "onstart")


@pytest.mark.parametrize(
    "hostile",
    [
        replace(JOB, url="https://h:1\ntouch /tmp/owned\n"),
        replace(JOB, url="h:1"),
        replace(JOB, source="git+https://h/r\nid"),
        replace(JOB, options=("--name", "x\nEND_OF_FILE_OF_ECHO2D\nid\n")),
        replace(JOB, options=("--name", "x\x85id")),
    ],
)
@pytest.mark.parametrize("start", ["systemd", "onstart", "cloud-init"])
def test_a_value_that_would_end_a_line_is_refused(hostile: BoxJob, start: BoxStart) -> None:
    with pytest.raises(OperatorFault, match=r"printable|is not the URL of a coordinator"):
        box_script(hostile, start)


INSTALLER = box_script(JOB, "onstart").partition('[ "$(id -u)"')[0]
FUNCTIONS, _, _ = (
    box_script(JOB, "onstart").partition("fits() {")[2].partition("\ninstall_echo2d\n")
)


def test_the_script_can_run_again_to_upgrade_and_installs_nothing_twice(tmp_path: Path) -> None:
    """With a pip that writes down what it is asked for, and a coordinator that may be away."""
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin" / "pip"
    pip.write_text('#!/bin/sh\necho "$*" >>"$(dirname "$0")/asked"\n')
    pip.chmod(0o755)

    def install(fetch: str) -> list[str]:
        (tmp_path / "bin" / "asked").write_text("")
        script = [
            INSTALLER,
            "fits() {",
            FUNCTIONS,
            f"home={tmp_path}",
            "found_python() { echo true; }",
        ]
        done = shell("\n".join([*script, f"fetch_wheel() {{ {fetch}; }}", "install_echo2d"]))
        assert "Traceback" not in done.stderr
        return (tmp_path / "bin" / "asked").read_text().splitlines()

    quiet = "install --quiet --disable-pip-version-check"
    assert install("echo /w/a.whl 11") == [f"{quiet} /w/a.whl[torch]"]
    assert install("echo /w/a.whl 11") == []
    again = [f"{quiet} /w/a.whl[torch]", f"{quiet} --force-reinstall --no-deps /w/a.whl[torch]"]
    assert install("echo /w/a.whl 22") == again, "of the same name, with other bytes"
    assert install("return 1") == [], "the coordinator is away"
    assert install("echo /w/a.whl 22") == []


def test_the_script_restarts_a_running_service() -> None:
    assert 'systemctl restart "echo2d-join@$name"' in box_script(JOB, "systemd")


@pytest.mark.parametrize(
    ("python", "line"),
    [
        (
            "echo Python 3.12.3",
            "Python 3.12.3 is here but cannot make a venv: install python3-venv",
        ),
        (
            '[ "$1" = --version ] && echo Python 3.10.1',
            "expected Python 3.11 or newer; found Python 3.10.1",
        ),
        ("false", "expected Python 3.11 or newer; found no python3"),
    ],
)
def test_the_script_says_why_no_python_fits(python: str, line: str) -> None:
    script = [INSTALLER, "fits() {", FUNCTIONS, f"python3() {{ {python}; }}", "no_python"]
    done = shell("\n".join(script), check=False)
    assert (done.returncode, done.stderr) == (1, f"echo2d box: {line}\n")


@pytest.mark.parametrize("engine", SERVERS)
def test_a_server_gets_an_environment_of_its_own(engine: str) -> None:
    options = join_options(engine, ["--engine", engine])
    assert options[-2:] == ("--engine-python", f"/opt/{engine}/bin/python")
    job = replace(JOB, engine=engine, options=options)
    assert _installed(job) == [SERVERS[engine], f"/opt/{engine}", ""]
    own = join_options(engine, ["--engine", engine, "--engine-url=http://127.0.0.1:3"])
    assert _installed(replace(job, options=own)) == ["", "", ""]


def _installed(job: BoxJob) -> list[str]:
    """The server, its environment and the extra of echo2d, as the shell reads them."""
    head = box_script(job, "onstart").partition("# --- from here on")[0]
    return shell(head + 'printf "%s|" "$server" "$servers_home" "$extra"').stdout.split("|")[:-1]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["join", "--print-script=onstart", *arguments])
    return result.exit_code, result.output


@pytest.mark.may_block
def test_the_command_writes_the_script_to_a_private_file(tmp_path: Path) -> None:
    token, out = tmp_path / "box.token", tmp_path / "box.sh"
    write_token_file(token, TOKEN)
    command = [sys.executable, "-m", "echo2d", "join", f"--token-file={token}", "--relay-only"]
    with out.open("w") as file:
        done = subprocess.run(
            [*command, "--set=threads=2", "--print-script=onstart"],
            stdout=file, stderr=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    assert done.stderr == "echo2d: this script holds the token's secret: keep it from others\n"
    assert out.stat().st_mode & 0o777 == 0o600
    assert "extra=''" in out.read_text(), "a relay needs no torch"
    assert "options=(--set threads=2 --relay-only --name box-1)\n" in out.read_text()
    assert "url=https://h:1\n" in out.read_text(), "that of the token"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--engin=x"], "echo2d: No such option '--engin'."),
        (["--slots", "x"], "echo2d: Invalid value for '--slots': 'x' is not a valid"),
        (["--slots", "0"], "echo2d: worker.slots: expected an integer, at least 1"),
        (["--set=slotz=1"], "echo2d: worker.slotz: unknown key"),
        (["--state-dir=x"], "echo2d: --state-dir: leave it out; the script chooses it"),
        (["https://h:1", "more"], "echo2d: Got unexpected extra argument (more)"),
    ],
)
def test_an_operators_mistake_is_found_before_a_box_is_rented(
    tmp_path: Path, options: list[str], line: str
) -> None:
    token = tmp_path / "box.token"
    write_token_file(token, TOKEN)
    code, said = run(f"--token-file={token}", *options)
    assert code == 2
    assert said.startswith(line)


def test_a_token_that_is_not_a_workers_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "box.token"
    write_token_file(token, replace(TOKEN, role="viewer"))
    code, said = run(f"--token-file={token}")
    assert code == 2
    assert "expected a worker's token" in said
