"""Waits for a run whose workers start inference servers."""

import json
import time
from collections.abc import Callable
from typing import Any

from echo2d.client import Coordinator
from echo2d.demo.processes import Programs

ROUND_S = 500.0  # servers start in half a minute on a machine that does nothing else


def until_done(
    programs: Programs, coordinator: Coordinator, done: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    deadline = time.monotonic() + ROUND_S
    while True:
        facts = coordinator.status()
        programs.check()
        if done(facts):
            return facts
        assert time.monotonic() < deadline, json.dumps(facts)
        time.sleep(0.5)
