"""What a person who looks at a run should know: its status in plain words, the gravest first.

Reads a status (`status`), decides nothing. Empty when all is well.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from echo2d.core.cluster.membership import GONE_S

SENTENCES_MAX = 24  # a screen; what 500 silent workers have to say, one of them says
BROADCASTS_MIN = (
    16  # before it is said that they take too long: the first one is in full, and others may be
)
HEARTBEATS_LATE = 2  # so many missed are worth a word; one more, and the peer is suspected


def alerts(status: Mapping[str, Any]) -> list[str]:
    """One sentence each."""
    sentences = [*_of_the_run(status), *_of_workers(status)]
    more = len(sentences) - SENTENCES_MAX
    return sentences if more <= 0 else [*sentences[:SENTENCES_MAX], f"and {more} more like these"]


def _of_the_run(status: Mapping[str, Any]) -> Iterator[str]:
    if not status["epoch"]:
        yield "no learner has opened a session"
    if not status["seed_alive"]:
        yield "the seed is away: versions spread only from worker to worker until it is back"
    if not any(worker["alive"] for worker in status["workers"]):
        yield "no worker is here: nothing is generated"
    if status["dissemination_bound"] and len(status["t_bcast_s"]) > BROADCASTS_MIN:
        steps = status["staleness_max"] + 1
        yield f"a broadcast takes longer than S + 1 = {steps} train steps: the learner waits for data"


def _of_workers(status: Mapping[str, Any]) -> Iterator[str]:
    """Silence first: it costs leases."""
    workers = [
        worker
        for worker in status["workers"]
        if worker["state"] != "gone" and not _went_as_told(worker)
    ]
    silent = [worker for worker in workers if _silent(worker, status)]
    for worker in sorted(silent, key=lambda worker: (-worker["leases"], -worker["silent_s"])):
        yield f"{worker['name']} silent for {worker['silent_s']:.0f} s: {_consequence(worker)}"
    for worker in workers:
        if not _silent(worker, status):
            yield from (f"{worker['name']} {words}" for words in _of_one(worker, status))
    broadcast = status["broadcast"]
    for peer in broadcast["peers"] if broadcast else ():
        if peer["failed"]:
            yield f"{peer['name']} could not apply version {broadcast['version']}; it tries again"


def _went_as_told(worker: Mapping[str, Any]) -> bool:
    return worker["leaving"] and not worker["alive"] and not worker["leases"]


def _silent(worker: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    return not worker["alive"] or worker["silent_s"] > HEARTBEATS_LATE * status["heartbeat_s"]


def _consequence(worker: Mapping[str, Any]) -> str:
    leases, wait_s = worker["leases"], worker["leases_end_s"]
    if leases:
        theirs = "its lease goes" if leases == 1 else f"its {leases} leases go"
        return f"{theirs} to others in {max(0.0, wait_s):.0f} s"
    return f"it has no leases, and is given up at {GONE_S:.0f} s"


def _of_one(worker: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[str]:
    serving = worker["serving"]
    if worker["quarantined"]:
        yield "is quarantined: frames that it passed on were bad, so it only receives"
    if serving is None and status["newest_version"] is not None:
        yield "serves no version yet"
    if serving is not None and worker["lag"] > status["staleness_max"]:
        yield f"serves version {serving['version']}, {worker['lag']} behind the newest: too old for new leases"
    if worker["memory_ok"] is False:
        yield "has weights in its engine's memory that are not those of its version"
