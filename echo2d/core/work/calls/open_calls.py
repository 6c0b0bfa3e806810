"""Keeps the open calls, limits their number (per caller and in all), and counts how calls ended."""

from collections import Counter
from collections.abc import Iterator

from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.work.calls.call_choice import CallChoice
from echo2d.core.work.calls.events import CallAsked, CallId

# One call has at most this many choices.
CHOICES_MAX = 32
# At most this many choices of one caller, and of all callers, are open. Each may be a call of its own
# with 512 KiB of prompt.
CHOICES_OF_CALLER_MAX = 256
CHOICES_OPEN_MAX = 512


class OpenCalls:
    """The open choices, by call; a call has at least one."""

    def __init__(self) -> None:
        self._calls: dict[CallId, dict[int, CallChoice]] = {}
        # The number of open choices, by caller.
        self._choices: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()  # the number of ended calls, by how they ended

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call: CallId) -> bool:
        return call in self._calls

    def __iter__(self) -> Iterator[CallChoice]:
        return (choice for choices in self._calls.values() for choice in choices.values())

    def get(self, call: CallId, index: int) -> CallChoice | None:
        return self._calls.get(call, {}).get(index)

    def too_many(self, asked: CallAsked) -> str:
        """Why the call cannot be accepted now; empty: it can."""
        if (mine := self._choices[asked.caller]) + asked.choices > CHOICES_OF_CALLER_MAX:
            return f"{mine} choices of yours are open; at most {CHOICES_OF_CALLER_MAX} are taken"
        if (every := self._choices.total()) + asked.choices > CHOICES_OPEN_MAX:
            return f"{every} choices are open; at most {CHOICES_OPEN_MAX} are taken"
        return ""

    def open(self, asked: CallAsked, named: VersionKey | None = None) -> list[CallChoice]:
        """Open a call; returns its choices. named: as in `CallChoice`."""
        assert 0 < asked.choices <= CHOICES_MAX
        self._calls[asked.call] = {
            index: CallChoice(asked, index, named=named) for index in range(asked.choices)
        }
        self._choices[asked.caller] += asked.choices
        return list(self._calls[asked.call].values())

    def end(self, choice: CallChoice) -> None:
        """End a choice; if it was the call's last one, end the call too."""
        call, choices = choice.call.call, self._calls[choice.call.call]
        if len(choices) == 1:
            self.end_call(call, "done")
        else:
            del choices[choice.index]
            self._count(choice.call.caller, 1)

    def end_call(self, call: CallId, how: str) -> list[CallChoice]:
        """End a call; returns its choices that were still open."""
        self.ended[how] += 1
        choices = list(self._calls.pop(call).values())
        self._count(choices[0].call.caller, len(choices))
        return choices

    def _count(self, caller: str, fewer: int) -> None:
        self._choices[caller] -= fewer
        if not self._choices[caller]:
            del self._choices[caller]

    def check(self) -> None:
        assert all(choices for choices in self._calls.values())
        assert Counter(choice.call.caller for choice in self) == self._choices
        assert self._choices.total() <= CHOICES_OPEN_MAX
        assert max(self._choices.values(), default=0) <= CHOICES_OF_CALLER_MAX
