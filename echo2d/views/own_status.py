"""Draws what the owner of some boxes may see of a run: these boxes, and the run's progress.

The module draws an `OwnStatus` (`core/status/schema.py`). Names come from other machines and are shown as text, never
as markup.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo2d.core.status.json_form import read_own_status
from echo2d.core.status.schema import OwnPeerStatus, OwnStatus
from echo2d.views.status import COLOURS, bar, per_h, plain_console, size, state_word

_COLUMNS = (
    "box",
    "state",
    "serves",
    "lag",
    "running",
    "accepted",
    "trained",
    "used",
    "per h",
    "uplink",
    "usd/h",
    "usd",
)


def is_own(facts: Mapping[str, Any]) -> bool:
    """Whether these facts are an `OwnStatus`, not a `Status`."""
    return "absent" in facts


def print_own_status(facts: Mapping[str, Any]) -> None:
    """Print the answer of `GET /v1/status/own`. PeerFault: facts is not an answer of that endpoint."""
    plain_console().print(own_picture(read_own_status(facts)))


def own_picture(status: OwnStatus) -> RenderableType:
    newest = status.newest_version
    version = "no version" if newest is None else f"version {newest.version}"
    head = Text.assemble(
        ("echo2d ", "bold"),
        f"run {status.run_id}: step {status.committed_step} committed, {version} published",
    )
    parts: list[RenderableType] = [head, Text(), _table(status)]
    if status.peers:
        parts.append(Text(f"  {_sums(status.peers)}"))
    if status.peers or status.absent:
        earned = status.earned
        parts.append(
            Text(
                f"  since the run began: {earned.accepted_trajectories:,} trajectories accepted, "
                f"{earned.trained_trajectories:,} trained, {size(earned.sent_bytes)} passed on"
            )
        )
    for peer in status.peers:
        parts += [Text.assemble(("  ! ", "bold yellow"), words) for words in _sentences(peer)]
    parts += [
        Text(f"  {peer} enrolled earlier, but has not connected since the coordinator started")
        for peer in status.absent
        if peer not in status.convicted
    ]
    parts += [
        Text(f"  ! {peer} is convicted by the run's audit: it gets no leases; ask the operator")
        for peer in status.convicted
    ]
    if not (status.peers or status.absent):
        parts.append(Text("  no box has enrolled with this token yet"))
    return Group(*parts)


def _sums(peers: Sequence[OwnPeerStatus]) -> str:
    received, sent = (
        sum(peer.received_bytes for peer in peers),
        sum(peer.sent_bytes for peer in peers),
    )
    usd = sum(peer.cost_usd for peer in peers)
    earned = f", and {usd:.2f} usd" if usd else ""
    return (
        f"since the coordinator started: {size(received)} received, {size(sent)} passed on{earned}"
    )


def _sentences(peer: OwnPeerStatus) -> list[str]:
    return [f"{peer.name} {words}" for words in peer.attention]


def _table(status: OwnStatus) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(
            name, justify="left" if name in {"box", "state"} else "right", no_wrap=True
        )
    spreading = status.spreading_version
    table.add_column("" if spreading is None else f"gets v{spreading}", no_wrap=True)
    for peer in status.peers:
        table.add_row(*_cells(peer), _arrival(peer, status))
    return table


def _cells(peer: OwnPeerStatus) -> list[Text]:
    word = state_word(peer)
    colour = COLOURS.get(peer.state, "green") if peer.alive else COLOURS["suspected"]
    more = ", not dialable" if peer.reachable is False else ""
    rate = "-" if peer.mu is None or peer.state == "gone" else per_h(peer.mu)
    return [
        Text.assemble(("● ", colour), peer.name),
        Text(word + more, style=colour),
        Text("-" if peer.serving is None else f"v{peer.serving.version}"),
        Text("-" if peer.lag is None else str(peer.lag)),
        Text(f"{peer.running}/{peer.slots}"),
        Text(f"{peer.accepted:,}"),
        Text(f"{peer.trained:,}"),
        Text(f"{peer.used:.0%}"),
        Text(rate),
        Text("-" if peer.uplink is None else f"{size(peer.uplink)}/s"),
        Text(f"{peer.usd_per_h:.2f}" if peer.usd_per_h else "-"),
        Text(f"{peer.cost_usd:.2f}" if peer.cost_usd else "-"),
    ]


def _arrival(peer: OwnPeerStatus, status: OwnStatus) -> Text:
    total = status.spreading_bytes
    if status.spreading_version is None or (total is None and not peer.verified):
        return Text(f"{size(peer.payload_bytes)}" if peer.payload_bytes else "")
    share = 1.0 if peer.verified else min(1.0, peer.payload_bytes / (total or 1))
    return Text.assemble(
        (bar(share, 1.0, 10), "green" if peer.verified else "cyan"), f" {share:4.0%}"
    )
