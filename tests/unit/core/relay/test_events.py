"""Every event and action is a value, and is in the unions that relays and runtimes match on."""

from dataclasses import is_dataclass

from echo2d.core.relay import events as relay_events
from echo2d.core.relay.events import RelayAction, RelayEvent


def test_the_unions_contain_every_event_and_action() -> None:
    local = {
        item
        for item in vars(relay_events).values()
        if getattr(item, "__module__", None) == relay_events.__name__
    }
    assert {item for item in local if is_dataclass(item)} == {
        *RelayEvent.__args__,
        *RelayAction.__args__,
    }


def test_all_events_and_actions_are_frozen_and_have_slots() -> None:
    for kind in (*RelayEvent.__args__, *RelayAction.__args__):
        assert kind.__dataclass_params__.frozen
        assert "__slots__" in vars(kind)
