"""Decides which rows of a task are worth asking: those whose answers still differ in their rewards.

    filter        asked --a group's rewards differ--> asked, and forgotten
                    |
                    +--`retire_after` groups in a row were all equal--> retired
                               ^                                           | `retest_after` versions later
                               +-------- equal again ----- asked once <----+

    informative   asked while  volatility + explore * sqrt(age / groups)  >=  mean volatility of all rows

A group whose rewards are all equal teaches nothing: the policy always solves the row, or never does.
That may change as the policy learns, so every row is asked again at some time. `informative` follows
DoPR (arXiv 2602.00815), which weighs the volatility of rewards against exploration. Here the
volatility is a running mean of the standard deviations of a row's groups, in which the newest group counts
half; the age is the number of versions since the last judgement. The square root of the age is how far a random
walk drifts, and divided by the number of groups it is the bonus of UCB. A row whose rewards stay equal is asked
more and more rarely.

The number of prompts in a row that are passed over is at most the number of rows that may be passed over; then one is
asked. So a task whose rows are all retired continues. Without a filter every row is asked, and an unknown row is always
asked. The ledger keeps the judgements (`RowJudged`), so a restart chooses the same prompts.
Not here: the order of the rows, which is the task's own.
"""

import math
from collections.abc import Iterable
from fractions import Fraction

from echo2d.core.base.ids import Version
from echo2d.core.protocol.trajectory import Source
from echo2d.core.rules.tasks import Informative, RowFilter
from echo2d.core.work.events import RowJudged

# At most this many rows are remembered; in a longer data set the oldest are forgotten, and asked again.
_ROWS_MAX = 1 << 20
# At most this many prompts in a row are passed over, however many rows may be passed over.
PASSED_MAX = 4096


class Sampler:
    """See the module docstring. row_filter: None: every row is asked."""

    def __init__(
        self, row_filter: RowFilter | Informative | None, rows: Iterable[RowJudged] = ()
    ) -> None:
        self._filter = row_filter
        self._rows: dict[str, RowJudged] = {}
        self._passed_in_a_row = 0
        self.passed = 0  # how many prompts were passed over so far
        self.filters = row_filter is not None  # whether rows may be passed over at all
        # How many of the rows that `filter` retired were not asked again since.
        self.retired = 0
        # The sum over all rows. It is exact, so that it does not depend on the order of judgements.
        self._volatility = Fraction(0)
        for row in rows:
            # Before a restart another kind of sampler may have judged the row.
            if self._keeps(row):
                self._remember(row)

    def wants(self, row: str, newest: Version | None) -> bool:
        """Whether a prompt of this row is worth asking; otherwise it is passed over.

        newest: the newest version that is published.
        """
        known = self._rows.get(row)
        if known is None or self._may_differ(known, known.version if newest is None else newest):
            return True
        some = self.retired if isinstance(self._filter, RowFilter) else len(self._rows)
        if self._passed_in_a_row >= min(PASSED_MAX, some):
            return True
        self._passed_in_a_row += 1
        self.passed += 1
        return False

    def asked(self) -> None:
        """Record that a prompt is asked."""
        self._passed_in_a_row = 0

    def judged(
        self, source: Source, *, equal: bool, spread: float, version: Version
    ) -> RowJudged | None:
        """Judge a row by all rewards of one of its groups. Returns what is new about the row.

        equal: whether the rewards are all the same. spread: their standard deviation. version: the newest
        version that wrote for the group.
        """
        if self._filter is None or not source.row:
            return None
        known = self._rows.get(source.row)
        groups, equals, volatility = 1, int(equal), spread
        if known is not None:
            groups, volatility = known.groups + 1, (known.volatility + spread) / 2
            equals = known.equal + 1 if equal else 0
        judged = RowJudged(source, groups, equals, volatility, version)
        self._forget(source.row)
        if not self._keeps(judged):
            return None if known is None else RowJudged(source, 0, 0, 0.0, version)
        self._remember(judged)
        return judged

    def _may_differ(self, row: RowJudged, newest: Version) -> bool:
        """Whether this row's rewards may differ again, so that it is worth asking."""
        age = max(0, newest - row.version)
        match self._filter:
            case RowFilter(retire_after, retest_after):
                return row.equal < retire_after or age >= retest_after
            case Informative(explore):
                hoped = row.volatility + explore * math.sqrt(age / row.groups)
                return Fraction(hoped) * len(self._rows) >= self._volatility
        return True

    def _keeps(self, row: RowJudged) -> bool:
        """Whether this row must be remembered."""
        return isinstance(self._filter, Informative) or (self.filters and row.equal > 0)

    def _is_retired(self, row: RowJudged) -> bool:
        return isinstance(self._filter, RowFilter) and row.equal >= self._filter.retire_after

    def _remember(self, row: RowJudged) -> None:
        self._rows[row.source.row] = row
        self._volatility += Fraction(row.volatility)
        self.retired += self._is_retired(row)
        while len(self._rows) > _ROWS_MAX:
            self._forget(next(iter(self._rows)))

    def _forget(self, row: str) -> None:
        known = self._rows.pop(row, None)
        if known is not None:
            self._volatility -= Fraction(known.volatility)
            self.retired -= self._is_retired(known)

    def check(self) -> None:
        assert len(self._rows) <= _ROWS_MAX
        assert all(row.groups > 0 and self._keeps(row) for row in self._rows.values())
        assert self._volatility == sum(Fraction(row.volatility) for row in self._rows.values())
        assert self.retired == sum(map(self._is_retired, self._rows.values()))
