"""Decides which rows of a task are worth asking: those whose answers still differ in their rewards.

    asked --a group's rewards differ--> asked, and forgotten
      |
      +--`retire_after` groups in a row were all equal--> retired
                 ^                                           | `retest_after` versions later
                 +-------- equal again ----- asked once <----+

A group whose rewards are all equal teaches nothing: the policy always solves the row, or never does.
That may change as the policy learns, so a retired row is tested again. Without a filter every row is
asked. The ledger keeps the judgements (`RowJudged`), so a restart chooses the same prompts.
Not here: the order of the rows, which is the task's own.
"""

from collections.abc import Iterable

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.base.ids import Version
from echo2d.core.cluster.rules import RowFilter
from echo2d.core.protocol.trajectory import Source
from echo2d.core.rollouts.events import RowJudged

# Rows that are remembered; of a longer data set the oldest are forgotten, and asked again.
ROWS_MAX = 1 << 20
# Prompts of retired rows in a row that are passed over. The next one is asked, retired or not.
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

    @property
    def retired(self) -> int:
        """Rows that were retired and have not been asked again since."""
        if self._filter is None:
            return 0
        return sum(row.equal >= self._filter.retire_after for row in self._rows.values())

    def wants(self, row: str, newest: Version | None) -> bool:
        """Whether a prompt of this row is worth asking; otherwise it is passed over.

        newest: the newest version that is published.
        """
        known = self._rows.get(row)
        if self._filter is None or known is None or known.equal < self._filter.retire_after:
            return True
        if newest is not None and newest >= known.version + self._filter.retest_after:
            return True
        if self._passed_in_a_row >= PASSED_MAX:
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
        self._rows.pop(source.row, None)
        if equal:
            self._rows[source.row] = judged
            keep_newest(self._rows, ROWS_MAX)
        return judged

    def check(self) -> None:
        assert len(self._rows) <= ROWS_MAX
        assert all(row.equal > 0 for row in self._rows.values())
