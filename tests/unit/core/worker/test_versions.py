"""The version that a worker holds, applies and serves."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest

from echo2d.core.base.ids import Digest, Epoch, PublishSeq, RunId, Version, version_label
from echo2d.core.protocol.control_messages import (
    ApplyFailed,
    RefitDone,
    RefitFailed,
    VersionKey,
    VersionVerified,
)
from echo2d.core.worker.events import (
    ApplyForm,
    CancelApply,
    DropForm,
    EngineRefitFailed,
    IndexRoot,
    KeepPublishSeq,
    SendControl,
    Standing,
    VersionAction,
    WorkerNote,
)
from echo2d.core.worker.versions import (
    LABELS_MAX,
    REFIT_RETRY_S,
    REFIT_RETRY_S_MAX,
    REFIT_TRIES_MAX,
    WORKER_FORMS_MAX,
    WORKER_HELD_MAX,
    UnderWay,
    WorkerVersions,
)
from tests.support.worker import (
    RUN,
    a_key,
    a_refit,
    a_refit_failure,
    a_rejection,
    a_root,
    a_snapshot,
    an_order,
    hold,
)


def make(
    *, engines: bool = True, seq: int = 0, standing: Sequence[Standing] = ()
) -> WorkerVersions:
    return WorkerVersions(RUN, engines=engines, publish_seq=PublishSeq(seq), standing=standing)


@pytest.fixture
def versions() -> Iterator[WorkerVersions]:
    versions = make()
    yield versions
    versions.check()


def said(actions: Sequence[VersionAction], kind: type) -> list[object]:
    return [
        each.message
        for each in actions
        if isinstance(each, SendControl) and isinstance(each.message, kind)
    ]


def arrive(
    versions: WorkerVersions,
    version: int,
    *,
    path: str = "slot",
    seq: int | None = None,
    epoch: int = 1,
) -> list[VersionAction]:
    """Root, plan, all frames, snapshot: all of it, without a refit's end."""
    root = a_root(version, seq=seq, epoch=epoch)
    versions.announced(root, now=0.0)
    versions.planned(root.form, now=0.0)
    versions.arrived(root.form, now=0.0)
    versions.check()
    return versions.ready(a_snapshot(root, path), now=0.0)


def serve(versions: WorkerVersions, version: int) -> None:
    assert an_order(version) in arrive(versions, version)
    versions.refitted(a_refit(version), now=0.0)
    assert versions.serving == a_key(version)


def test_a_version_is_indexed_applied_verified_and_served(versions: WorkerVersions) -> None:
    root = a_root(0)
    assert versions.announced(root, now=0.0) == [IndexRoot(root), KeepPublishSeq(PublishSeq(1))]
    assert versions.planned(root.form, now=0.0) == [ApplyForm(root.form)]
    assert versions.arrived(root.form, now=0.0) == []
    verified = SendControl(VersionVerified(root.form, *_parts(a_key(0))))
    assert versions.ready(a_snapshot(root), now=0.0) == [verified, an_order(0)]
    assert versions.refitted(a_refit(0), now=1.0) == [
        SendControl(RefitDone(*_parts(a_key(0)), 0.25, True, 0.0, 300, 1.5, (a_key(0),)))
    ]
    assert (versions.serving, versions.holding()) == (a_key(0), (a_key(0),))
    assert versions.labels == {version_label(*_parts(a_key(0))): a_key(0)}


def _parts(key: VersionKey) -> tuple[Version, Digest]:
    return key.version, key.digest


def test_a_version_under_way_is_reported_from_the_first_root_to_the_refit(
    versions: WorkerVersions,
) -> None:
    root, told = a_root(0), list[UnderWay | None]()
    steps: Sequence[Callable[[], object]] = (
        lambda: versions.announced(root, now=0.0),
        lambda: versions.planned(root.form, now=0.0),
        lambda: versions.arrived(root.form, now=0.0),
        lambda: versions.ready(a_snapshot(root), now=0.0),
        lambda: versions.refitted(a_refit(0), now=0.0),
    )
    for step in steps:
        step()
        told.append(versions.under_way)
    assert told == [
        None,
        UnderWay("receiving", Version(0), root.form),
        UnderWay("applying", Version(0), root.form),
        UnderWay("loading", Version(0), None),
        None,
    ]


