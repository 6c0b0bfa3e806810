"""Refits a running vLLM server in an order that keeps every token's version known (I2).

    pause --> load --> label --> identify --> resume
      |        |         |          |           |
      | refused+---------+----------+-----------+--> doubtful: weights unknown (I3)
      +--> the old version is still served

- retract and abort: the pause ends the requests. Their last chunks report who wrote their tokens, and each continues as
  a new request under the new version.
- in_place: they continue on the KV cache of the old weights, and report versions when they end.

After a load that fails halfway, vLLM's layers wait for the rest of it and would take words of two versions. So every
fault after the pause is doubtful, and our extension refuses all further loads. vLLM's label is a call of its
own, with no check of the weights behind it; our extension says which directory its worker has loaded.
"""

from echo2d.engines.server.http_client import CALL_S_MAX, Lost, ServerRefused
from echo2d.engines.server.weight_update import Doubtful, RefitMode, WeightUpdate
from echo2d.engines.vllm.client import VllmClient
from echo2d.errors import EngineFault


async def started(server: VllmClient, order: WeightUpdate) -> None:
    """Label the weights with which the server started. Doubtful: it has others."""
    try:
        await server.relabel(order.label)
    except EngineFault as fault:
        raise Doubtful(str(fault)) from fault
    await identify(server, order)


async def stop(server: VllmClient, mode: RefitMode) -> None:
    """Stop generation for a refit or a hold.

    Doubtful: the server's state is unknown. Any other EngineFault: it continues as before.
    """
    stays = mode == "in_place"
    try:
        await server.pause("keep" if stays else "abort", clears=not stays)
    except ServerRefused as fault:
        await go_on(server)
        raise EngineFault(f"the old version is still served: {fault}") from fault
    except Lost as fault:
        raise Doubtful(str(fault)) from fault


async def update(server: VllmClient, order: WeightUpdate) -> None:
    """Replace the weights of a paused server. Every fault is Doubtful."""
    files = [name for name, *_ in order.files if name.endswith(".safetensors")]
    try:
        await server.load_weights(order.snapshot, files, timeout_s=order.timeout_s)
        await server.relabel(order.label)
        await identify(server, order)
    except Doubtful:
        raise
    except EngineFault as fault:
        raise Doubtful(str(fault)) from fault


async def call_inside(server: VllmClient, order: WeightUpdate | None = None) -> int:
    """See `Updates`. The pause has dropped the cached prefixes."""
    try:
        processes = await server.call_inside(
            timeout_s=CALL_S_MAX if order is None else order.timeout_s
        )
        if order is not None:
            await server.relabel(order.label)
    except ServerRefused as fault:
        raise EngineFault(str(fault)) from fault
    except Lost as fault:
        raise Doubtful(str(fault)) from fault
    return processes


async def identify(server: VllmClient, order: WeightUpdate) -> None:
    """Check that the server reports the version of `order`. Doubtful: it reports another one."""
    label, directory = await server.weights(), await server.directory()
    if label != order.label or directory != str(order.snapshot):
        raise Doubtful(
            f"vLLM serves {label!r} from {directory!r}, expected {order.label!r} from {str(order.snapshot)!r}"
        )


async def go_on(server: VllmClient) -> None:
    """Resume generation. Every fault is Doubtful."""
    try:
        await server.resume()
    except EngineFault as fault:
        raise Doubtful(str(fault)) from fault
