"""The alerts about the disk, the tokens and the config of a coordinator, as sentences for people."""

from dataclasses import replace

from echo2d.core.coordinator.process_alerts import BUILDS_MAX, DAY_S, FREE_MIN, process_alerts
from echo2d.core.status.schema import (
    Alert,
    DiskStatus,
    OtherBuildStatus,
    ProcessStatus,
    RefusedPeerStatus,
    RunFacts,
    Status,
    TokenExpiry,
    VersionBytes,
)
from tests.support.coordinator_world import World

GB = 10**9
PROCESS = ProcessStatus(
    run_id="run-1", peer_faults=0, learner_silent_s=None, disk=DiskStatus(100 * GB, 200 * GB)
)


def status(version_bytes: int = 16 * GB) -> Status:
    return replace(
        World().state.status(),
        version_bytes={3: VersionBytes(GB, version_bytes), 4: VersionBytes(1, 1)},
    )


def sentences(process: ProcessStatus, of: Status | None = None) -> list[tuple[str, str]]:
    found = process_alerts(status() if of is None else of, process)
    return [(alert.kind, alert.sentence) for alert in found]


def test_a_healthy_process_has_no_alert() -> None:
    assert sentences(PROCESS) == []
    assert sentences(replace(PROCESS, disk=None)) == []


def test_a_disk_without_room_for_two_versions_raises_an_alert() -> None:
    ((kind, words),) = sentences(replace(PROCESS, disk=DiskStatus(31 * GB, 200 * GB)))
    assert kind == "disk_low"
    assert words.startswith("the coordinator's disk has 31.0 GB left, and 32.0 should be free")
    small = replace(PROCESS, disk=DiskStatus(FREE_MIN - 1, 200 * GB))
    assert [kind for kind, _ in sentences(small, status(1000))] == ["disk_low"]
    enough = replace(PROCESS, disk=DiskStatus(FREE_MIN, 200 * GB))
    assert sentences(enough, status(1000)) == []


def test_a_disk_budget_without_room_for_three_versions_raises_an_alert() -> None:
    ((kind, words),) = sentences(replace(PROCESS, disk=DiskStatus(100 * GB, 47 * GB)))
    assert kind == "disk_budget"
    assert words.startswith(
        "run.disk_bytes_max = 47000000000 has no room for 3 versions of 16.0 GB"
    )


def test_tokens_that_expire_within_a_week_raise_an_alert() -> None:
    box, learner = (
        TokenExpiry("box-1", "worker", 3 * DAY_S),
        TokenExpiry("trainer", "learner", DAY_S),
    )
    boxes = (replace(box, name="box-2", left_s=6 * DAY_S), box)
    (of_boxes, of_learner) = sentences(replace(PROCESS, expiring_tokens=(*boxes, learner)))
    assert of_boxes[0] == "token_expires"
    assert of_boxes[1] == (
        "token box-1 expires in 3 days (and 1 more token within a week): new boxes cannot enrol with "
        "it after that, enrolled boxes stay; `echo2d token change --expires` gives it more time"
    )
    assert of_learner[1].startswith("token trainer expires in 24 hours: calls with it are refused")


def test_an_expired_token_is_still_named() -> None:
    expired = TokenExpiry("trainer", "learner", -5 * 3600.0)
    ((_, words),) = sentences(replace(PROCESS, expiring_tokens=(expired,)))
    assert words == (
        "token trainer expired 5 hours ago: calls with it are refused after that; "
        "`echo2d token change --expires` gives it more time"
    )


def test_alerts_name_changes_since_the_last_start() -> None:
    run = RunFacts(changes=("tasks changed since the last start, from a (rows) to b (rows)",))
    ((kind, words),) = sentences(replace(PROCESS, run=run))
    assert kind == "run_changed"
    assert words == (
        "tasks changed since the last start, from a (rows) to b (rows). If that was a mistake, put the "
        "old value back and restart; the next start ends this alert"
    )


def test_a_refused_peer_is_named() -> None:
    refused = RefusedPeerStatus("a" * 32, "bomber", 540.0, "box-9", 3)
    (alert,) = process_alerts(status(), replace(PROCESS, refused_peers=(refused,)))
    assert alert == Alert(
        "peer_refused",
        f"bomber ({'a' * 32}) broke the protocol again and again: it is refused for 540 s more; "
        "`echo2d token revoke box-9` ends its access, and that of 2 more of this token",
        "bomber",
        "a" * 32,
    )


def strangers(peers: list[OtherBuildStatus], total: int) -> list[Alert]:
    process = replace(
        PROCESS, build="0.1.0", protocol=9, other_builds=tuple(peers), other_builds_total=total
    )
    return list(process_alerts(status(), process))


def test_peers_of_other_builds_are_named_by_their_build() -> None:
    peers = [OtherBuildStatus(f"id{n}", f"gpu-{n}", "0.9.1", 12) for n in range(7, 12)]
    assert strangers(peers[:1], 1) == [
        Alert(
            "peer_build",
            "gpu-7 is of another build: echo2d 0.9.1 (control protocol 12), which this coordinator, "
            "echo2d 0.1.0 (control protocol 9), does not understand; install echo2d 0.1.0 there",
            "gpu-7",
            "id7",
        )
    ]
    [many] = strangers(peers, 5)
    assert many.sentence.startswith(
        "gpu-7, gpu-8, gpu-9 and 2 more are of another build: echo2d 0.9.1"
    )


def test_the_alert_about_many_invented_builds_stays_short() -> None:
    peers = [OtherBuildStatus(f"id{n}", "", f"0.{n}", 12) for n in range(50)]
    told = strangers(peers, 60)
    assert len(told) == BUILDS_MAX + 1
    assert told[0].sentence.startswith("id0 is of another build")
    assert told[-1].sentence == "and 57 more peers are of other builds"