def test_a_relay_peer_only_receives() -> None:
    versions, root = make(engines=False), a_root(0)
    versions.announced(root, now=0.0)
    versions.planned(root.form, now=0.0)
    assert versions.under_way == UnderWay("receiving", Version(0), root.form)
    versions.arrived(root.form, now=0.0)
    assert versions.under_way is None


def test_a_plan_may_arrive_before_the_root(versions: WorkerVersions) -> None:
    root = a_root(0, whole=False)
    assert versions.planned(root.form, now=0.0) == []
    assert versions.announced(root, now=0.0)[-1] == ApplyForm(root.form)


def test_older_publishes_are_refused_unless_they_are_under_way(versions: WorkerVersions) -> None:
    versions.announced(a_root(4, whole=False), now=0.0)
    versions.announced(a_root(5, whole=False), now=0.0)
    note, drop = versions.announced(a_root(3), now=0.0)
    assert isinstance(note, WorkerNote)
    assert "publish 4 is older than 6" in note.text
    assert drop == DropForm(a_root(3).form)
    assert versions.refuses(a_root(3).form)
    assert IndexRoot(a_root(4)) in versions.announced(a_root(4), now=0.0)


def test_a_root_accepted_before_a_restart_counts() -> None:
    versions = make(seq=7)
    assert isinstance(versions.announced(a_root(5), now=0.0)[0], WorkerNote)
    assert versions.announced(a_root(6), now=0.0) == [IndexRoot(a_root(6))]


def test_roots_of_another_run_are_refused(versions: WorkerVersions) -> None:
    note, _ = versions.announced(a_root(0, run=RunId("other")), now=0.0)
    assert note == WorkerNote("root refused: it belongs to run other")


def test_a_snapshot_from_before_a_restart_is_served_once_a_root_names_it() -> None:
    versions = make(standing=[Standing(a_key(3), "old")])
    assert versions.choose(now=0.0) == []
    actions = versions.announced(a_root(3), now=0.0)
    assert said(actions, VersionVerified)
    assert actions[-1] == an_order(3, "old")
    assert versions.planned(a_root(3).form, now=0.0) == [], "there is nothing to apply"
    versions.check()


def test_a_newer_version_follows_a_refit_that_is_running(versions: WorkerVersions) -> None:
    assert an_order(0) in arrive(versions, 0)
    assert said(arrive(versions, 1, path="b"), VersionVerified)
    assert versions.refitted(a_refit(0), now=1.0)[-1] == an_order(1, "b")


def test_applying_waits_while_a_refit_reads_the_spare_slot(versions: WorkerVersions) -> None:
    arrive(versions, 0, path="a")
    arrive(versions, 1, path="b")
    root = a_root(2)
    versions.announced(root, now=0.0)
    assert versions.planned(root.form, now=0.0) == []
    actions = versions.refitted(a_refit(0), now=1.0)
    assert actions[-2:] == [an_order(1, "b"), ApplyForm(root.form)]


def test_applying_waits_for_a_refit_of_the_same_version_from_the_other_slot(
    versions: WorkerVersions,
) -> None:
    """A newer epoch published it again, and it was applied again before its root named it."""
    arrive(versions, 0, path="a")
    again, root = a_root(0, seq=2, epoch=2, whole=False), a_root(1, seq=3, epoch=2)
    versions.announced(again, now=0.0)
    assert versions.planned(again.form, now=0.0) == [ApplyForm(again.form)]
    versions.ready(a_snapshot(again, "b"), now=0.0)
    versions.announced(root, now=0.0)
    assert versions.planned(root.form, now=0.0) == [], (
        "the refit reads slot a, which is the spare one now"
    )
    assert versions.refitted(a_refit(0), now=1.0)[-1] == ApplyForm(root.form)


