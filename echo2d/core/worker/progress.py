"""What a worker does now and how far it is, in words for its owner.

    "receiving" -> "applying" -> "loading" -> nothing: the version is served

A `ProgressMeter` gets the stage again and again. It measures how fast bytes come and says when a line
in the log is due. Not here: which stage it is (`WorkerVersions.under_way`), and progress bars.
"""

from collections import deque
from dataclasses import dataclass

from echo2d.core.base.ids import Version

# The rate is measured over this time, because stripes come in bursts of some seconds.
RATE_S = 20.0
_SAMPLES_MAX = 256
# A line in the log is due this often. A worker that serves a version logs less often: its engines
# do not wait for the next version, and if each version took a minute, the lines would fill the log.
LINE_S = 10.0
LINE_SERVING_S = 60.0


@dataclass(frozen=True, slots=True)
class Stage:
    """One step on the way of a version to the engines."""

    what: str
    version: Version | None = None
    done: int = 0  # bytes
    total: int | None = None  # bytes; None: there is no total, or it is not known yet

    @property
    def share(self) -> float | None:
        """The share that is done; None: not known."""
        return min(1.0, self.done / self.total) if self.total else None


@dataclass(frozen=True, slots=True)
class Progress:
    """A stage at one moment."""

    stage: Stage
    seconds: float  # since it began
    rate: float | None  # bytes/s; None: not known, or no bytes

    @property
    def eta_s(self) -> float | None:
        total, done = self.stage.total, self.stage.done
        return max(0, total - done) / self.rate if total and self.rate else None

    def words(self) -> str:
        """The stage's progress, such as "3.1/16.1 GB 48 MB/s eta 4:31"."""
        stage = self.stage
        if stage.what != "receiving":
            share = "" if stage.share is None else f"{stage.share:.0%}, "
            return f"{share}{clock(self.seconds)}"
        words = [amount(stage.done, stage.total)]
        if self.rate is not None:
            words.append(f"{amount(round(self.rate))}/s")
        if self.eta_s is not None:
            words.append(f"eta {clock(self.eta_s)}")
        return " ".join(words)


class ProgressMeter:
    """See the module docstring."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._told_at = 0.0
        self._stage = Stage("")
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES_MAX)

    def update(self, stage: Stage, now: float) -> Progress:
        """Record the present stage, and return its progress."""
        if (stage.what, stage.version) != (self._stage.what, self._stage.version):
            self._began_at = self._told_at = now
            self._samples.clear()
        self._stage = stage
        # Start measuring again if nothing came yet, or if frames were found damaged.
        if self._samples and (not stage.done or stage.done < self._samples[-1][1]):
            self._samples.clear()
        self._samples.append((now, stage.done))
        while len(self._samples) > 2 and self._samples[1][0] <= now - RATE_S:
            self._samples.popleft()
        return Progress(stage, now - self._began_at, self._rate())

    def line_due(self, now: float, *, serving: bool) -> bool:
        """Whether a line in the log is due now. serving: the worker serves some version."""
        every_s = LINE_SERVING_S if serving else LINE_S
        if self._stage.version is None or now - self._told_at < every_s:
            return False
        self._told_at = now
        return True

    def _rate(self) -> float | None:
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None


def clock(seconds: float) -> str:
    """A duration such as 4:31 or 1:04:31."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def amount(count: int, of: int | None = None) -> str:
    """Bytes in decimal units: 48 MB, 3.1/16.1 GB."""
    largest = count if of is None else of
    unit, length = next(
        (each for each in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= each[1]),
        ("B", 1.0),
    )
    digits = 1 if unit == "GB" or (unit == "MB" and largest < 10e6) else 0
    parts = [f"{value / length:.{digits}f}" for value in (count, *([] if of is None else [of]))]
    return f"{'/'.join(parts)} {unit}"
