"""One slot for deltas: no refit reads what is overwritten, and a slot that was turned back counts as its base's."""

from collections.abc import Iterator

import pytest

from echo2d.core.base.ids import Epoch, FormId, PublishSeq, version_label
from echo2d.core.protocol.control_messages import RefitDone, RefitFailed
from echo2d.core.weights.signed_index import Root
from echo2d.core.worker.events import (
    ApplyForm,
    ApplyRejected,
    CancelApply,
    DropForm,
    EngineRefitFailed,
    RefitEngines,
    SendControl,
    Standing,
    VersionAction,
)
from echo2d.core.worker.versions import (
    FORMS_MAX,
    REFIT_RETRY_S,
    REFIT_RETRY_S_MAX,
    REFIT_TRIES_MAX,
    WorkerVersions,
)
from tests.support.worker import (
    RUN,
    a_delta_root,
    a_key,
    a_refit,
    a_refit_failure,
    a_root,
    a_snapshot,
    an_order,
)

LATER = 1000.0


@pytest.fixture
def versions() -> Iterator[WorkerVersions]:
    """Version 0 is served, from the only slot."""
    versions = WorkerVersions(
        RUN, engines=True, publish_seq=PublishSeq(0), standing=(), in_place=True
    )
    deliver(versions, a_root(0))
    assert an_order(0) in versions.ready(a_snapshot(a_root(0)), now=0.0)
    versions.refitted(a_refit(0), now=0.0)
    yield versions
    versions.check()


def deliver(versions: WorkerVersions, root: Root, *, whole: bool = True) -> list[VersionAction]:
    """Root, plan and all frames."""
    actions = versions.announced(root, now=0.0)
    actions += versions.planned(root.form, now=0.0)
    if whole:
        actions += versions.arrived(root.form, now=0.0)
    versions.check()
    return actions


def in_place(root: Root) -> ApplyForm:
    return ApplyForm(root.form, in_place=True)


def failure(version: int, restored: int, *, label: int | None = None) -> EngineRefitFailed:
    key = a_key(version)
    named = None if label is None else version_label(a_key(label).version, a_key(label).digest)
    return EngineRefitFailed(
        key.version, key.digest, "engine died", named, restored=a_key(restored)
    )


def orders(actions: list[VersionAction]) -> list[VersionAction]:
    return [each for each in actions if isinstance(each, ApplyForm | CancelApply | RefitEngines)]


def dropped(actions: list[VersionAction]) -> list[FormId]:
    return [each.form for each in actions if isinstance(each, DropForm)]


def test_a_delta_of_the_current_version_is_applied_in_place(versions: WorkerVersions) -> None:
    root = a_delta_root(1, base=0)
    assert in_place(root) in deliver(versions, root)
    assert versions.holding() == (a_key(0),), "until it is replaced"
    assert orders(versions.ready(a_snapshot(root), now=0.0)) == [an_order(1)]
    assert versions.holding() == (a_key(1),)
    assert versions.serving == a_key(0), "from the engines' memory"
    versions.refitted(a_refit(1), now=1.0)
    assert versions.serving == a_key(1)


@pytest.mark.parametrize("root", [a_root(1), a_delta_root(1, base=7)])
def test_other_forms_go_to_the_spare_slot(versions: WorkerVersions, root: Root) -> None:
    assert ApplyForm(root.form) in deliver(versions, root)
    versions.ready(a_snapshot(root, "b"), now=0.0)
    assert versions.holding() == (a_key(0), a_key(1))
    versions.refitted(a_refit(1), now=1.0)
    assert versions.holding() == (a_key(1),), "the other slot is emptied"


def test_without_the_key_a_delta_goes_to_the_spare_slot() -> None:
    versions = WorkerVersions(
        RUN, engines=True, publish_seq=PublishSeq(0), standing=[Standing(a_key(0), "slot")]
    )
    root = a_delta_root(1, base=0)
    assert ApplyForm(root.form) in deliver(versions, root)


def test_an_apply_in_place_waits_for_the_refit_that_is_running(versions: WorkerVersions) -> None:
    first, second = a_delta_root(1, base=0), a_delta_root(2, base=1)
    deliver(versions, first)
    assert orders(versions.ready(a_snapshot(first), now=0.0)) == [an_order(1)]
    assert orders(deliver(versions, second)) == []
    assert orders(versions.refitted(a_refit(1), now=1.0)) == [in_place(second)]


def test_a_refit_waits_for_an_apply_in_place_that_ends_soon(versions: WorkerVersions) -> None:
    root = a_delta_root(1, base=0)
    deliver(versions, root)
    assert orders(versions.engine_lost("engine died", now=1.0)) == []
    assert versions.wake_at() is None, "the apply's end is waited for"
    assert orders(versions.choose(now=LATER)) == []
    assert orders(versions.ready(a_snapshot(root), now=LATER)) == [an_order(1)]


def test_a_refit_ends_an_apply_in_place_whose_frames_are_still_on_their_way(
    versions: WorkerVersions,
) -> None:
    root = a_delta_root(1, base=0)
    deliver(versions, root, whole=False)
    assert orders(versions.engine_lost("engine died", now=1.0)) == []
    assert versions.wake_at() == 1.0 + REFIT_RETRY_S
    assert orders(versions.choose(now=LATER)) == [CancelApply(root.form)]
    assert versions.wake_at() is None
    assert orders(versions.choose(now=LATER)) == []
    assert orders(versions.apply_cancelled(root.form, now=LATER)) == [an_order(0)]
    assert orders(versions.refitted(a_refit(0), now=LATER)) == [in_place(root)]


