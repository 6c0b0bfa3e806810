"""Gives a running coordinator orders about workers: cordon, uncordon, drain.

A worker is named as in `echo2d status`, or by the beginning of its id. A coordinator that restarts forgets drains, so
`drain_and_wait` then gives its order again.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from echo2d.client import AsyncCoordinator
from echo2d.core.status.json_form import read_status
from echo2d.core.status.schema import PeerStatus, Status, WorkerStatus
from echo2d.errors import OperatorFault, PeerFault
from echo2d.views.watch import Find

# The coordinator may be away for this long, for example while it restarts.
PATIENCE_S = 60.0
_LOOK_S = 1.0  # seconds between two looks at workers that drain
# The beginning of an id needs at least this many characters.
_ID_CHARS_MIN = 4
_NAMES_MAX = 12  # in an error


async def give_orders(
    find: Find, names: Sequence[str], *, everyone: bool, order: str, hand_over: bool = False
) -> list[dict[str, Any]]:
    """Give one order to each of these workers. Returns the coordinator's answer for each.

    OperatorFault: a name matches no worker or several, or the order is not allowed.
    """
    async with await _client(find) as client:
        status = read_status(await client.status())
        chosen = _choose(status, names, everyone=everyone)
        return [
            {"name": name, **await _order(client, worker, order, hand_over=hand_over)}
            for worker, name in chosen.items()
        ]


async def drain_and_wait(
    find: Find,
    names: Sequence[str],
    *,
    everyone: bool,
    within_s: float | None,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Drain these workers and wait until all have ended. tell: gets a line at every change.

    within_s: after this time the samples that are left go to other workers. Returns for each worker whether it ended
    or its drain was called off.
    """
    loop = asyncio.get_running_loop()
    async with await _client(find) as client:
        chosen = _choose(read_status(await client.status()), names, everyone=everyone)
        hand_over_at = None if within_s is None else loop.time() + within_s
        for worker in chosen:
            await _order(client, worker, "drain", hand_over=within_s == 0.0)
        outcomes: dict[str, str] = {}
        told: dict[str, str] = {}
        seen_at = dict.fromkeys(chosen, loop.time())
        while True:
            peers = _peers(read_status(await client.status()))
            over = hand_over_at is not None and loop.time() >= hand_over_at
            for worker, name in chosen.items():
                if worker in outcomes:
                    continue
                peer = peers.get(worker)
                if peer is not None:
                    seen_at[worker] = loop.time()
                # A coordinator that was restarted knows only the workers that have connected again. A worker that has
                # not connected for 60 s counts as ended.
                elif loop.time() < seen_at[worker] + 60.0:
                    continue
                words, outcome = _progress(peer)
                if outcome:
                    outcomes[worker] = outcome
                elif over or (peer is not None and not peer.draining):
                    await _order(client, worker, "drain", hand_over=over)
                if told.get(worker) != words:
                    told[worker] = words
                    tell(f"{name}: {words}")
            hand_over_at = None if over else hand_over_at
            if len(outcomes) == len(chosen):
                return [
                    {"id": worker, "name": chosen[worker], "outcome": outcome}
                    for worker, outcome in outcomes.items()
                ]
            await asyncio.sleep(_LOOK_S)


def _progress(peer: PeerStatus | None) -> tuple[str, str]:
    """A line about a draining worker, and the outcome of its drain; the outcome is empty while the drain goes on."""
    if peer is None or peer.state == "gone":
        return "ended", "ended"
    if not peer.cordoned:
        return "the drain was called off", "called off"
    held = peer.leased if isinstance(peer, WorkerStatus) else 0
    words = f"{held} samples left" if held else "holds nothing, and is told to end"
    return (words if peer.alive else f"away, {words}"), ""


async def _order(
    client: AsyncCoordinator, worker: str, order: str, *, hand_over: bool
) -> dict[str, Any]:
    try:
        return await client.order_worker(worker, order, hand_over=hand_over)
    except PeerFault as fault:
        # The worker does not exist, or the token has another role: the operator made a mistake.
        raise OperatorFault(str(fault)) from fault


async def _client(find: Find) -> AsyncCoordinator:
    url, token_file = await asyncio.to_thread(find)
    return AsyncCoordinator(url, token_file=token_file, timeout_s=PATIENCE_S)


def _peers(status: Status) -> dict[str, PeerStatus]:
    return {peer.id: peer for peer in (*status.workers, *status.relays)}


def _choose(status: Status, names: Sequence[str], *, everyone: bool) -> dict[str, str]:
    """The chosen peers: id -> name."""
    if everyone == bool(names):
        raise OperatorFault("expected the names of workers, or --all")
    peers = _peers(status)
    if everyone:
        chosen = [peer for peer in status.workers if peer.state != "gone"]
        if not chosen:
            raise OperatorFault("no worker is connected")
        return {peer.id: peer.name for peer in chosen}
    return dict(_find(list(peers.values()), name) for name in names)


def _find(peers: Sequence[PeerStatus], name: str) -> tuple[str, str]:
    found = [peer for peer in peers if peer.name == name]
    if not found and len(name) >= _ID_CHARS_MIN:
        found = [peer for peer in peers if peer.id.startswith(name)]
    # A new box often has the name of a box that is gone, so workers that are not gone take precedence.
    here = [peer for peer in found if peer.state != "gone"] or found
    if len(here) == 1:
        return here[0].id, here[0].name
    if here:
        ids = ", ".join(peer.id[:12] for peer in here[:_NAMES_MAX])
        raise OperatorFault(f"{len(here)} workers are named {name}; name one by its id: {ids}")
    if len(name) == 32:
        # A worker that is not connected is known to the coordinator only by its full id.
        return name, name
    there = ", ".join(peer.name for peer in peers[:_NAMES_MAX]) or "none"
    raise OperatorFault(f"no worker is named {name}, and no id begins so; there are: {there}")
