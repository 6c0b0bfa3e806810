"""The data of the dashboard: what it gets, how often, and which parts are made again."""

import json
from typing import Any

import pytest

from echo2d.core.coordinator.glance import TreeView
from echo2d.core.status.schema import Status
from echo2d.runtime.coordinator.live_page import (
    PAGE_SHARE_MAX,
    STATUS_AGE_S_MAX,
    WORKER_COLUMNS,
    LivePage,
    page_status,
)
from tests.support.status import RICH, key_paths, trained


class Site:
    """A page whose clocks a test turns. cost: CPU seconds of one status. made: how many there were."""

    def __init__(self) -> None:
        self.world = trained()
        self.now = self.cpu = self.cost = 0.0
        self.made = 0
        self.page = LivePage(
            self.world.state, self.look, clock=lambda: self.now, cpu=lambda: self.cpu
        )

    def look(self) -> Status:
        self.made += 1
        self.cpu += self.cost
        return self.world.state.status(now=self.world.now)

    def ask(self, seen: int = 0, plan: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.page.answer("viewer", seen=seen, plan=plan, stripe=0)
        )
        return found


def test_data_that_a_caller_has_is_not_sent_again() -> None:
    site = Site()
    site.cost = 0.01
    site.ask()
    first = site.ask()
    assert first["role"] == "viewer"
    assert first["now"]["committed_step"] == 3
    assert first["tree"]["plan"] == first["now"]["spread"]["plan"]
    assert first["status"]["committed_step"] == 3
    again = site.ask(first["seen"], first["tree"]["plan"])
    assert again.keys() == {"role", "seen", "status_age_s", "now"}
    assert site.ask(first["seen"] - 1)["status"] == first["status"]


def test_a_cheap_status_is_made_for_every_answer() -> None:
    site = Site()
    seen = [site.ask()["seen"] for _ in range(3)]
    assert (site.made, len(set(seen))) == (3, 3)


def test_a_costly_status_takes_no_more_than_its_share() -> None:
    site = Site()
    site.cost = 0.012
    answers = []
    for at in range(0, 60, 2):
        site.now = float(at)
        answers.append(site.ask())
    # The first one does not count.
    assert site.cpu <= 60 * PAGE_SHARE_MAX + 2 * site.cost
    assert max(each["status_age_s"] for each in answers) == 10.0, "and a page says how old it is"


def test_one_slow_status_makes_no_later_page_old() -> None:
    site = Site()
    ages = []
    for at in range(0, 60, 2):
        site.now, site.cost = float(at), 0.5 if at in (0, 20) else 0.001
        ages.append(site.ask()["status_age_s"])
    assert max(ages) == 0.0


def test_a_costly_status_is_never_too_old() -> None:
    site = Site()
    site.cost = 9.0
    ages = []
    for at in range(0, 60, 2):
        site.now = float(at)
        ages.append(site.ask()["status_age_s"])
    assert max(ages) < STATUS_AGE_S_MAX


def test_a_missing_stripe_is_shown_as_the_first_one_at_no_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site, made = Site(), []
    tree = site.world.state.tree

    def counted(stripe: int) -> TreeView | None:
        made.append(stripe)
        return tree(stripe)

    monkeypatch.setattr(site.world.state, "tree", counted)
    found = [
        json.loads(site.page.answer("viewer", seen=0, plan="", stripe=stripe))["tree"]["stripe"]
        for stripe in (0, *range(1000, 1050))
    ]
    assert (set(found), made) == ({0}, [0])


def test_workers_are_sent_as_a_table() -> None:
    status = trained().state.status(now=5.0)
    found = json.loads(page_status(status))
    rows = [
        dict(zip(found["workers"]["columns"], row, strict=True)) for row in found["workers"]["rows"]
    ]
    assert [row["name"] for row in rows] == [worker.name for worker in status.workers]
    assert tuple(found["workers"]["columns"]) == WORKER_COLUMNS
    served = status.workers[0].serving
    assert served is not None
    assert rows[0]["serving"] == served.version
    assert found["t_train_s"]["newest"] == status.t_train_s[-1]


def test_every_status_can_be_sent_to_the_page() -> None:
    for make in RICH:
        status = make().state.status(now=1e6)
        assert "workers.columns" in key_paths(json.loads(page_status(status)))