def test_a_slot_that_was_turned_back_is_applied_to_again(versions: WorkerVersions) -> None:
    root = a_delta_root(1, base=0)
    deliver(versions, root)
    versions.ready(a_snapshot(root), now=0.0)
    actions = versions.refit_failed(failure(1, 0, label=0), now=10.0)
    assert orders(actions) == [in_place(root)]
    assert (versions.serving, versions.holding()) == (a_key(0), (a_key(0),))
    assert orders(versions.ready(a_snapshot(root), now=11.0)) == [], (
        "not before the backoff is over"
    )
    assert versions.wake_at() == 10.0 + REFIT_RETRY_S
    assert orders(versions.choose(now=20.0)) == [an_order(1)]


def test_engines_in_doubt_load_what_was_restored(versions: WorkerVersions) -> None:
    root = a_delta_root(1, base=0)
    deliver(versions, root)
    versions.ready(a_snapshot(root), now=0.0)
    actions = versions.refit_failed(failure(1, 0), now=10.0)
    assert versions.serving is None
    assert orders(actions) == [an_order(0)], "and nothing is applied meanwhile"
    assert orders(versions.refitted(a_refit(0), now=11.0)) == [in_place(root)]
    assert versions.serving == a_key(0)


def test_a_version_that_fails_again_and_again_gives_way_to_its_base(
    versions: WorkerVersions,
) -> None:
    root, now = a_delta_root(1, base=0), 0.0
    deliver(versions, root)
    for attempt in range(REFIT_TRIES_MAX):
        now += REFIT_RETRY_S_MAX
        assert orders([*versions.ready(a_snapshot(root), now=now)]) == [an_order(1)]
        actions = versions.refit_failed(failure(1, 0, label=0), now=now)
        again = [] if attempt == REFIT_TRIES_MAX - 1 else [in_place(root)]
        assert orders(actions) == again
    assert orders(versions.choose(now=now + LATER)) == []
    assert versions.serving == a_key(0)
    newer = a_delta_root(2, base=0)
    assert in_place(newer) in deliver(versions, newer)


def test_a_base_that_no_root_has_named_here_is_not_served() -> None:
    """The process that replaced it was another one."""
    versions = WorkerVersions(
        RUN, engines=True, publish_seq=PublishSeq(0), standing=[Standing(a_key(1), "slot")],
        in_place=True,
    )  # fmt: skip
    root = a_delta_root(1, base=0)
    assert an_order(1) in deliver(versions, root)
    actions = versions.refit_failed(failure(1, 0), now=1.0)
    assert orders(actions) == [in_place(root)]
    assert versions.serving is None
    versions.check()


def test_a_revoked_base_is_not_served_either(versions: WorkerVersions) -> None:
    root = a_delta_root(1, base=0)
    deliver(versions, root)
    versions.ready(a_snapshot(root), now=0.0)
    versions.revoked(Epoch(2), [a_key(0)], now=0.5)
    actions = versions.refit_failed(failure(1, 0), now=1.0)
    assert RefitEngines not in {type(each) for each in actions}


def test_a_form_stays_until_its_version_is_served(versions: WorkerVersions) -> None:
    root = a_delta_root(1, base=0)
    deliver(versions, root)
    versions.ready(a_snapshot(root), now=0.0)
    assert versions.kept == {0, 1}
    assert dropped(versions.forgotten(root.form, now=0.0)) == []
    for version in range(2, FORMS_MAX + 3):
        actions = versions.announced(a_root(version), now=0.0)
        assert root.form not in dropped(actions)
    versions.check()
    versions.refit_failed(failure(1, 0, label=0), now=1.0)
    assert dropped(versions.forgotten(root.form, now=1.0)) == []
    versions.planned(root.form, now=1.0)
    versions.ready(a_snapshot(root), now=1.0)
    assert dropped(versions.refitted(a_refit(1), now=2.0)) == [root.form]
    assert versions.kept == {1}


def test_a_form_stays_no_longer_than_until_another_is_applied(versions: WorkerVersions) -> None:
    root, newer = a_delta_root(1, base=0), a_root(2)
    deliver(versions, root)
    versions.ready(a_snapshot(root), now=0.0)
    versions.forgotten(root.form, now=0.0)
    deliver(versions, newer)
    assert dropped(versions.ready(a_snapshot(newer, "b"), now=0.0)) == [root.form]


def test_an_apply_in_place_that_is_rejected_leaves_its_base(versions: WorkerVersions) -> None:
    root = a_delta_root(1, base=0)
    deliver(versions, root)
    versions.rejected(ApplyRejected(root.form, "disk full"), now=0.0)
    assert versions.holding() == (a_key(0),)
    assert orders(versions.planned(root.form, now=1.0)) == [in_place(root)]


def test_files_of_other_lengths_go_to_the_spare_slot_after_all(versions: WorkerVersions) -> None:
    root = a_delta_root(1, base=0)
    deliver(versions, root)
    versions.ready(a_snapshot(root, "b"), now=0.0)
    assert versions.holding() == (a_key(0), a_key(1))
    actions = versions.refit_failed(a_refit_failure(1), now=1.0)
    assert isinstance(actions[0], SendControl)
    assert isinstance(actions[0].message, RefitFailed)
    assert versions.holding() == (a_key(0), a_key(1)), "nothing was turned back"


def test_the_refit_of_a_version_revoked_meanwhile_settles_it(versions: WorkerVersions) -> None:
    root = a_delta_root(1, base=0)
    deliver(versions, root)
    versions.ready(a_snapshot(root), now=0.0)
    versions.revoked(Epoch(2), [a_key(1)], now=0.5)
    actions = versions.refitted(a_refit(1), now=1.0)
    assert not [
        e for e in actions if isinstance(e, SendControl) and isinstance(e.message, RefitDone)
    ]
    assert versions.serving is None
