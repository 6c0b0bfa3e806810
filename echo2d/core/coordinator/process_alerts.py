"""The alerts about what only the coordinator's process knows: its disk, its tokens, its config.

Like `alerts`, it reads a `Status` and decides nothing.
"""

from collections.abc import Iterator, Sequence

from echo2d.core.coordinator.alerts import largest_version_bytes
from echo2d.core.protocol.builds import Build, called, to_install
from echo2d.core.status.schema import (
    Alert,
    DiskStatus,
    OtherBuildStatus,
    ProcessStatus,
    RefusedPeerStatus,
    Status,
    TokenExpiry,
)

# The ledger and the logs of a run need at least this many bytes.
FREE_MIN = 1 << 30
# The disk needs room for this many versions: one spreads, the next is published, and a third is
# uploaded.
VERSIONS_ROOM = 3
DAY_S = 86400.0
# At most this many builds get a sentence of their own, with at most this many names.
BUILDS_MAX = 3
_NAMES_MAX = 3


def process_alerts(status: Status, process: ProcessStatus) -> Iterator[Alert]:
    """The alerts about the run, then those about peers."""
    for words in process.run.changes:
        yield Alert(
            "run_changed",
            f"{words}. If that was a mistake, put the old value back and restart; the next start ends "
            "this alert",
        )
    if process.disk is not None:
        yield from _of_the_disk(process.disk, largest_version_bytes(status))
    yield from _of_tokens(process.expiring_tokens)
    if process.renting is not None:
        yield from process.renting.alerts
    ours = Build(process.protocol, process.protocol, process.build)
    yield from _of_other_builds(process.other_builds, process.other_builds_total, ours)
    yield from map(_refused, process.refused_peers)


def _of_the_disk(disk: DiskStatus, version_bytes: int) -> Iterator[Alert]:
    needed = max(FREE_MIN, 2 * version_bytes)
    if disk.free_bytes < needed:
        yield Alert(
            "disk_low",
            f"the coordinator's disk has {_gb(disk.free_bytes)} GB left, and {_gb(needed)} should be free: "
            "when it is full, the coordinator ends; make room, or lower run.disk_bytes_max",
        )
    if version_bytes * VERSIONS_ROOM > disk.bytes_max:
        yield Alert(
            "disk_budget",
            f"run.disk_bytes_max = {disk.bytes_max} has no room for {VERSIONS_ROOM} versions of "
            f"{_gb(version_bytes)} GB: a publish or an upload may be refused; raise it",
        )


def _of_tokens(expiring: Sequence[TokenExpiry]) -> Iterator[Alert]:
    """One sentence about workers' tokens, and one about all others."""
    boxes = [each for each in expiring if each.role == "worker"]
    callers = [each for each in expiring if each.role != "worker"]
    for found, then in (
        (boxes, "new boxes cannot enrol with it after that, enrolled boxes stay"),
        (callers, "calls with it are refused after that"),
    ):
        if found:
            remedy = "`echo2d token change --expires` gives it more time"
            yield Alert("token_expires", f"{_soon(found)}: {then}; {remedy}")


def _soon(expiring: Sequence[TokenExpiry]) -> str:
    first = min(expiring, key=lambda each: each.left_s)
    more = len(expiring) - 1
    others = (
        f" (and {more} more {'token' if more == 1 else 'tokens'} within a week)" if more else ""
    )
    apart_s = abs(first.left_s)
    apart = f"{apart_s / DAY_S:.0f} days" if apart_s > 2 * DAY_S else _hours(apart_s)
    when = f"expires in {apart}" if first.left_s > 0 else f"expired {apart} ago"
    return f"token {first.name} {when}{others}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.0f} hours"


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f}"


def _refused(refused: RefusedPeerStatus) -> Alert:
    name = f"{refused.name} ({refused.id})" if refused.name else f"peer {refused.id}"
    others = refused.token_peers - 1
    revoke = f"echo2d token revoke {refused.token}".rstrip()
    more = f", and that of {others} more of this token" if others > 0 else ""
    return Alert(
        "peer_refused",
        f"{name} broke the protocol again and again: it is refused for {refused.refused_s:.0f} s more; "
        f"`{revoke}` ends its access{more}",
        refused.name or refused.id,
        refused.id,
    )


def _of_other_builds(peers: Sequence[OtherBuildStatus], total: int, ours: Build) -> Iterator[Alert]:
    """Name the peers that are refused because of their build. total: how many there are."""
    by_build: dict[tuple[str, int], list[str]] = {}
    ids: dict[str, str] = {}
    for peer in peers:
        name = peer.name or peer.id
        by_build.setdefault((peer.build, peer.protocol), []).append(name)
        ids[name] = peer.id
    largest = sorted(by_build.items(), key=lambda item: -len(item[1]))[:BUILDS_MAX]
    told = sum(len(names) for _, names in largest)
    for (build, protocol), names in largest:
        more = len(names) - _NAMES_MAX
        who = ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
        sentence = (
            f"{who} {'is' if len(names) == 1 else 'are'} of another build: "
            f"{called(Build(protocol, protocol, build))}, which this coordinator, {called(ours)}, "
            f"does not understand; install {to_install(ours, on_a_box=True)} there"
        )
        one = names[0] if len(names) == 1 else ""
        yield Alert("peer_build", sentence, one, ids.get(one, ""))
    if total > told:
        yield Alert("peer_build", f"and {total - told} more peers are of other builds")
