"""Tables of keys check themselves, and reuse keys of each other."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest

from echo2d.core.rules.run import DisseminationTable, PolicyTable
from echo2d.core.rules.table import Table, key, same_key
from echo2d.errors import OperatorFault
from tests.support.coordinator_world import RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed(Table):
    TABLE: ClassVar[str] = "borrowed"

    group_patience: float = same_key(PolicyTable, "group_patience")
    group_size: int = same_key(PolicyTable, "group_size", default=4)
    shape: str = same_key(DisseminationTable, "shape")
    kind: Literal["a", "b"] = key("which", "a")
    note: Any = None  # no key, so not checked


def test_a_key_of_another_table_keeps_its_default_limits_and_meaning() -> None:
    assert Borrowed().group_patience == PolicyTable().group_patience
    assert Borrowed().group_size == 4
    fields, declared = Borrowed.__dataclass_fields__, PolicyTable.__dataclass_fields__
    assert fields["group_size"].metadata == declared["group_size"].metadata


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"group_size": 0}, "borrowed.group_size: expected an integer, at least 1, at most 1024; found 0"),
        ({"group_size": True}, "borrowed.group_size: expected an integer, "),
        ({"group_patience": -1}, "borrowed.group_patience: expected a number, at least 0.0, at most 1000.0; found -1"),
        ({"shape": "ring"}, 'borrowed.shape: expected "'),
        ({"kind": "c"}, "borrowed.kind: expected \"a\" or \"b\"; found 'c'"),
    ],
)  # fmt: skip
def test_an_error_names_its_key(values: dict[str, Any], line: str) -> None:
    with pytest.raises(OperatorFault) as fault:
        Borrowed(**values)
    assert str(fault.value).startswith(line)


def test_the_rules_of_a_run_are_checked_as_its_file_is() -> None:
    assert replace(RULES, group_min=0, group_size=5).samples_min == 3
    with pytest.raises(OperatorFault, match=r"^policy\.staleness_max: .* at most 64; found 65$"):
        replace(RULES, staleness_max=65)
