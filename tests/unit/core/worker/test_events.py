"""The worker's machine takes every event of its parts, and every action of its parts is one of its own."""

from typing import get_args

from echo2d.core.relay import events as relay_events
from echo2d.core.worker import events as worker_events
from echo2d.core.worker import state as worker_state


def names(union: object) -> set[str]:
    return {cls.__name__ for cls in get_args(union)}


def test_the_events_of_all_parts_come_in() -> None:
    assert names(worker_events.VersionEvent) <= names(worker_state.WorkerEvent)
    assert names(relay_events.RelayEvent) <= names(worker_state.WorkerEvent)


def test_the_actions_of_all_parts_go_out_or_become_messages() -> None:
    became_messages = {"ReportEdgeBroken", "Accuse", "FormArrived", "FrameGone"}
    assert names(worker_events.LeaseAction) | names(worker_events.VersionAction) <= names(
        worker_state.WorkerAction
    )
    assert names(relay_events.RelayAction) - became_messages <= names(worker_state.WorkerAction)
