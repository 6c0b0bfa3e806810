"""Decides which rows of a task are worth asking: those whose answers still differ in their rewards.

    asked --a group's rewards differ--> asked, and forgotten
      |
      +--`retire_after` groups in a row were all equal--> retired
                 ^                                           | `retest_after` versions later
                 +-------- equal again ----- asked once <----+

A group whose rewards are all equal teaches nothing: the policy always solves the row, or never does.
That may change as the policy learns, so a retired row is tested again. As many prompts in a row as
rows are retired are passed over, and then one is asked: a task all of whose rows are retired goes
on. Without a filter every row is asked. The ledger keeps the judgements (`RowJudged`), so a restart
chooses the same prompts.
Not here: the order of the rows, which is the task's own.
"""

from collections.abc import Iterable

from echo2d.core.base.ids import Version
from echo2d.core.cluster.rules import RowFilter
from echo2d.core.protocol.trajectory import Source
from echo2d.core.rollouts.events import RowJudged

# Rows that are remembered; of a longer data set the oldest are forgotten, and asked again.
ROWS_MAX = 1 << 20
# Prompts of retired rows in a row that are passed over, however many rows are retired.
PASSED_MAX = 4096


class Sampler:
    """See the module docstring. row_filter: None: every row is asked. passed: prompts that were
    passed over so far. filters: whether rows may be passed over at all.
    """

    def __init__(self, row_filter: RowFilter | None, rows: Iterable[RowJudged] = ()) -> None:
        self._filter = row_filter
        self._rows = {row.source.row: row for row in rows} if row_filter is not None else {}
        self._passed_in_a_row = 0
        self.passed = 0
        self.filters = row_filter is not None
        # Rows that were retired and have not been asked again since.
        self.retired = sum(map(self._is_retired, self._rows.values()))

    def wants(self, row: str, newest: Version | None) -> bool:
        """Whether a prompt of this row is worth asking; otherwise it is passed over.

        newest: the newest version that is published.
        """
        known = self._rows.get(row)
        if self._filter is None or known is None or not self._is_retired(known):
            return True
        if newest is not None and newest >= known.version + self._filter.retest_after:
            return True
        if self._passed_in_a_row >= min(PASSED_MAX, self.retired):
            return True
        self._passed_in_a_row += 1
        self.passed += 1
        return False

    def asked(self) -> None:
        """A prompt is asked."""
        self._passed_in_a_row = 0

    def judged(self, source: Source, *, equal: bool, version: Version) -> RowJudged | None:
        """All rewards of a group of this row are there. Returns what is new about the row.

        equal: whether they are all the same. version: the newest one that wrote for the group.
        """
        known = self._rows.get(source.row)
        if self._filter is None or not source.row or (known is None and not equal):
            return None
        before = 0 if known is None else known.equal
        judged = RowJudged(source, before + 1 if equal else 0, version)
        self._forget(source.row)
        if equal:
            self._rows[source.row] = judged
            self.retired += self._is_retired(judged)
            while len(self._rows) > ROWS_MAX:
                self._forget(next(iter(self._rows)))
        return judged

    def _is_retired(self, row: RowJudged) -> bool:
        return self._filter is not None and row.equal >= self._filter.retire_after

    def _forget(self, row: str) -> None:
        known = self._rows.pop(row, None)
        self.retired -= known is not None and self._is_retired(known)

    def check(self) -> None:
        assert len(self._rows) <= ROWS_MAX
        assert all(row.equal > 0 for row in self._rows.values())
        assert self.retired == sum(map(self._is_retired, self._rows.values()))
