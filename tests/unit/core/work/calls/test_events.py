"""Calls are events and actions of the coordinator, and none of them is a record."""

from typing import get_args

from echo2d.core.coordinator.events import CoordinatorAction, CoordinatorEvent, CoordinatorRecord
from echo2d.core.work.calls.events import CallEvent, GatewayAction


def test_calls_pass_through_the_machine_and_are_not_recorded_in_the_ledger() -> None:
    assert set(get_args(CallEvent)) <= set(get_args(CoordinatorEvent))
    assert set(get_args(GatewayAction)) <= set(get_args(CoordinatorAction))
    assert not {*get_args(CallEvent), *get_args(GatewayAction)} & set(get_args(CoordinatorRecord))
