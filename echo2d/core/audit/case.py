"""The case of each worker: what was audited of it, and what follows.

    new --NEWCOMER audited, none flagged--> clear --a trajectory is flagged--> flagged
                                              ^----CLEARED audited in a row-------|
    any --a test convicts--> convicted (for good)

Every trajectory of a new or flagged worker is audited, and none is trained on before its verdict. A
clear worker has a share of its trajectories audited, and cannot foresee which. Workers are told apart
by their keys, so a new key is a new worker.
Not here: the tests (`sequential`), what is flagged (`baseline`), and who does the auditing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from echo2d.core.audit.baseline import HonestLimits
from echo2d.core.audit.evidence import Evidence
from echo2d.core.audit.sequential import FlagTest, ShiftTest
from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import PeerId

CLEARED = 100  # audited trajectories in a row without a flag, after one
CASES_MAX = 10_000  # as many as a run enrols

TrustStanding = Literal["new", "clear", "flagged", "convicted"]


@dataclass(frozen=True, slots=True)
class AuditRules:
    """newcomer: trajectories of a new worker that are audited before any is trained on. share: of
    the trajectories of a clear worker that are audited.
    """

    newcomer: int = 20
    share: float = 0.05


@dataclass(slots=True)
class Case:
    """delivered, audited, flagged: trajectories. left: to be audited without a flag before the
    worker is clear. verdict: why it was convicted; empty: it was not.
    """

    left: int
    delivered: int = 0
    audited: int = 0
    flagged: int = 0
    verdict: str = ""
    flags: FlagTest = field(default_factory=FlagTest)
    shift: ShiftTest = field(default_factory=ShiftTest)

    @property
    def standing(self) -> TrustStanding:
        if self.verdict:
            return "convicted"
        if not self.left:
            return "clear"
        return "flagged" if self.flagged else "new"


class Cases:
    """See the module docstring."""

    def __init__(self, rules: AuditRules) -> None:
        self._rules = rules
        self._cases: dict[PeerId, Case] = {}

    def __iter__(self) -> Iterator[tuple[PeerId, Case]]:
        return iter(self._cases.items())

    def of(self, worker: PeerId) -> Case:
        case = self._cases.get(worker)
        if case is None:
            case = self._cases[worker] = Case(left=self._rules.newcomer)
            keep_newest(self._cases, CASES_MAX)
        return case

    def delivered(self, worker: PeerId, draw: float) -> bool:
        """The worker delivered a trajectory; returns whether it is to be audited.

        draw: a number in [0, 1) that the worker cannot know.
        """
        case = self.of(worker)
        case.delivered += 1
        return bool(case.left) or draw < self._rules.share

    def waits(self, worker: PeerId) -> bool:
        """Whether nothing of this worker is trained on before its verdict."""
        return self.of(worker).left > 0

    def judge(self, worker: PeerId, found: Evidence, limits: HonestLimits | None) -> str:
        """Take in what an audit found; returns why the worker is convicted now, or "".

        limits: of its engine class; None: there is no baseline, and nothing is decided.
        """
        case = self.of(worker)
        case.audited += 1
        if limits is None:
            # A new worker is let in; the operator is told that nothing is judged.
            case.left = max(0, case.left - 1)
        if limits is None or case.verdict:
            return ""
        reasons = limits.flags(found)
        case.flags.add(flagged=bool(reasons))
        case.shift.add(limits.z(found))
        if reasons:
            case.flagged += 1
            case.left = CLEARED
        elif case.left:
            case.left -= 1
        if case.flags.convicts:
            case.verdict = f"{case.flagged} of {case.audited} audited: {' and '.join(reasons)}"
        elif case.shift.convicts:
            low = case.shift.sums[1] > case.shift.sums[0]
            case.verdict = f"its tokens are too {'likely' if low else 'unlikely'} to be drawn"
        return case.verdict

    def check(self) -> None:
        assert len(self._cases) <= CASES_MAX
        for _, case in self:
            assert case.flagged <= case.audited
            assert 0 <= case.left <= max(CLEARED, self._rules.newcomer)
