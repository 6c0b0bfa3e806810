"""A real coordinator for a browser to look at: its shell, its HTTP and its page, around a core whose run a
test has made.

    with site(tmp_path, world) as made:
        made.change(lambda: world.connect("late"))

It serves in a thread of its own, and only that thread uses the world. Deadlines do not pass.
"""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2d.core.cluster.step_history import StepSummary
from echo2d.core.coordinator.events import (
    CoordinatorAction,
    CoordinatorEvent,
    EvaluationsAsked,
)
from echo2d.core.coordinator.glance import Glance, TreeView
from echo2d.core.status.schema import Status
from echo2d.runtime.coordinator.main import Opened
from echo2d.runtime.coordinator.run_history import COLUMNS, HISTORY_LOG
from echo2d.store.json_log import _with_sum
from tests.support.coordinator_world import World
from tests.support.polling import START_S
from tests.support.scripted_core import Script, make_config, serving


class ShownRun(Script):
    """The core of a run that a test has made; events of the coordinator change nothing."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def handle(self, event: CoordinatorEvent, *, now: float) -> list[CoordinatorAction]:
        if isinstance(event, EvaluationsAsked):
            return self.world.state.handle(event, now=self.world.now)
        return super().handle(event, now=now)

    def status(self, *, now: float) -> Status:
        return self.world.state.status(now=self.world.now)

    def glance(self) -> Glance:
        return self.world.state.glance()

    def tree(self, stripe: int) -> TreeView | None:
        return self.world.state.tree(stripe)

    def step_summary(self, step: int) -> StepSummary | None:
        return self.world.state.step_summary(step)


@dataclass(slots=True)
class PageSite:
    url: str
    run_dir: Path
    opened: Opened
    _loop: asyncio.AbstractEventLoop

    def secret(self, token: str = "viewer") -> str:
        found: str = json.loads((self.run_dir / "tokens" / f"{token}.token").read_text())["secret"]
        return found

    def knows(self, token: str) -> bool:
        """Whether the coordinator has read the access table since this token was made."""
        headers = {"Authorization": f"Bearer {self.secret(token)}"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{self.url}/v1/live", headers=headers)
            ):
                return True
        except urllib.error.HTTPError:
            return False

    def change(self, do: Callable[[], Any]) -> None:
        """Do this in the thread of the coordinator's loop."""

        async def doing() -> None:
            do()

        asyncio.run_coroutine_threadsafe(doing(), self._loop).result(START_S)


@contextmanager
def site(
    tmp_path: Path,
    world: World,
    *,
    steps: Sequence[Mapping[str, Any]] = (),
    samples: Sequence[Mapping[str, Any]] = (),
    **changes: Any,
) -> Iterator[PageSite]:
    """steps: lines of the history; columns that they lack are null. samples: lines of the sample log."""
    config = make_config(tmp_path, **changes)
    config.run.run_dir.mkdir(mode=0o700, exist_ok=True)
    lines = [_with_sum(json.dumps({**dict.fromkeys(COLUMNS), **step})) for step in steps]
    (config.run.run_dir / f"{HISTORY_LOG}.jsonl").write_bytes(
        b"".join(b"%s\n" % each for each in lines)
    )
    ready, ends, found = threading.Event(), threading.Event(), list[PageSite]()

    async def serve() -> None:
        async with serving(config, lambda *_: ShownRun(world)) as opened:
            if samples:
                log = opened.coordinator._journals._samples
                assert log is not None
                log.shown.add(samples)
            found.append(
                PageSite(opened.url, config.run.run_dir, opened, asyncio.get_running_loop())
            )
            ready.set()
            await asyncio.to_thread(ends.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="coordinator")
    thread.start()
    try:
        assert ready.wait(START_S), "the coordinator does not start"
        yield found[0]
    finally:
        ends.set()
        thread.join()
