"""Print the Python files that have not yet been rewritten in plain English, with their lines,
longest first.

The files that have are listed in `tools/read_files.txt`. A listed file that does not exist is an
error: it was renamed or deleted, and the list should follow.
"""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
LIST = REPO / "tools" / "read_files.txt"
FOLDERS = ("echo2d", "learner", "tools", "tests", "examples")


def main() -> int:
    files = {str(path.relative_to(REPO)): lines(path) for path in python_files()}
    read = listed(LIST.read_text())
    if missing := sorted(read - set(files)):
        print(f"{LIST.name}: no such file: {', '.join(missing)}", file=sys.stderr)
        return 1
    unread = sorted(set(files) - read, key=lambda path: (-files[path], path))
    for path in unread:
        print(f"{files[path]:5} {path}")
    left, every = sum(files[path] for path in unread), sum(files.values())
    print(f"unread: {len(unread)} of {len(files)} files, {left:,} of {every:,} lines")
    return 0


def python_files() -> list[Path]:
    """All that are not empty."""
    paths = (path for folder in FOLDERS for path in (REPO / folder).rglob("*.py"))
    return [path for path in paths if path.stat().st_size]


def listed(text: str) -> set[str]:
    """The paths in the list, without blank lines and comments."""
    stripped = (line.strip() for line in text.splitlines())
    return {line for line in stripped if line and not line.startswith("#")}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main())
