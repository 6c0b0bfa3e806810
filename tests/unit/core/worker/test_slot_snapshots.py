"""The snapshots in the slots: the last written one is current, and a missing one is not published."""

from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import PublishSeq, Version
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.worker.events import Standing
from echo2d.core.worker.slot_snapshots import SlotSnapshots

OLD, NEW, NEXT = KEYS = tuple(
    VersionKey(Version(each), digest_of(b"%d" % each)) for each in range(3)
)


def both_slots() -> SlotSnapshots:
    snapshots = SlotSnapshots([Standing(OLD, "a"), Standing(NEW, "b")])
    for seq, key in enumerate((OLD, NEW)):
        snapshots.publish(key, PublishSeq(seq))
    return snapshots


def test_the_spare_slot_is_written_and_the_current_one_stays() -> None:
    snapshots = both_slots()
    assert (snapshots.current, snapshots.path(OLD)) == (NEW, "a")
    snapshots.lose_spare()
    assert (list(snapshots), dict(snapshots.published)) == ([NEW], {NEW: 1})
    snapshots.put(NEXT, "a")
    assert (list(snapshots), snapshots.current, snapshots.path(NEXT)) == ([NEW, NEXT], NEXT, "a")
    snapshots.put(NEW, "b")
    assert (snapshots.current, dict(snapshots.published)) == (NEW, {NEW: 1})


def test_a_snapshot_in_no_slot_is_not_published_and_an_older_publish_changes_nothing() -> None:
    snapshots = both_slots()
    snapshots.publish(NEXT, PublishSeq(2))
    snapshots.publish(NEW, PublishSeq(0))
    assert dict(snapshots.published) == {OLD: 0, NEW: 1}
    snapshots.revoke(OLD)
    assert (list(snapshots), dict(snapshots.published)) == ([OLD, NEW], {NEW: 1})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "publish", "revoke", "lose", "spare"]),
            st.sampled_from(KEYS),
            st.sampled_from("ab"),
        )
    )
)
def test_only_a_snapshot_in_a_slot_is_published_after_any_events(
    events: list[tuple[str, VersionKey, str]],
) -> None:
    snapshots = SlotSnapshots([])
    for what, key, path in events:
        match what:
            case "put":
                snapshots.put(key, path)
            case "publish":
                snapshots.publish(key, PublishSeq(1))
            case "revoke":
                snapshots.revoke(key)
            case "lose":
                snapshots.lose(key)
            case _:
                snapshots.lose_spare()
        snapshots.check()
