"""Calls are events and actions of the coordinator, and nothing of them is a record."""

from typing import get_args

from echo2d.core.cluster.events import Action, Event, Record
from echo2d.core.gateway.events import CallAction, CallEvent


def test_calls_go_through_the_machine_and_not_into_the_ledger() -> None:
    assert set(get_args(CallEvent)) <= set(get_args(Event))
    assert set(get_args(CallAction)) <= set(get_args(Action))
    assert not {*get_args(CallEvent), *get_args(CallAction)} & set(get_args(Record))
