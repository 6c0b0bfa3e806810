"""The worker's machine takes every event of its parts, and performs or sends every action of its parts."""

from typing import get_args

from echo2d.core.relay import events as relay_events
from echo2d.core.worker import events as worker_events
from echo2d.core.worker import state as worker_state


def names(union: object) -> set[str]:
    return {cls.__name__ for cls in get_args(union)}


def test_the_machine_takes_every_event_of_its_parts() -> None:
    assert names(worker_events.VersionEvent) <= names(worker_state.WorkerEvent)
    assert names(relay_events.RelayEvent) <= names(worker_state.WorkerEvent)


def test_every_action_of_a_part_is_performed_or_becomes_a_message() -> None:
    became_messages = {"ReportEdgeBroken", "Accuse", "FormArrived", "FrameGone"}
    assert names(worker_events.LeaseAction) | names(worker_events.VersionAction) <= names(
        worker_state.WorkerAction
    )
    assert names(relay_events.RelayAction) - became_messages <= names(worker_state.WorkerAction)
