"""Refits a running SGLang server in an order that keeps every token's version known (I2).

    pause --> cut --> update --> (flush) --> identify --> resume
      |        |         |          |           |           |
      | refused|         +----------+-----------+-----------+--> doubtful: weights unknown (I3)
      +--------+--> the old version is still served

What happens to running requests depends on the mode:

- retract (the default): they give their KV cache back and are cut. Their last chunks then report
  who wrote their tokens, and each continues as a new request under the new version.
- abort: the pause itself ends them, which SGLang does in steps of a second.
- in_place: they continue on the KV cache of the old weights, and report versions when they end.

A refused update is doubtful too: SGLang claims to roll back, but loads the new directory again.
"Weights were updated, but the cache was not flushed", however, is an update that worked.
"""

from collections.abc import Mapping
from typing import Any

from echo2d.engines.server.http_client import CALL_S_MAX, Lost, ServerRefused
from echo2d.engines.server.weight_update import Doubtful, RefitMode, WeightUpdate
from echo2d.engines.sglang.client import SglangClient
from echo2d.errors import EngineFault

_UPDATED_ANYWAY = "Weights were updated, but"


async def started(server: SglangClient, order: WeightUpdate) -> None:
    """Check that a server that has just started serves the version of `order`. Doubtful: it does not."""
    await identify(server, order)


async def stop(server: SglangClient, mode: RefitMode) -> None:
    """Stop generation for a refit or a hold.

    Doubtful: the server's state is unknown. Any other EngineFault: it continues as before.
    """
    try:
        await server.pause(mode)
        if mode == "retract":
            await server.abort_all()
    except ServerRefused as fault:
        await go_on(server)
        raise EngineFault(f"the old version is still served: {fault}") from fault
    except Lost as fault:
        raise Doubtful(str(fault)) from fault


async def update(server: SglangClient, order: WeightUpdate) -> None:
    """Replace the weights of a paused server. Every fault is Doubtful."""
    try:
        await _load(server, order)
        await identify(server, order)
    except Doubtful:
        raise
    except EngineFault as fault:
        raise Doubtful(str(fault)) from fault


async def _load(server: SglangClient, order: WeightUpdate) -> None:
    # The cache is flushed, so that no cached prefix of the old weights is used again. Requests that
    # continue in place still need their cache.
    flush, together = order.mode != "in_place", server.dialect.flushes_safely
    body = {
        "model_path": str(order.snapshot),
        # Without this key SGLang uses the format that the server was started with.
        "load_format": server.load_format,
        "weight_version": order.label,
        "flush_cache": flush and together,
        "abort_all_requests": False,
    }
    done, message = await server.update(body, timeout_s=order.timeout_s)
    if done and not (flush and not together):
        return
    if not done and not message.startswith(_UPDATED_ANYWAY):
        raise Doubtful(f"SGLang did not update: {message}")
    if flush:
        await server.flush()
    # If the flush failed, SGLang did not report the new weights to its HTTP process, which answers
    # `/model_info`.
    if not done:
        await server.relabel(order.label)


async def call_inside(server: SglangClient, order: WeightUpdate | None = None) -> int:
    """See `Updates`. Its directory stays that of the last load from disk, so only the label is compared."""
    if not server.dialect.calls_inside:
        raise EngineFault(f"SGLang {server.dialect.version} does not write versions into memory")
    body: Mapping[str, Any] = {"flush_cache": False}
    if order is not None:
        body = {"flush_cache": order.mode != "in_place", "weight_version": order.label}
    try:
        return await server.call_inside(
            body, timeout_s=CALL_S_MAX if order is None else order.timeout_s
        )
    except EngineFault as fault:
        if order is None and not isinstance(fault, Lost):
            raise
        raise Doubtful(str(fault)) from fault


async def identify(server: SglangClient, order: WeightUpdate) -> None:
    """Check that the server reports the version of `order`. Doubtful: it reports another one."""
    model = await server.model()
    if model.get("weight_version") != order.label or model.get("model_path") != str(order.snapshot):
        raise Doubtful(
            f"SGLang serves {model.get('weight_version')!r} from {model.get('model_path')!r}, "
            f"expected {order.label!r} from {str(order.snapshot)!r}"
        )


async def go_on(server: SglangClient) -> None:
    """Resume generation. Every fault is Doubtful."""
    try:
        await server.resume()
    except EngineFault as fault:
        raise Doubtful(str(fault)) from fault
