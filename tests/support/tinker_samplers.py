"""Samplers and samples of clients of the Tinker API, and workers that hold what they are told to."""

from collections.abc import Sequence

from echo2d.core.base.ids import Version
from echo2d.core.cluster.events import Send
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.tinker.draw_queue import AskedSample, WeightsSampler
from echo2d.core.tinker.events import SampleOrder, SamplerName, SessionName
from echo2d.core.tinker.futures import FutureId


def sampler(
    folder: str, caller: str = "ann", session: str = "s1", *, whole: bool = False
) -> WeightsSampler:
    name = SamplerName(f"{session}:{folder}")
    return WeightsSampler(name, caller, SessionName(session), folder, "org/base", None, whole=whole)


def sample(of: WeightsSampler, name: str, *, count: int = 1, now: float = 0.0) -> AskedSample:
    order = SampleOrder(b"", count, 10, WHOLE, (), (), None)
    return AskedSample(FutureId(name), of, order, now)


class ObedientWorkers:
    """They hold every version at once, but those that are late, on their way or gone."""

    def __init__(self) -> None:
        self.room = 1 << 30
        # The versions that each call of `hold` named.
        self.told: list[tuple[int, ...]] = []
        # Versions that only some of them hold; that none holds yet; that are on their way to all; that none can hold.
        self.partly, self.late = set[int](), set[int]()
        self.under_way, self.gone = set[int](), set[int]()

    def hold(self, versions: Sequence[Version]) -> list[Send]:
        self.told.append(tuple(versions))
        return []

    def spread(self, version: Version) -> bool:
        return self.arrived(version) and version not in self.partly

    def arrived(self, version: Version) -> bool:
        return version not in self.late | self.under_way | self.gone

    def coming(self, version: Version) -> bool:
        return version in self.under_way

    def possible(self, version: Version) -> bool:
        return version not in self.gone
