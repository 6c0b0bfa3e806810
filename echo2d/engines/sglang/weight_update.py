"""A refit of a running server, in the order that keeps every token's version known.

    pause --> cut --> update --> (flush) --> who are you? --> go on
      |         |        |          |             |
      +- no: ---+        +----------+-------------+--> doubtful: nobody knows what its weights are
      the old version

*retract* (the default): running requests give their KV back, then they are cut, so that the server says who wrote
their tokens; each goes on as a new request under the new version. *abort*: pausing itself ends them, which SGLang does
in steps of a second. *in_place*: they go on with the KV of the old weights; who wrote their tokens is known when they
end.

An update that was refused is doubtful too: SGLang says that it rolls back, and loads the new directory again. Only one
answer is not what it seems: "Weights were updated, but the cache was not flushed" is an update that worked.
Without a pause an update would wait for every running request to end; without a flush, cached prefixes of the old
weights would be used again; without a load format, the one that the server was started with is used.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from echo2d.engines.server.http_client import Lost, ServerRefused
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.compat import Dialect
from echo2d.errors import EngineFault

RefitMode = Literal["retract", "abort", "in_place"]

Files = list[tuple[str, int, int, int]]  # name, size, time and inode

LOAD_BYTES_PER_S_MIN = 100e6  # a slow disk; three times that long is waited, and
LOAD_S_MIN = 30.0  # so long at least: moving weights into their layout takes time too
_UPDATED_ANYWAY = "Weights were updated, but"


class Doubtful(EngineFault):
    """Neither surely done nor surely not."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What is to be served, and how."""

    snapshot: Path
    label: str
    files: Files
    mode: RefitMode

    @property
    def timeout_s(self) -> float:
        return 3 * sum(size for _, size, _, _ in self.files) / LOAD_BYTES_PER_S_MIN + LOAD_S_MIN


async def stop(server: SglangClient, mode: RefitMode) -> None:
    """No more tokens. EngineFault but Doubtful: it goes on as before."""
    try:
        await server.pause(mode)
        if mode == "retract":
            await server.abort_all()
    except ServerRefused as fault:
        await go_on(server)
        raise EngineFault(f"the old version is still served: {fault}") from fault
    except Lost as fault:
        raise Doubtful(str(fault)) from fault


async def update(server: SglangClient, dialect: Dialect, order: WeightUpdate) -> None:
    """The weights of a paused server. Any fault is Doubtful."""
    try:
        await _load(server, dialect, order)
        await identify(server, order)
    except Doubtful:
        raise
    except EngineFault as fault:
        raise Doubtful(str(fault)) from fault


async def _load(server: SglangClient, dialect: Dialect, order: WeightUpdate) -> None:
    flush = order.mode != "in_place"
    body = {
        "model_path": str(order.snapshot),
        "load_format": "auto",
        "weight_version": order.label,
        "flush_cache": flush and dialect.flushes_safely,
        "abort_all_requests": False,
    }
    done, message = await server.update(body, timeout_s=order.timeout_s)
    if done and not (flush and not dialect.flushes_safely):
        return
    if not done and not message.startswith(_UPDATED_ANYWAY):
        raise Doubtful(f"SGLang did not update: {message}")
    if flush:
        await server.flush()
    if not done:  # the part of it that answers `/model_info` was not told
        await server.relabel(order.label)


async def identify(server: SglangClient, order: WeightUpdate) -> None:
    """It is what it was told to be."""
    model = await server.model()
    if model.get("weight_version") != order.label or model.get("model_path") != str(order.snapshot):
        raise Doubtful(
            f"SGLang serves {model.get('weight_version')!r} from {model.get('model_path')!r}, not {order.label!r}"
        )


async def go_on(server: SglangClient) -> None:
    """Tokens again. Any fault is Doubtful."""
    try:
        await server.resume()
    except EngineFault as fault:
        raise Doubtful(str(fault)) from fault
