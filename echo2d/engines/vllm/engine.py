"""VllmEngine: an engine whose model runs in a vLLM server."""

from typing import Any

from echo2d.engines.base import EngineOptions, GenerateRequest
from echo2d.engines.server.engine import ServerEngine, ServerKind
from echo2d.engines.server.launch import Running, ServerLaunch, servers_of
from echo2d.engines.server.weight_update import RefitMode
from echo2d.engines.vllm import weight_update
from echo2d.engines.vllm.client import VllmClient
from echo2d.engines.vllm.generate import read_chunk, request_body
from echo2d.engines.vllm.launch import VllmLaunch


def make_vllm_engines(options: EngineOptions) -> "list[VllmEngine]":
    """Make one engine for each server. OperatorFault: an option is missing or unusable."""
    return [
        VllmEngine(where, slots=options.slots, refit_mode=options.refit_mode)
        for where in servers_of(options, VllmLaunch)
    ]


class VllmEngine(ServerEngine):
    """See `ServerEngine`."""

    def __init__(
        self,
        where: ServerLaunch | Running,
        *,
        slots: int = 64,
        refit_mode: RefitMode = "retract",
        rng_seed: int | None = None,
    ) -> None:
        kind = ServerKind(
            VllmClient, weight_update, request_body, read_chunk, lambda tokens: tokens, _refusal
        )
        super().__init__(where, kind, slots=slots, refit_mode=refit_mode, rng_seed=rng_seed)


def _refusal(server: Any, request: GenerateRequest) -> str:
    assert isinstance(server, VllmClient)
    if server.extended or not request.sampling.cuts:
        return ""
    return (
        "vLLM gives logprobs after top_p, top_k and min_p only; start its server with "
        "--worker-extension-cls of echo2d, or let the worker start it"
    )
