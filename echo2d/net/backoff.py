"""How long an attempt to connect may take, and how long to wait before the next one."""

import random

CONNECT_TIMEOUT_S = 10.0
BACKOFF_S_MIN = 0.25
# Leases are kept for this long; a worker that returns later has lost them anyway.
BACKOFF_S_MAX = 15.0

# Logged once, when each of a coordinator's URLs was tried and none has answered.
NO_COORDINATOR = "no coordinator answers at %s yet: start `echo2d run` or `echo2d coordinate` there; trying again"


class Backoff:
    """Exponential backoff: the limit doubles, and a wait is drawn from its upper half."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_s(self) -> float:
        delay_s = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return delay_s * self._rng.uniform(0.5, 1.0)
