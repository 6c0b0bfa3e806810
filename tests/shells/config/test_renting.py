"""The keys that a [[provider]] may have depend on its kind (`registry.PROVIDERS`)."""

from typing import Any

import pytest

from echo2d.config.renting import ProviderConfig, read_providers
from echo2d.errors import OperatorFault

EXEC: dict[str, Any] = {
    "name": "here", "kind": "exec", "start": ["a"], "stop": ["b"], "list": ["c"],
    "offer": [{"name": "box", "usd_per_h": 0.5, "trajectories_per_h": 10}],
}  # fmt: skip
STATIC: dict[str, Any] = {
    "name": "lab", "kind": "static",
    "offer": [{"name": "lab-*", "usd_per_h": 0.0, "trajectories_per_h": 0}],
}  # fmt: skip


def read(row: dict[str, Any], **changes: Any) -> ProviderConfig:
    (provider,) = read_providers({"provider": [{**row, **changes}]})
    return provider


def test_only_the_kind_exec_rents_boxes() -> None:
    assert read(EXEC).rents
    assert not read(STATIC).rents


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        (EXEC, {"kind": "cloud"}, 'provider.kind: expected "exec" or "static"; found'),
        (EXEC, {"stop": []}, "provider.stop: expected a command; found"),
        (STATIC, {"start": ["a"]}, "provider.start: expected nothing for kind 'static'; found"),
        (EXEC, {"options": {"region": "x"}}, "provider.options: .* found region"),
        (STATIC, {"offer": []}, "provider.offer: expected at least one"),
        (EXEC, {"offer": [{**EXEC["offer"][0], "usd_per_h": 0}]}, "above 0 .* here/box"),
        (EXEC, {"offer": [{**EXEC["offer"][0], "name": "b-*"}]}, "provider.offer.name"),
    ],
)
def test_a_key_that_does_not_fit_its_kind_is_refused(
    row: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(OperatorFault, match=words):
        read(row, **changes)
