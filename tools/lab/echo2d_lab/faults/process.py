"""Simulates a process that starts, dies and pauses, with a monotonic clock of its own.

    down --begin--> up --end--> down
    up --pause--> paused --(seconds later)--> up, which then runs all calls of that time

Calls that a process has scheduled are lost when it dies. Its clock starts at any value and may jump
ahead, like that of a suspended virtual machine. Not here: what the process does.
"""

from collections.abc import Callable
from typing import Any

from echo2d.plan.kernel.virtual_clock import Clock

# This is added to every timer, so that rounding in the sum of two clocks cannot make it fire early.
TICK_S = 1e-6


class Process:
    """See the module docstring. boots: how often it has started."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.up = False
        self.boots = 0
        self._skew_s = 0.0
        self._paused = False
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._alarm: float | None = None

    @property
    def now(self) -> float:
        """The time on its own monotonic clock, in seconds."""
        return self.clock.now + self._skew_s

    def wake_at(self) -> float | None:
        """Return when `woken` is due, by its own clock; None: no wake-up is due."""
        return None

    def woken(self) -> None:
        """Called at the time of `wake_at`."""

    def begin(self, *, skew_s: float = 0.0) -> None:
        """Start the process. skew_s: how far its clock is ahead of the simulation's."""
        assert not self.up
        self.up, self.boots, self._skew_s = True, self.boots + 1, skew_s

    def end(self) -> None:
        """End the process at once, like kill -9."""
        self.up = self._paused = False
        self._backlog.clear()
        self._alarm = None

    def later(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call act(*arguments) after `delay_s`, unless this start of the process has ended."""
        self.clock.after(delay_s, self.call, self.boots, act, *arguments)

    def call(self, boot: int, act: Callable[..., None], *arguments: Any) -> None:
        """Call act(*arguments) if start number `boot` still runs; if paused, after the pause."""
        if boot != self.boots or not self.up:
            return
        if self._paused:
            self._backlog.append((act, arguments))
        else:
            act(*arguments)

    def pause(self, seconds: float) -> None:
        """Stop the process like SIGSTOP, and continue it after `seconds` like SIGCONT."""
        if self.up and not self._paused:
            self._paused = True
            self.clock.after(seconds, self._resume, self.boots)

    def jump(self, seconds: float) -> None:
        """Move its clock ahead at once."""
        self._skew_s += seconds
        if self.up:
            self.set_alarm()

    def set_alarm(self) -> None:
        """Set the timer for `woken` again. Call this after every event, because it may change `wake_at`."""
        wake_at = self.wake_at()
        due = None if wake_at is None else max(self.clock.now, wake_at - self._skew_s) + TICK_S
        if due is None or self._alarm is None or due < self._alarm or self._alarm <= self.clock.now:
            self._alarm = due
            if due is not None:
                self.clock.at(due, self._ring, self.boots, due)

    def _ring(self, boot: int, due: float) -> None:
        if boot == self.boots and self._alarm == due:
            self._alarm = None
            self.call(boot, self._wake)

    def _wake(self) -> None:
        wake_at = self.wake_at()
        if wake_at is not None and self.now >= wake_at:
            self.woken()
        else:
            self.set_alarm()

    def _resume(self, boot: int) -> None:
        if boot != self.boots or not self._paused:
            return
        self._paused = False
        backlog, self._backlog = self._backlog, []
        for act, arguments in backlog:
            self.call(boot, act, *arguments)
