"""A wheel and an sdist have everything that README and docs name, and nothing besides `echo2d`."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.distribution import build_distribution, read_metadata
from tests.support.paths import REPO


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist of the files that git knows."""
    directory = tmp_path_factory.mktemp("built")
    build_distribution(directory)
    return directory


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """The `bin` of a virtual environment with the wheel, which sees the packages of this one."""
    (wheel,) = built.glob("*.whl")
    environment = built / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def run(command: str, installed: Path, cwd: Path) -> str:
    """What the command prints, with only the installation and the system's programs on PATH."""
    done = subprocess.run(
        command,
        shell=True,
        cwd=cwd,
        env={"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_the_package_description_links_to_no_missing_file(built: Path) -> None:
    """A package index shows it without the files of the checkout."""
    (wheel,) = built.glob("*.whl")
    text = read_metadata(wheel)
    assert "Description-Content-Type: text/markdown" in text
    assert "## Five minutes on two machines" in text
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [each for each in targets if not each.startswith("https://")] == []


def test_the_wheel_has_one_package_and_the_files_that_the_pages_copy(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names} == {"echo2d", "echo2d-0.1.0.dist-info"}
    for folder in ("examples", "grafana", "scenarios", "systemd"):
        for path in filter(Path.is_file, (built / "source" / folder).rglob("*")):
            assert f"echo2d/share/{path.relative_to(built / 'source')}" in names


def test_the_sdist_has_documents_tests_and_tools(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        "Makefile",
        "docs/guide/deploy.md",
        "docs/figures/scale.svg",
    ):
        assert page in names
    for path in ("tests/e2e/test_installation.py", "tools/replay.py", "learner/train.py"):
        assert path in names


def test_the_services_are_installed_as_the_page_says(installed: Path, tmp_path: Path) -> None:
    """Every `cp` and `install` of a file of systemd/ in docs/guide/deploy.md, below tmp_path."""
    run("echo2d files systemd --to .", installed, tmp_path)
    page = (REPO / "docs" / "guide" / "deploy.md").read_text()
    lines = [line for line in re.findall(r"^[#$] (.+)$", page, re.MULTILINE) if " systemd/" in line]
    copies = [part for line in lines for part in line.split(" && ") if " systemd/" in part]
    assert len(copies) >= 5
    for copy in copies:
        words = [
            str(tmp_path / word[1:]) if word.startswith("/etc/") else word
            for word in shlex.split(copy)
        ]
        at = Path(words[-1])
        (at if copy.endswith("/") else at.parent).mkdir(parents=True, exist_ok=True)
        run(shlex.join(words), installed, tmp_path)
    assert (tmp_path / "etc/systemd/system/echo2d-join@.service").is_file()


def test_the_installed_programs_start_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    run("echo2d files scenarios --to . && echo2d files examples --to .", installed, tmp_path)
    assert "workers" in run("echo2d plan scenarios/fleet-small.toml", installed, tmp_path)
    assert os.access(tmp_path / "examples" / "rent" / "aws.sh", os.X_OK)
    assert "[learner]" in run("echo2d learn --print-config", installed, tmp_path)
    assert "[learner]" in run("python -m echo2d.learner --print-config", installed, tmp_path)
    assert "--standalone" in run("python -m echo2d.learner.torchrun --help", installed, tmp_path)
    assert run("python -c 'import learner' 2>&1 || echo none", installed, tmp_path).endswith(
        "none\n"
    )
