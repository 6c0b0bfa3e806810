"""Samplers and samples of clients of the Tinker API."""

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