def test_a_newer_plan_replaces_a_form_that_is_still_arriving(versions: WorkerVersions) -> None:
    old, new = a_root(0, whole=False), a_root(1, whole=False)
    versions.announced(old, now=0.0)
    versions.planned(old.form, now=0.0)
    versions.announced(new, now=0.0)
    assert versions.planned(new.form, now=0.0) == [CancelApply(old.form)]
    assert versions.choose(now=0.0) == [], "once"
    assert versions.apply_cancelled(old.form, now=0.0) == [ApplyForm(new.form)]


def test_a_form_that_has_arrived_is_applied_first(versions: WorkerVersions) -> None:
    old, new = a_root(0), a_root(1, whole=False)
    versions.announced(old, now=0.0)
    versions.planned(old.form, now=0.0)
    versions.arrived(old.form, now=0.0)
    versions.announced(new, now=0.0)
    assert versions.planned(new.form, now=0.0) == []
    assert ApplyForm(new.form) in versions.ready(a_snapshot(old), now=0.0)


def test_a_rejected_form_is_reported_and_tried_again_with_the_next_plan(
    versions: WorkerVersions,
) -> None:
    root = a_root(0)
    versions.announced(root, now=0.0)
    [order] = versions.planned(root.form, now=0.0)
    assert isinstance(order, ApplyForm)
    assert versions.rejected(a_rejection(order), now=0.0) == [
        SendControl(ApplyFailed(root.form, "disk full"))
    ]
    assert versions.planned(root.form, now=0.0) == [ApplyForm(root.form)]


def test_a_form_that_cannot_be_kept_is_given_up(versions: WorkerVersions) -> None:
    root = a_root(0)
    versions.announced(root, now=0.0)
    versions.planned(root.form, now=0.0)
    assert versions.lost(root.form, "disk full", now=0.0) == [
        SendControl(ApplyFailed(root.form, "disk full")),
        DropForm(root.form),
        CancelApply(root.form),
    ]
    assert versions.apply_cancelled(root.form, now=0.0) == []


def test_only_the_newest_forms_are_kept(versions: WorkerVersions) -> None:
    for version in range(WORKER_FORMS_MAX):
        versions.announced(a_root(version), now=0.0)
    assert DropForm(a_root(0).form) in versions.announced(a_root(WORKER_FORMS_MAX), now=0.0)


def test_a_failed_refit_is_repeated_a_few_times(versions: WorkerVersions) -> None:
    serve(versions, 0)
    arrive(versions, 1)
    old = version_label(a_key(0).version, a_key(0).digest)
    for attempt in range(1, REFIT_TRIES_MAX + 1):
        now = attempt * 10 * REFIT_RETRY_S
        [report] = said(versions.refit_failed(a_refit_failure(1, old), now=now), RefitFailed)
        assert isinstance(report, RefitFailed)
        assert report.serving == a_key(0)
        retry = versions.wake_at()
        if attempt < REFIT_TRIES_MAX:
            assert retry is not None
            assert retry - now == REFIT_RETRY_S * 2 ** (attempt - 1)
            assert versions.choose(now=retry) == [an_order(1)]
    assert versions.wake_at() is None
    assert versions.choose(now=1e9) == []


