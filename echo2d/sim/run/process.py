"""A process of the simulation: it runs or does not, may be stopped for a while, and has a clock of its own.

    down --start--> up --kill--> down        up --pause--> paused --(seconds later)--> up, with everything that came

What a process has scheduled dies with it. Its clock is monotonic, starts anywhere, and may jump ahead (`jump`): a
virtual machine that was suspended. Not here: what the process does.
"""

from collections.abc import Callable
from typing import Any

from echo2d.sim.kernel.virtual_clock import Clock

TICK_S = 1e-6  # a timer never fires early, whatever rounding does to the sum of two clocks


class Process:
    """See the module docstring. boots: starts so far."""

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
        """Its monotonic clock."""
        return self.clock.now + self._skew_s

    def wake_at(self) -> float | None:
        """When `woken` is due by its own clock; None: not for now."""
        return None

    def woken(self) -> None:
        """`wake_at` has come."""

    def begin(self, *, skew_s: float = 0.0) -> None:
        """The process starts; its clock says what it likes."""
        assert not self.up
        self.up, self.boots, self._skew_s = True, self.boots + 1, skew_s

    def end(self) -> None:
        """kill -9."""
        self.up = self._paused = False
        self._backlog.clear()
        self._alarm = None

    def later(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Calls act(*arguments) if it is still the same process then."""
        self.clock.after(delay_s, self.call, self.boots, act, *arguments)

    def call(self, boot: int, act: Callable[..., None], *arguments: Any) -> None:
        """Calls act(*arguments) if this is still the start number `boot`; a paused process does it afterwards."""
        if boot != self.boots or not self.up:
            return
        if self._paused:
            self._backlog.append((act, arguments))
        else:
            act(*arguments)

    def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT so many seconds later."""
        if self.up and not self._paused:
            self._paused = True
            self.clock.after(seconds, self._resume, self.boots)

    def jump(self, seconds: float) -> None:
        """Its clock is so many seconds ahead at once."""
        self._skew_s += seconds
        if self.up:
            self.set_alarm()

    def set_alarm(self) -> None:
        """Call it after every event: `woken` comes when it is due now."""
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
