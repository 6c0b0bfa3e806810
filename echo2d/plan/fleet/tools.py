"""The environment of a simulated fleet: each episode has the same number of turns, with a tool's time between them.

While a tool works, its sample holds no slot. The module counts three things: the share of slots that are leased; the
episodes that wait for a tool; and the prefix tokens that a worker must read again, because another worker or another
version wrote the turn before.
"""

import random
from collections.abc import Callable

from echo2d.core.base.ids import GroupId, PeerId
from echo2d.core.protocol.control_messages import LeaseGranted, VersionKey
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.rules.tasks import EpisodeRules
from echo2d.core.work.events import EnvironmentStepped, EpisodeEnded, StepEnvironment
from echo2d.plan.fleet.spec import SimulateTable

GIVEN_TOKENS = 1
_GIVEN = pack_tokens([2] * GIVEN_TOKENS)
ToolAnswer = EnvironmentStepped | EpisodeEnded


class FleetTools:
    """See the module docstring. tokens_max: the limit of tokens of one turn."""

    def __init__(self, simulate: SimulateTable, chance: random.Random, tokens_max: int) -> None:
        self._turns, self._tool_s, self._sigma = (
            simulate.turns,
            simulate.tool_s,
            simulate.tool_sigma,
        )
        self._chance = chance
        self._tokens_max = tokens_max
        self.waiting = 0  # episodes that wait for a tool
        # For each sample, the worker and the version that wrote its last turn.
        self._last: dict[tuple[GroupId, int], tuple[PeerId, VersionKey | None]] = {}
        self._at, self._free_s, self._leased_s, self._waiting_s = 0.0, 0.0, 0.0, 0.0
        # How many turns could go back to the worker that wrote the turn before, and how many did.
        self.could_stay = self.stayed = 0
        # How many prompt tokens workers read, and how many they would read with a perfect cache.
        self.read = self.ideal = 0

    @property
    def rules(self) -> EpisodeRules | None:
        """None: samples are single answers."""
        if self._turns == 1:
            return None
        return EpisodeRules(self._turns, self._turns * (self._tokens_max + 1))

    def begins(
        self, granted: LeaseGranted, worker: PeerId, serving: Callable[[PeerId], VersionKey | None]
    ) -> bool:
        """Count a lease that a worker begins. Returns whether the worker has cached the earlier turns.

        serving: gives the version that a worker serves.
        """
        length = len(granted.prompt) // 4
        hit = could_stay = False
        for sample in granted.samples:
            at = granted.group, sample
            here = worker, serving(worker)
            if granted.earlier and not granted.written:
                last = self._last[at]
                could_stay = serving(last[0]) == last[1]
                self.could_stay += could_stay
                hit = could_stay and last == here
                self.stayed += hit
            # After the first turn a perfect cache holds the earlier tokens, so only the new ones are read.
            new = GIVEN_TOKENS if granted.earlier else length
            self.ideal += new if could_stay else length
            self.read += new if hit else length
            self._last[at] = here
        return hit

    def step(self, order: StepEnvironment, reward: float) -> tuple[float, ToolAnswer]:
        """The seconds until the environment answers, and its answer."""
        at = order.group, order.sample, order.begun, order.turn
        if order.turn >= self._turns:
            self._last.pop((order.group, order.sample), None)
            return 0.0, EpisodeEnded(*at, reward)
        self.waiting += 1
        mean_s = self._tool_s / 2.718281828 ** (self._sigma**2 / 2)
        return mean_s * self._chance.lognormvariate(0.0, self._sigma), EnvironmentStepped(
            *at, _GIVEN, b"s"
        )

    def answered(self, answer: ToolAnswer) -> None:
        self.waiting -= isinstance(answer, EnvironmentStepped)

    def count(self, slots: int, leased: int, now: float) -> None:
        """Count the time since the last call; the active workers had these slots and leases in it."""
        passed_s, self._at = now - self._at, now
        self._free_s += passed_s * max(0, slots - leased)
        self._leased_s += passed_s * leased
        self._waiting_s += passed_s * self.waiting

    def begin_counting(self, now: float) -> None:
        """Set all counts to 0; count from now on."""
        self._at, self._free_s, self._leased_s, self._waiting_s = now, 0.0, 0.0, 0.0
        self.could_stay = self.stayed = self.read = self.ideal = 0

    def facts(self, seconds: float) -> dict[str, float]:
        """The figures for JSON. seconds: since counting began."""
        slot_s = self._free_s + self._leased_s
        return {
            "slots_busy": self._leased_s / slot_s if slot_s else 0.0,
            "episodes_parked": self._waiting_s / seconds if seconds > 0 else 0.0,
            "stayed": self.stayed / self.could_stay if self.could_stay else 1.0,
            "prefill_ratio": self.read / self.ideal if self.ideal else 1.0,
        }