def test_the_refit_to_the_only_version_is_repeated_for_ever(versions: WorkerVersions) -> None:
    """Without a worker that serves it there may never be another one."""
    arrive(versions, 0)
    now, waits = 0.0, []
    for _ in range(3 * REFIT_TRIES_MAX):
        versions.refit_failed(a_refit_failure(0), now=now)
        retry = versions.wake_at()
        assert retry is not None
        assert versions.choose(now=retry - 0.1) == []
        assert versions.choose(now=retry) == [an_order(0)]
        waits.append(retry - now)
        now = retry
    assert waits[:3] == [REFIT_RETRY_S, 2 * REFIT_RETRY_S, 4 * REFIT_RETRY_S]
    assert max(waits) == REFIT_RETRY_S_MAX
    arrive(versions, 1)
    assert an_order(1) in versions.refit_failed(a_refit_failure(0), now=now)
    versions.refitted(a_refit(1), now=now)
    assert versions.serving == a_key(1)


def test_a_refit_in_doubt_serves_nothing(versions: WorkerVersions) -> None:
    serve(versions, 0)
    arrive(versions, 1)
    versions.refit_failed(a_refit_failure(1), now=1.0)
    assert versions.serving is None


def test_a_damaged_slot_is_applied_again_while_the_old_version_is_served(
    versions: WorkerVersions,
) -> None:
    serve(versions, 0)
    arrive(versions, 1, path="other")
    old = version_label(a_key(0).version, a_key(0).digest)
    actions = versions.refit_failed(
        dataclasses.replace(a_refit_failure(1, old), damaged=True), now=1.0
    )
    [report] = said(actions, RefitFailed)
    assert isinstance(report, RefitFailed)
    assert report.serving == a_key(0) == versions.serving
    assert ApplyForm(a_root(1).form) in actions
    assert versions.holding() == (a_key(0),)
    assert an_order(1) in versions.ready(a_snapshot(a_root(1), "slot"), now=2.0)


def test_an_engine_whose_memory_differs_from_the_snapshot_serves_nothing(
    versions: WorkerVersions,
) -> None:
    arrive(versions, 0)
    [report] = said(versions.refitted(a_refit(0, memory_ok=False), now=1.0), RefitFailed)
    assert isinstance(report, RefitFailed)
    assert report.reason == "the engines' memory is not the snapshot"
    assert versions.serving is None


def test_a_version_with_wrong_memory_is_not_served_because_a_retry_was_refused(
    versions: WorkerVersions,
) -> None:
    """The engines still name the version, whose weights the check of their memory refused (I3)."""
    arrive(versions, 0)
    versions.refitted(a_refit(0, memory_ok=False), now=1.0)
    retry_at = versions.wake_at()
    assert retry_at is not None
    assert an_order(0) in versions.choose(now=retry_at)
    key = a_key(0)
    refused = EngineRefitFailed(key.version, key.digest, "busy", version_label(*_parts(key)))
    [report] = said(versions.refit_failed(refused, now=retry_at), RefitFailed)
    assert isinstance(report, RefitFailed)
    assert report.serving is None
    assert versions.serving is None
    assert versions.wake_at() is not None, "it is tried again"


def test_a_revoked_version_is_not_served_until_it_is_published_again(
    versions: WorkerVersions,
) -> None:
    serve(versions, 3)
    [report] = said(versions.revoked(Epoch(2), [a_key(3)], now=1.0), RefitFailed)
    assert isinstance(report, RefitFailed)
    assert (report.reason, versions.serving, versions.holding(), dict(versions.labels)) == (
        "revoked",
        None,
        (),
        {},
    )
    versions.check()
    note, _ = versions.announced(a_root(3, seq=9), now=1.0)
    assert note == WorkerNote("root refused: version 3 of epoch 1 is revoked")
    assert versions.announced(a_root(3, seq=9, epoch=2), now=1.0)[-1] == an_order(3)


def test_a_revoked_version_is_not_applied_again(versions: WorkerVersions) -> None:
    """Told in the epoch that published them (they are forgotten by now), so their forms are not void."""
    for version in range(3):
        serve(versions, version)
    assert versions.revoked(Epoch(1), [a_key(1), a_key(2)], now=1.0)[-1] == ApplyForm(
        a_root(0).form
    )
    assert versions.ready(a_snapshot(a_root(0)), now=1.0)[-1] == an_order(0), (
        "no slot for 2, then for 1, then for 0"
    )
    assert len(versions.refitted(a_refit(0), now=1.0)) == 1


