"""A key, a status field and a message are declared once: everything made from the declaration follows it.

Each test plants a new one and edits nothing else. What such a change touches in the tree is its declaration, the code
that uses it, and a page that is written from the declarations.
"""

import dataclasses
from dataclasses import dataclass

import pytest

from echo2d.config.tables import print_tables, read_table
from echo2d.core.base.codec import Codec
from echo2d.core.base.described import described
from echo2d.core.protocol.control_messages import Heartbeat
from echo2d.core.rules.run import PolicyTable
from echo2d.core.rules.table import key
from echo2d.core.status import json_form
from echo2d.core.status.schema import GroupsStatus
from echo2d.errors import OperatorFault, PeerFault
from echo2d.runtime.coordinator.metrics import _declared
from tests.support.status_page import rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedPolicy(PolicyTable):
    planted_share: float = key("a share that is new", 0.5, above=0.0, high=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedGroups(GroupsStatus):
    planted: int = described("Groups that are new", "echo2d_groups_planted")


@dataclass(frozen=True, slots=True)
class PlantedBeat(Heartbeat):
    planted: int = 7


def test_a_new_key_is_read_checked_and_documented() -> None:
    assert read_table(PlantedPolicy, {}).planted_share == 0.5
    assert read_table(PlantedPolicy, {"planted_share": 0.25}).planted_share == 0.25
    with pytest.raises(OperatorFault, match=r"policy\.planted_share: expected .* at most 1"):
        read_table(PlantedPolicy, {"planted_share": 2.0})
    with pytest.raises(OperatorFault, match="planted_share"):  # the mistyped name is guessed
        read_table(PlantedPolicy, {"planted_shar": 0.25})
    assert "planted_share = 0.5" in print_tables(PlantedPolicy)


def test_a_new_status_field_is_in_json_in_the_metrics_and_on_its_page() -> None:
    zeros = {item.name: 0 for item in dataclasses.fields(PlantedGroups)}
    status = PlantedGroups(**{**zeros, "planted": 3})
    assert json_form.plain(status)["planted"] == 3
    assert json_form._record(PlantedGroups)({**zeros, "planted": 3}, "") == status
    names = {family.name for family in _declared(PlantedGroups, lambda _: [], ())}
    assert "echo2d_groups_planted" in names
    assert ("planted", "integer", "Groups that are new") in list(rows(PlantedGroups))


def test_a_new_message_needs_no_reader_and_an_older_build_skips_its_new_field() -> None:
    told = Heartbeat(3, 1 << 30, 5, 6)
    beat = PlantedBeat(*dataclasses.astuple(told))
    new, old = Codec({"Heartbeat": PlantedBeat}), Codec({"Heartbeat": Heartbeat})
    assert new.decode(new.encode(beat)) == beat
    assert old.decode(new.encode(beat)) == told
    assert new.decode(old.encode(told)) == beat
    with pytest.raises(PeerFault, match=r"PlantedBeat\.planted"):
        new.decode(new.encode(dataclasses.replace(beat, planted=-1)))
