"""The dashboard and the alert rules use existing metrics. `make nightly-boards` asks a real Prometheus."""

import re

from tests.support.dashboard import (
    FOREIGN,
    RULE_TESTS,
    RULES,
    documented,
    expressions,
    metrics_in,
    panels,
    rules,
)


def test_every_expression_names_metrics_that_exist() -> None:
    known = documented() | FOREIGN
    asked = [*expressions(), *rules().items()]
    assert len(asked) > 60
    for where, expression in asked:
        assert metrics_in(expression), f"{where}: {expression} names no metric"
        assert metrics_in(expression) <= known, f"{where}: {metrics_in(expression) - known}"


def test_panels_have_a_description_and_do_not_overlap() -> None:
    numbers = [panel["id"] for panel in panels()]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith("."), panel["title"]
    rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert rows == ["Run", "Workers", "Broadcast", "Money", "Alerts and the host"]


def test_every_alert_says_what_to_do_and_has_a_test() -> None:
    text = RULES.read_text()
    blocks = re.split(r"\n +- alert: ", text)[1:]
    assert len(blocks) == len(rules()) == text.count("- alert: ")
    for block in blocks:
        assert re.search(r"\n +summary: .+\.\"?\n +runbook: .+\.\"?(\n|$)", block), block
    fired = re.findall(r'alertname="(\w+)"\}\', value: 1', RULE_TESTS.read_text())
    assert set(fired) == set(rules())
