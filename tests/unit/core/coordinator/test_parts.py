"""The parts of a coordinator read the same books, and begin with what the ledger holds."""

from dataclasses import replace

import pytest

from echo2d.core.coordinator.events import Recovered
from echo2d.core.coordinator.parts import make_parts
from echo2d.core.rules.audit import AuditRules
from tests.support.coordinator_world import rules


@pytest.mark.parametrize("audited", [False, True])
def test_all_parts_share_members_versions_and_statistics(audited: bool) -> None:
    the_rules = rules(audit=AuditRules(trusted=()) if audited else None)
    parts = make_parts(the_rules, Recovered.nothing(), tag=7, plan_secret=bytes(32), now=0.0)
    assert (parts.audits is not None) is audited
    assert parts.groups._statistics is parts.statistics
    assert parts.calls._statistics is parts.statistics
    assert parts.publishing._statistics is parts.statistics
    assert parts.activation_loop.parts.members is parts.members
    assert parts.groups._members is parts.members
    assert parts.calls._versions is parts.versions


def test_counters_continue_from_the_values_in_the_ledger() -> None:
    recovered = replace(Recovered.nothing(), trained=12, dropped=3)
    parts = make_parts(rules(), recovered, tag=7, plan_secret=bytes(32), now=5.0)
    assert (parts.statistics.run_trained, parts.statistics.run_dropped) == (12, 3)
    assert parts.statistics.now == 5.0
