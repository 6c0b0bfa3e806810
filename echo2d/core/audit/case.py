"""The case of each worker: which of its trajectories were audited, and what follows from that.

    new --NEWCOMER audited, none flagged--> clear --a trajectory is flagged--> flagged
                                              ^----CLEARED audited in a row-------|
    any --a test convicts--> convicted (until a person pardons it)

Every trajectory of a new or flagged worker is audited, and none is trained on before its verdict. A
share of a clear worker's trajectories is audited, and the worker cannot predict which. A worker is
known by its key, so a new key is a new worker.
Not here: the tests (`sequential`), what is flagged (`baseline`), and which auditor scores (`scorers`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from echo2d.core.audit.baseline import HonestLimits
from echo2d.core.audit.sequential import FlagTest, SeedTest, TemperTest
from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.rules.audit import AuditRules

CLEARED = 100  # this many audited trajectories in a row without a flag clear a flagged worker
CASES_MAX = 10_000  # as many as a run enrols

TrustStanding = Literal["new", "clear", "flagged", "convicted"]


@dataclass(slots=True)
class Case:
    """The case of one worker."""

    # This many more trajectories must be audited without a flag before the worker is clear.
    left: int
    # The learner doubts its logprobs.
    doubted: bool = False
    # Numbers of trajectories.
    delivered: int = 0
    audited: int = 0
    flagged: int = 0
    # Why the worker was convicted; empty: it was not.
    verdict: str = ""
    flags: FlagTest = field(default_factory=FlagTest)
    seeds: SeedTest = field(default_factory=SeedTest)
    temper: TemperTest = field(default_factory=TemperTest)

    @property
    def standing(self) -> TrustStanding:
        if self.verdict:
            return "convicted"
        if not self.left:
            return "clear"
        return "flagged" if self.flagged or self.doubted else "new"


class Cases:
    """See the module docstring."""

    def __init__(self, rules: AuditRules) -> None:
        self._rules = rules
        self._cases: dict[PeerId, Case] = {}

    def __iter__(self) -> Iterator[tuple[PeerId, Case]]:
        return iter(self._cases.items())

    def get(self, worker: PeerId) -> Case | None:
        """The case of this worker; None: none of its answers was ever delivered or audited."""
        return self._cases.get(worker)

    def of(self, worker: PeerId) -> Case:
        case = self._cases.get(worker)
        if case is None:
            case = self._cases[worker] = Case(left=self._rules.newcomer)
            keep_newest(self._cases, CASES_MAX)
        return case

    def forget(self, worker: PeerId) -> None:
        """From now on it is a new worker."""
        self._cases.pop(worker, None)

    def doubt(self, worker: PeerId) -> None:
        """The learner doubts this worker: audit it like a flagged one."""
        case = self.of(worker)
        case.left, case.doubted = CLEARED, True

    def suspect(self, worker: PeerId, found: Evidence, limits: HonestLimits) -> tuple[str, ...]:
        """Take in what an audit found, without convicting the worker. Returns why the answer is flagged."""
        case = self.of(worker)
        reasons = limits.flags(found)
        case.audited += 1
        case.flagged += bool(reasons)
        return reasons

    def judge(
        self, worker: PeerId, found: Evidence, limits: HonestLimits, *, drawn: bool = True
    ) -> tuple[tuple[str, ...], str]:
        """Take in what an audit found.

        Returns why the answer is flagged, and why the worker is convicted now; both may be empty.
        limits: the limits of the answer's class. drawn: whether the answer was drawn by the audited share.
        A flag always counts. An answer without a flag counts only if it was drawn, so that the honest
        answers of a worker on trial do not make up for its lies.
        """
        case = self.of(worker)
        case.audited += 1
        reasons = limits.flags(found)
        if case.verdict:
            return reasons, ""
        if reasons or drawn:
            case.flags.add(flagged=bool(reasons))
        if found.misses is None:
            case.temper.add(found)
        else:
            case.seeds.add(limits.missed(found), found.tokens, limits.misses)
        if reasons:
            case.flagged += 1
            case.left = CLEARED
        elif case.left:
            case.left -= 1
        if case.flags.convicts:
            case.verdict = f"{case.flagged} of {case.audited} audited: {' and '.join(reasons)}"
        elif case.seeds.convicts:
            seeds = case.seeds
            case.verdict = f"{seeds.misses} of {seeds.tokens} tokens are not those of their seeds"
        elif case.temper.convicts:
            low = case.temper.cold > case.temper.hot
            case.verdict = f"its tokens are too {'likely' if low else 'unlikely'} to be drawn"
        return reasons, case.verdict

    def check(self) -> None:
        assert len(self._cases) <= CASES_MAX
        for _, case in self:
            assert case.flagged <= case.audited
            assert 0 <= case.left <= max(CLEARED, self._rules.newcomer)
