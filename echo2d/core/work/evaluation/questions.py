"""The questions of one [[eval]]: drawn once, at the start, and the same for every version.

    asked --PromptDrawn--> in `all`      until all are drawn, or the task has no more
Not here: answers.
"""

from dataclasses import dataclass

from echo2d.core.protocol.trajectory import NO_SOURCE, Source
from echo2d.core.rules.tasks import EvalRules
from echo2d.core.work.events import DrawPrompt

# At most this many questions are asked for at once; drawing one takes a task process milliseconds.
QUESTIONS_AHEAD_MAX = 64
# Only this many questions of a data set are used, because their tokens stay in memory.
ROWS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class EvalQuestion:
    """Question number `cursor` of its task, with its tokens (int32)."""

    cursor: int
    tokens: bytes
    source: Source = NO_SOURCE


class Questions:
    """See the module docstring."""

    def __init__(self, rules: EvalRules) -> None:
        self._name = rules.name
        self._most = rules.rows or ROWS_MAX
        self._next = 0
        self._asked: set[int] = set()
        self.all: dict[int, EvalQuestion] = {}

    @property
    def complete(self) -> bool:
        """Whether all questions have been drawn."""
        return self._next >= self._most and not self._asked

    def ask(self) -> list[DrawPrompt]:
        """Ask for more questions, up to QUESTIONS_AHEAD_MAX at once."""
        actions = []
        while len(self._asked) < QUESTIONS_AHEAD_MAX and self._next < self._most:
            self._asked.add(self._next)
            actions.append(DrawPrompt(self._next, self._name))
            self._next += 1
        return actions

    def drawn(self, question: EvalQuestion) -> None:
        if question.cursor in self._asked:
            self._asked.remove(question.cursor)
            self.all[question.cursor] = question

    def skip(self, cursor: int) -> None:
        """Leave this question out of every evaluation, because it cannot be asked."""
        self._asked.discard(cursor)

    def ended(self, cursor: int) -> None:
        """Record that the task has no question from this number on."""
        self._most = min(self._most, cursor)
        self._asked = {asked for asked in self._asked if asked < cursor}

    def check(self) -> None:
        assert len(self._asked) <= QUESTIONS_AHEAD_MAX
        assert not self._asked & self.all.keys()
        assert all(cursor < self._next for cursor in (*self._asked, *self.all))
