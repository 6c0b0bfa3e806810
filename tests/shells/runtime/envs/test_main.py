import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from echo2d.cli import main
from echo2d.extras import install_command
from echo2d.net.security.auth import write_token_file
from tests.support.ticket_gateway import token_file


def test_a_missing_verifiers_package_is_reported_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: a daemon that has ended arms a timer that would end this one."""
    secret = tmp_path / "app.token"
    write_token_file(secret, token_file())
    arguments = ["--gateway=http://127.0.0.1:1", f"--secret={secret}", "--tokenizer=model"]
    done = subprocess.run(
        [sys.executable, "-m", "echo2d", "envs", "some-env", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert install_command("verifiers") in line


def test_arguments_of_the_environment_must_be_a_json_object() -> None:
    result = CliRunner().invoke(main, ["envs", "some-env", "--env-args=[1]"])
    assert result.exit_code == 2
    assert "expected a JSON object" in result.stderr
