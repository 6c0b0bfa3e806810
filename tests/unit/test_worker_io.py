"""Every event that the worker's parts name is one the worker's machine takes, every action one it may give."""

from typing import get_args

from echo2d.core import relay_io, worker_io, worker_state


def names(union: object) -> set[str]:
    return {cls.__name__ for cls in get_args(union)}


def test_the_events_of_all_parts_come_in() -> None:
    assert names(worker_io.VersionEvent) <= names(worker_state.Event)
    assert names(relay_io.Event) <= names(worker_state.Event)


def test_the_actions_of_all_parts_go_out_or_become_messages() -> None:
    became_messages = {"ReportEdgeBroken", "Accuse", "FormArrived", "FrameGone"}
    assert names(worker_io.LeaseAction) | names(worker_io.VersionAction) <= names(worker_state.Action)
    assert names(relay_io.Action) - became_messages <= names(worker_state.Action)
