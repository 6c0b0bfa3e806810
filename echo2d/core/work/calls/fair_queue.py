"""The queue of waiting choices, fair between callers.

The next slot goes to the caller that holds the fewest slots. If several hold equally few, it goes
to the caller that has held this few for longest. So callers take turns, however many there are,
however much one of them asks for, and even with a single slot. Of one caller's choices, those with
tokens go first, then those that came first. What every event needs (`oldest`, the first of
`in_turn`) takes the same time however many choices wait.
Not here: slots and workers.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from echo2d.core.work.calls.call_choice import CALL_AVOID_S, CallChoice, ChoiceKey

_Line = dict[ChoiceKey, CallChoice]


@dataclass(slots=True)
class _Lines:
    """The waiting choices of one caller: with tokens (begun) and without (fresh)."""

    begun: _Line = field(default_factory=dict)
    fresh: _Line = field(default_factory=dict)

    def of(self, choice: CallChoice) -> _Line:
        return self.begun if choice.told.length else self.fresh


class CallQueue:
    """See the module docstring."""

    def __init__(self) -> None:
        # All waiting choices, and those of them that avoid a worker, in the order of their arrival.
        self._waiting: _Line = {}
        self._avoiding: _Line = {}
        self._lines: dict[str, _Lines] = {}
        self._held: Counter[str] = Counter()
        # The waiting callers by the number of slots that they hold, each set in the order of turns.
        self._turns: dict[int, dict[str, None]] = {}
        # Grows when a choice begins to wait, or no longer avoids a worker.
        self.changes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def callers(self) -> int:
        """The number of waiting callers."""
        return len(self._lines)

    @property
    def oldest(self) -> CallChoice | None:
        """The choice that has waited longest."""
        return next(iter(self._waiting.values()), None)

    def put(self, choice: CallChoice, *, now: float) -> None:
        """Put a choice into the queue."""
        choice.since = now
        self._waiting[choice.key] = choice
        if choice.avoid is not None:
            self._avoiding[choice.key] = choice
        caller = choice.call.caller
        if caller not in self._lines:
            self._lines[caller] = _Lines()
            self._turns.setdefault(self._held[caller], {})[caller] = None
        self._lines[caller].of(choice)[choice.key] = choice
        self.changes += 1

    def discard(self, choice: CallChoice) -> None:
        """Take a choice out of the queue, if it waits."""
        if self._waiting.pop(choice.key, None) is None:
            return
        self._avoiding.pop(choice.key, None)
        caller = choice.call.caller
        lines = self._lines[caller]
        del lines.of(choice)[choice.key]
        if not lines.begun and not lines.fresh:
            del self._lines[caller]
            self._leave_turn(caller)

    def hold(self, caller: str, slots: int) -> None:
        """Record that the caller holds this many more slots (fewer if negative)."""
        if caller in self._lines:
            self._leave_turn(caller)
        self._held[caller] += slots
        if caller in self._lines:
            self._turns.setdefault(self._held[caller], {})[caller] = None
        if not self._held[caller]:
            del self._held[caller]

    def in_turn(self) -> Iterator[CallChoice]:
        """All waiting choices, in the order of their turns."""
        for held in sorted(self._turns):
            for caller in self._turns[held]:
                yield from self._lines[caller].begun.values()
                yield from self._lines[caller].fresh.values()

    def run_of(self, choice: CallChoice, most: int) -> list[CallChoice]:
        """The choice, and the choices after it that may share its lease: at most `most` in all, but
        always the choice itself.

        They belong to one call and have no tokens yet, so they have one prompt.
        """
        run = [choice]
        fresh = self._lines[choice.call.caller].fresh if not choice.told.length else {}
        while (
            len(run) < most
            and (mate := fresh.get((choice.call.call, run[-1].index + 1))) is not None
        ):
            if mate.avoid != choice.avoid:
                break
            run.append(mate)
        return run

    def late(self, wait_s: float, *, now: float) -> list[CallChoice]:
        """The choices that have waited for `wait_s`.

        It also ends the avoiding of workers that has lasted CALL_AVOID_S.
        """
        while (
            first := next(iter(self._avoiding.values()), None)
        ) and now >= first.since + CALL_AVOID_S:
            del self._avoiding[first.key]
            self.changes += 1
        found: list[CallChoice] = []
        for choice in self._waiting.values():
            if now < choice.since + wait_s:
                break
            found.append(choice)
        return found

    def wake_at(self, wait_s: float) -> float | None:
        """When `late` has something to do next."""
        avoiding = next(iter(self._avoiding.values()), None)
        ends = [None if self.oldest is None else self.oldest.since + wait_s]
        ends += [None if avoiding is None else avoiding.since + CALL_AVOID_S]
        return min((at for at in ends if at is not None), default=None)

    def _leave_turn(self, caller: str) -> None:
        held = self._held[caller]
        del self._turns[held][caller]
        if not self._turns[held]:
            del self._turns[held]

    def check(self) -> None:
        waiting = list(self._waiting.values())
        assert [choice.since for choice in waiting] == sorted(choice.since for choice in waiting)
        assert all(
            choice.lease is None and key == choice.key for key, choice in self._waiting.items()
        )
        assert {choice.key for choice in self.in_turn()} == set(self._waiting)
        assert self._avoiding.keys() <= self._waiting.keys()
        assert all(
            choice in lines.of(choice).values()
            for lines in self._lines.values()
            for choice in _all(lines)
        )
        assert {caller: held for held, callers in self._turns.items() for caller in callers} == {
            caller: self._held.get(caller, 0) for caller in self._lines
        }
        assert all(held > 0 for held in self._held.values())


def _all(lines: _Lines) -> list[CallChoice]:
    return [*lines.begun.values(), *lines.fresh.values()]
