"""Run the tests that need a GPU, and count them while they run."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.gpu.rows import Row

REPO = Path(__file__).resolve().parents[2]
TESTS = "tests/nightly/gpu"


def suite(*, small: bool) -> Iterator[Row]:  # noqa: ARG001
    """Section G. A row for the counts after each test, of which the last one counts, and one for each failed test.

    Without a GPU all tests skip, which shows that they can be imported.
    """
    # The paths of the section's own Python come first, because the checkout's folder echo2d lacks the learner.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-vv",
        "-m",
        "gpu",
        "-o",
        "pythonpath=",
        "-p",
        "no:cacheprovider",
    ]
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    with subprocess.Popen(
        [*command, TESTS], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="")
            if (found := re.match(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", line)) is None:
                continue
            test, result = found.groups()
            counts["failed" if result == "ERROR" else result.lower()] += 1
            yield _counted(counts)
            if result in ("FAILED", "ERROR"):
                yield Row(test.rpartition("::")[2], {"result": result.lower()})
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {run.returncode}")


def _counted(counts: Counter[str]) -> Row:
    return Row(TESTS, {name: float(n) for name, n in counts.items()}, {"failed": ("at most", 0.0)})