def test_a_version_that_is_revoked_during_its_refit_is_not_served(versions: WorkerVersions) -> None:
    arrive(versions, 3)
    versions.revoked(Epoch(2), [a_key(3)], now=1.0)
    assert versions.refitted(a_refit(3), now=2.0) == []
    assert versions.serving is None


def test_an_older_version_published_again_becomes_the_newest(versions: WorkerVersions) -> None:
    serve(versions, 3)
    assert an_order(2, "b") in arrive(versions, 2, path="b", seq=9, epoch=2)


def test_the_version_in_the_spare_slot_becomes_current_when_it_is_published_again(
    versions: WorkerVersions,
) -> None:
    """Only then is it said to stand: the next delta is made from it, and decoded on what is current."""
    arrive(versions, 4, path="a")
    versions.refitted(a_refit(4), now=0.0)
    arrive(versions, 5, path="b")
    versions.refitted(a_refit(5), now=0.0)
    versions.revoked(Epoch(2), [a_key(5)], now=0.0)
    versions.refitted(a_refit(4), now=0.0)
    assert versions.holding() == (), "the current one is void"
    again = a_root(4, seq=9, epoch=2)
    assert not versions.stands_mostly(again.form)
    actions = versions.announced(again, now=0.0)
    assert versions.stands_mostly(again.form)
    assert actions[-1] == ApplyForm(again.form, a_key(4).digest)
    assert said(actions, VersionVerified) == []
    assert said(versions.ready(a_snapshot(again, "a"), now=0.0), VersionVerified)
    assert versions.holding() == (a_key(5), a_key(4))[1:]


def test_a_relay_peer_reports_forms_and_applies_nothing() -> None:
    versions, root = make(engines=False), a_root(0)
    versions.announced(root, now=0.0)
    assert versions.planned(root.form, now=0.0) == []
    assert said(versions.arrived(root.form, now=0.0), VersionVerified)
    versions.check()


def test_revoking_other_bytes_with_the_same_label_changes_nothing(versions: WorkerVersions) -> None:
    serve(versions, 1)
    twin = VersionKey(Version(1), Digest(a_key(1).digest[:-1] + b"x"))
    versions.revoked(Epoch(2), (twin,), now=0.0)
    assert versions.serving == a_key(1)
    assert a_key(1) in versions.labels.values()


def test_a_version_whose_engine_died_is_loaded_again(versions: WorkerVersions) -> None:
    arrive(versions, 1)
    versions.refitted(a_refit(1), now=0.0)
    [report] = said(versions.engine_lost("it died", now=10.0), RefitFailed)
    assert isinstance(report, RefitFailed)
    assert (report.serving, report.reason) == (None, "it died")
    assert versions.serving is None
    assert versions.engine_lost("noticed again", now=10.0) == []
    assert versions.wake_at() == 10.0 + REFIT_RETRY_S
    assert versions.choose(now=10.0 + REFIT_RETRY_S) == [an_order(1)]
    assert versions.engine_lost("while it is loaded", now=16.0) == [], (
        "the refit under way will tell"
    )


def serve_beside(versions: WorkerVersions, version: int, *held: int) -> list[VersionAction]:
    """The engines load this version and say that they hold these."""
    arrive(versions, version)
    return versions.refitted(a_refit(version, held=(version, *held)), now=0.0)


def held(versions: WorkerVersions) -> list[int]:
    return [key.version for key in versions.held]


