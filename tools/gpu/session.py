"""One session on a GPU: measures what decides most, in ten minutes, from a machine that has torch and transformers.

    python -m tools.gpu.session [--out DIR] [--only B,D] [--small]
    python -m tools.gpu.session --table FILE.json       # print the table of a session that was run
    python -m tools.gpu.session --wheels 3.12           # fetch what such a machine lacks, for its version of Python

Each section is a process of its own, with a limit of time, and writes each row as soon as it is measured. A section
that hangs, fails or dies loses only the rows that it has not written. DIR/session.json has all rows so far after each
section, DIR/NAME.log what the section printed. --small runs everything with tiny shapes, also on a CPU. The sections
are in the order of their worth. docs/measurements/gpu.md says what they measure.
"""

import argparse
import contextlib
import datetime as dt
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]
WHEELS = Path(__file__).parent / "wheels"
PLACE = REPO / ".cache" / "gpu"
SESSION_S = 585
# Of what pyproject.toml names, transformers brings these, and the tests for a GPU need those of the extra `dev`.
BROUGHT = {"numpy", "huggingface-hub", "safetensors", "tokenizers"}
OF_TESTS = {"blockbuster", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout"}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the session. where: module and function that yields its rows."""

    title: str
    where: str
    limit_s: float


SECTIONS = {
    "B": Section("train steps of 8B layers", "train_steps:dense", 210),
    "D": Section("train steps of 30B-A3B layers", "train_steps:experts", 150),
    "A": Section("copies between GPU and host", "copies:copies", 45),
    "E": Section("a delta applied on the GPU", "delta:deltas", 35),
    "F": Section("loading a version", "copies:loading", 45),
    "C": Section("kernels of attention and head", "kernels:kernels", 40),
    "G": Section("the tests for a GPU", "suite:suite", SESSION_S),
}
# Run only if --only names it.
LONGER = {"T": Section("train steps of 1.7B", "train_steps:whole_models", SESSION_S)}
ALL = SECTIONS | LONGER


def main(arguments: Sequence[str] | None = None) -> int:
    """1: a section failed, or a figure is not what is asked of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPO / "runs" / "gpu", help="default: runs/gpu")
    parser.add_argument("--only", default="", help="sections, such as B,D; T runs only if named")
    parser.add_argument("--small", action="store_true", help="tiny shapes, also on a CPU")
    parser.add_argument("--table", type=Path, help="print the table of this file, and end")
    parser.add_argument("--wheels", metavar="VERSION", help="fetch wheels for this Python, and end")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.wheels:
        return fetch_wheels(asked.wheels)
    if asked.table:
        print(table(json.loads(asked.table.read_text())))
        return 0
    if asked.section:
        run_section(ALL[asked.section], asked.out / f"{asked.section}.rows", small=asked.small)
        return 0
    names = asked.only.split(",") if asked.only else list(SECTIONS)
    if unknown := set(names) - set(ALL):
        parser.error(f"--only: no section {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    found = session(names, asked.out, small=asked.small)
    print(table(found))
    return 0 if passed(found) else 1


def session(names: Sequence[str], out: Path, *, small: bool) -> dict[str, Any]:
    """Run these sections. Returns what DIR/session.json has."""
    ends_at = time.monotonic() + SESSION_S
    out.mkdir(parents=True, exist_ok=True)
    python = prepare()
    began = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    found: dict[str, Any] = {"date": began, "small": small, "sections": {}}
    for name in names:
        section, left_s = ALL[name], ends_at - time.monotonic()
        rows = out / f"{name}.rows"
        rows.write_text("")
        command = [*python, "-m", "tools.gpu.session", "--section", name, "--out", str(out)]
        began_at = time.monotonic()
        error = "no time was left"
        if left_s > 1:
            limit_s = left_s if small else min(section.limit_s, left_s)
            error = run_process(
                [*command, *(["--small"] if small else [])], out / f"{name}.log", limit_s
            )
        facts, by_what = read_rows(rows)
        found |= facts
        seconds = time.monotonic() - began_at
        found["sections"][name] = {
            "title": section.title,
            "seconds": round(seconds, 1),
            "rows": by_what,
            "error": error,
        }
        whole = out / "session.json"
        whole.with_suffix(".new").write_text(json.dumps(found, indent=1))
        whole.with_suffix(".new").replace(whole)
        left = ends_at - time.monotonic()
        outcome = error or f"{len(by_what)} rows"
        print(f"{name}  {section.title}: {seconds:.0f} s, {outcome}; {left:.0f} s left", flush=True)
    return found


def run_process(command: Sequence[str], log: Path, limit_s: float) -> str:
    """Run a section to its end or its limit. Returns why it failed; empty: it did not."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=REPO, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"ended at its limit of {limit_s:.0f} s"
        finally:
            # What the section started, such as pytest, ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (lines[-1][:300] if lines else f"exit code {code}") if code else ""


def run_section(section: Section, rows: Path, *, small: bool) -> None:
    """The process of a section."""
    from echo2d.learner.config import grow_memory_in_place

    # As `echo2d learn` does before it imports torch.
    grow_memory_in_place()
    module, function = section.where.split(":")
    facts = importlib.import_module("tools.gpu.rows").facts()
    with rows.open("a") as file:
        print(json.dumps(facts), file=file, flush=True)
        for row in getattr(importlib.import_module(f"tools.gpu.{module}"), function)(small=small):
            print(row.as_json(), file=file, flush=True)


def read_rows(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The facts about the machine, and the rows. The last row counts if several have one name."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    rows = {row["what"]: row for row in lines[1:]}
    return (lines[0] if lines else {}), list(rows.values())


# --- the machine


def prepare() -> list[str]:
    """Install missing packages from the wheels. Returns the command of a Python that finds them and the checkout.

    SystemExit: a package is missing, and no wheel has it.
    """
    version = ".".join(map(str, sys.version_info[:2]))
    packages, tree = PLACE / f"packages-{version}", PLACE / "tree" / "echo2d"
    missing = [each for each in needed() if not installed(each)]
    if missing and not packages.exists():
        if not WHEELS.exists():
            raise SystemExit(
                f"missing packages: {', '.join(missing)}; expected their wheels in {WHEELS}. Where there is a network, "
                f"run `python -m tools.gpu.session --wheels {version}`, and bring this folder"
            )
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
        subprocess.run(
            [*install, "--find-links", str(WHEELS), "--target", str(packages), *missing], check=True
        )
    # An installation has the learner inside echo2d; here links lay both out so.
    tree.mkdir(parents=True, exist_ok=True)
    for source in [*(REPO / "echo2d").iterdir(), REPO / "learner"]:
        link = tree / source.name
        if not link.is_symlink() and source.name != "__pycache__":
            link.symlink_to(source)
    path = [tree.parent, REPO / "tools" / "lab", REPO, *([packages] if packages.exists() else [])]
    return [
        "env",
        "PYTHONSAFEPATH=1",
        f"PYTHONPATH={os.pathsep.join(map(str, path))}",
        sys.executable,
    ]


def needed() -> Iterator[str]:
    """The packages, with their versions, that a session needs besides torch and transformers."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    yield from (each for each in project["dependencies"] if Requirement(each).name not in BROUGHT)
    development = project["optional-dependencies"]["dev"]
    yield from (each for each in development if Requirement(each).name in OF_TESTS)


def installed(requirement: str) -> bool:
    wanted = Requirement(requirement)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return wanted.specifier.contains(importlib.metadata.version(wanted.name))
    return False


def fetch_wheels(version: str) -> int:
    """Download the wheels of all that a bare machine lacks. version: of its Python, such as 3.12."""
    platforms = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
    pip = [sys.executable, "-m", "pip"]
    # blockbuster needs forbiddenfruit, of which an index has no wheel; it is Python alone, so any Python can build it.
    build = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(WHEELS), "forbiddenfruit"]
    subprocess.run([*pip, *build], check=True)
    fetch = ["download", "--quiet", "--only-binary=:all:", "--python-version", version]
    fetch += [part for each in platforms for part in ("--platform", each)]
    fetch += ["--constraint", str(REPO / "constraints.txt")]
    fetch += ["--find-links", str(WHEELS), "--dest", str(WHEELS), *needed()]
    subprocess.run([*pip, *fetch], check=True)
    size = sum(each.stat().st_size for each in WHEELS.iterdir())
    print(f"{len(list(WHEELS.iterdir()))} wheels, {size / 2**20:.0f} MiB, in {WHEELS}")
    return 0


# --- the table


def passed(found: dict[str, Any]) -> bool:
    sections = found["sections"].values()
    rows = [row for section in sections for row in section["rows"]]
    return not any(section["error"] for section in sections) and all(
        holds(row["figures"][name], *limit) for row in rows for name, limit in row["asked"].items()
    )


def holds(value: Any, how: str, limit: Any) -> bool:
    """Whether a figure is what is asked of it."""
    return bool({"at least": value >= limit, "at most": value <= limit, "is": value == limit}[how])


def table(found: dict[str, Any]) -> str:
    """The session in Markdown."""
    versions = ", ".join(
        f"{name} {version}" for name, version in found.get("versions", {}).items() if version != "-"
    )
    small = ", in small" if found["small"] else ""
    lines = [
        f"{found.get('card', 'unknown card')}, driver {found.get('driver', '-')}, {found['date']}{small}: {versions}.",
        "",
        "| section | case | figures | asked |",
        "| --- | --- | --- | --- |",
    ]
    for name, section in found["sections"].items():
        head = f"{name}, {section['title']} ({section['seconds']:.0f} s)"
        for row in section["rows"]:
            figures = "; ".join(f"{each}: {shown(value)}" for each, value in row["figures"].items())
            asked = "; ".join(
                f"{each} {how} {shown(limit)}: {'held' if holds(row['figures'][each], how, limit) else '**not held**'}"
                for each, (how, limit) in row["asked"].items()
            )
            text = figures or f"not measured: {row['skipped']}"
            lines.append(f"| {head} | {row['what']} | {text} | {asked} |")
            head = ""
        if section["error"]:
            lines.append(f"| {head} | **failed** | {section['error'].replace('|', '/')} | |")
    return "\n".join(lines)


def shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
