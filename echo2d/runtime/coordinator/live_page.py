"""Answers the dashboard, which asks every two seconds, at little cost to the event loop.

    {"role", "seen", "status_age_s", "now", "tree", "status"}

`role` is the caller's role. `now` is a `Glance`, made for each answer. `tree` is sent if the caller names
another plan than the present one. `status` is most of the run's `Status`, with the workers as a table of
columns and rows. A caller gets each status only once (`seen`). Making a status takes tens of microseconds
per worker. So it is made only as often as fits into PAGE_SHARE_MAX of the loop's time, and at least every
STATUS_AGE_S_MAX; with a few workers it is made for each answer.
"""

import dataclasses
import json
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.capacity.estimators import quantile
from echo2d.core.coordinator.glance import Glance, TreeView
from echo2d.core.status.json_form import plain, status_json
from echo2d.core.status.schema import Status, VersionStatus, WorkerStatus
from echo2d.net.security.auth import Role

# Making the status takes at most this share of the loop's time: 60 ms a minute.
PAGE_SHARE_MAX = 0.001
# The status has the alerts, so it must not be older than this. With a thousand workers that takes 0.2 % of the time.
STATUS_AGE_S_MAX = 20.0
# Lists of measurements. A page shows their median, 95th percentile and newest value.
DURATIONS = ("t_train_s", "t_verify_s", "t_bcast_s", "refit_pause_s", "recompute_s", "still_s")
WORKER_COLUMNS = tuple(field.name for field in dataclasses.fields(WorkerStatus))
_worker_row = operator.attrgetter(*WORKER_COLUMNS)


class PageMachine(Protocol):
    """What the page needs of the core."""

    def glance(self) -> Glance: ...

    def tree(self, stripe: int) -> TreeView | None: ...


class LivePage:
    """See the module docstring. look: makes the whole status. clock: monotonic seconds; cpu: seconds
    of this thread's CPU."""

    def __init__(
        self,
        machine: PageMachine,
        look: Callable[[], Status],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._machine, self._look = machine, look
        self._clock, self._cpu = clock, cpu
        self._status = b""
        self._made_at = self._lasts_until = -1.0
        self._took_s = 0.0
        # The number of the newest status. It begins at the present time, so that a page from before a restart
        # names another number.
        self._number = time.time_ns() // 1_000_000
        self._trees: dict[tuple[str, int], bytes] = {}
        # The plan whose tree was made last, and the number of its trees (one per stripe).
        self._plan, self._stripes = "", 0

    def answer(self, role: Role, *, seen: int, plan: str, stripe: int) -> bytes:
        """role: the caller's role. seen: the number of the status that the caller has. plan, stripe: the
        tree that the caller shows."""
        now, glance = self._clock(), self._machine.glance()
        if now >= self._lasts_until:
            self._make(now)
        head = {
            "role": role,
            "seen": self._number,
            "status_age_s": round(now - self._made_at, 1),
            "now": plain(glance),
        }
        parts = [json.dumps(head, separators=(",", ":")).encode()[:-1]]
        if glance.spread is not None and glance.spread.plan != plan:
            parts += [b',"tree":', self._tree(glance.spread.plan, stripe)]
        if seen != self._number:
            parts += [b',"status":', self._status]
        return b"".join([*parts, b"}"])

    def _make(self, now: float) -> None:
        began = self._cpu()
        self._status = page_status(self._look())
        self._number += 1
        self._made_at = now
        before_s, self._took_s = self._took_s, self._cpu() - began
        # The first status takes long, and on a busy machine any status may. So the cheaper of the last two counts.
        cost_s = min(before_s, self._took_s)
        self._lasts_until = now + min(cost_s / PAGE_SHARE_MAX, STATUS_AGE_S_MAX)

    def _tree(self, plan: str, stripe: int) -> bytes:
        # Callers may name any stripe; a number beyond the last stripe means the first tree.
        if plan == self._plan and stripe >= self._stripes:
            stripe = 0
        found = self._trees.get((plan, stripe))
        if found is None:
            tree = self._machine.tree(stripe)
            if tree is not None:
                self._plan, self._stripes, stripe = plan, len(tree.weights), tree.stripe
            found = json.dumps(None if tree is None else plain(tree)).encode()
            self._trees[plan, stripe] = found
            # Keep the bytes of 8 trees, because a few callers look at different stripes.
            keep_newest(self._trees, 8)
        return found


def page_status(status: Status) -> bytes:
    """The JSON of a status for the page."""
    found = status_json(
        dataclasses.replace(
            status,
            workers=(),
            broadcast=None
            if status.broadcast is None
            else dataclasses.replace(status.broadcast, peers=()),
            rewards=(),
        )
    )
    for name in DURATIONS:
        found[name] = _durations(getattr(status, name))
    found["workers"] = {
        "columns": WORKER_COLUMNS,
        "rows": [_worker_row(worker) for worker in status.workers],
    }
    return json.dumps(found, separators=(",", ":"), default=_cell).encode()


def _durations(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": quantile(values, 0.5),
        "p95": quantile(values, 0.95),
        "newest": values[-1] if values else None,
    }


def _cell(value: Any) -> Any:
    """The cell of a row for a value that JSON does not know."""
    return value.version if isinstance(value, VersionStatus) else plain(value)
