"""The Grafana dashboard and the Prometheus rules of this repository, as tests read them."""

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.support.paths import REPO

BOARD = REPO / "grafana" / "echo2d.json"
RULES = REPO / "grafana" / "prometheus-rules.yml"
RULE_TESTS = REPO / "tests" / "nightly" / "boards" / "rules_test.yml"
# Names of metrics that are not ours, but are scraped with them.
FOREIGN = {"up", "process_resident_memory_bytes"}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """The title of each panel with each of its expressions, as Grafana sends them to Prometheus."""
    for panel in panels():
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
            yield panel["title"], expr


def rules() -> dict[str, str]:
    """The expression of each alert."""
    found = re.findall(r"- alert: (\w+)\n +expr: (.+)\n", RULES.read_text())
    return {name: expr.strip('"') for name, expr in found}


def metrics_in(expression: str) -> set[str]:
    """The metrics that an expression names."""
    return set(re.findall(r"\b(?:echo2d|process)_\w+|\bup\b", expression))


def documented() -> set[str]:
    """Every series of docs/reference/metrics.md, which a test keeps complete."""
    text = (REPO / "docs" / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)`(?: \(.*?\))? \| (\w+) \|", text, re.MULTILINE)
    return {
        name + suffix
        for name, kind in rows
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