def test_engines_hold_the_versions_that_they_are_told_to_hold(versions: WorkerVersions) -> None:
    versions.hold(hold(3))
    serve_beside(versions, 0)
    versions.hold(hold(3, 0))
    assert an_order(1, kept=(0,), most=3) in arrive(versions, 1)
    [done] = said(versions.refitted(a_refit(1, held=(1, 0)), now=0.0), RefitDone)
    assert isinstance(done, RefitDone)
    assert done.held == (a_key(1), a_key(0))
    assert held(versions) == [1, 0]
    versions.hold(hold(3, 0, 1))
    assert an_order(2, kept=(0, 1), most=3) in arrive(versions, 2)
    versions.refitted(a_refit(2, held=(0, 1, 2)), now=0.0)
    assert held(versions) == [2, 1, 0]
    versions.hold(hold(3, 1))
    assert an_order(3, kept=(1,), most=3) in arrive(versions, 3)


def test_a_version_that_an_engine_has_dropped_is_held_no_more(versions: WorkerVersions) -> None:
    versions.hold(hold(3, 0))
    serve_beside(versions, 0)
    serve_beside(versions, 1)  # the base model was loaded again
    assert held(versions) == [1]
    assert an_order(2, most=3) in arrive(versions, 2)


def test_the_first_of_the_versions_are_held_if_there_is_no_room_for_all(
    versions: WorkerVersions,
) -> None:
    versions.hold(hold(WORKER_HELD_MAX, 0, 1, 2))
    serve_beside(versions, 0)
    serve_beside(versions, 1, 0)
    versions.hold(hold(2, 1, 0))
    assert an_order(2, kept=(1,), most=2) in arrive(versions, 2)
    versions.refitted(a_refit(2, held=(2, 1)), now=0.0)
    versions.hold(hold(0, 1))
    assert an_order(3, most=1) in arrive(versions, 3)
    versions.refitted(a_refit(3, held=(3,)), now=0.0)
    versions.hold(hold(1 << 40))
    assert an_order(4, most=WORKER_HELD_MAX) in arrive(versions, 4)


def test_weights_that_failed_the_memory_check_are_not_held(versions: WorkerVersions) -> None:
    versions.hold(hold(3, 0, 1))
    serve_beside(versions, 0)
    arrive(versions, 1)
    versions.refitted(a_refit(1, memory_ok=False), now=0.0)
    assert held(versions) == []
    assert an_order(2, most=3) in arrive(versions, 2)
    versions.refitted(a_refit(2, held=(0, 1, 2)), now=0.0)
    assert held(versions) == [2]


def test_a_refit_that_changes_nothing_leaves_what_is_held(versions: WorkerVersions) -> None:
    versions.hold(hold(3, 0))
    serve_beside(versions, 0)
    serve_beside(versions, 1, 0)
    arrive(versions, 2)
    old = version_label(*a_key(1))
    [report] = said(versions.refit_failed(a_refit_failure(2, old, (0, 1, 2)), now=0.0), RefitFailed)
    assert isinstance(report, RefitFailed)
    assert report.held == (a_key(1), a_key(0))
    assert held(versions) == [1, 0]
    [report] = said(versions.engine_lost("out of memory", now=0.0), RefitFailed)
    assert isinstance(report, RefitFailed)
    assert report.held == ()
    assert held(versions) == []


def test_a_revoked_version_is_not_held(versions: WorkerVersions) -> None:
    versions.hold(hold(3, 0))
    serve_beside(versions, 0)
    serve_beside(versions, 1, 0)
    assert not said(versions.revoked(Epoch(2), [a_key(0)], now=0.0), RefitFailed)
    assert held(versions) == [1]
    assert an_order(2, most=3) in arrive(versions, 2)
    versions.refitted(a_refit(2, held=(0, 1, 2)), now=0.0)
    assert held(versions) == [2, 1]


def test_a_held_version_keeps_its_label_whatever_is_served(versions: WorkerVersions) -> None:
    versions.hold(hold(2, 0))
    serve_beside(versions, 0)
    for version in range(1, LABELS_MAX + 3):
        serve_beside(versions, version, 0)
        versions.check()
    assert versions.labels[version_label(*a_key(0))] == a_key(0)
    assert version_label(*a_key(1)) not in versions.labels
