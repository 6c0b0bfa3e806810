"""SglangEngine: an engine whose model runs in an SGLang server."""

from echo2d.core.protocol.answer_end import CONTEXT_SPARE
from echo2d.engines.base import EngineOptions, GenerateRequest
from echo2d.engines.server.engine import ServerEngine, ServerKind
from echo2d.engines.server.launch import Running, ServerLaunch, servers_of
from echo2d.engines.server.weight_update import RefitMode
from echo2d.engines.sglang import weight_update
from echo2d.engines.sglang.client import SglangClient
from echo2d.engines.sglang.generate import read_chunk, request_body
from echo2d.engines.sglang.launch import SglangLaunch


def make_sglang_engines(options: EngineOptions) -> "list[SglangEngine]":
    """Make one engine for each server. OperatorFault: an option is missing or unusable."""
    return [
        SglangEngine(where, slots=options.slots, refit_mode=options.refit_mode)
        for where in servers_of(options, SglangLaunch)
    ]


def _refusal(server: SglangClient | None, request: GenerateRequest) -> str:
    if server is not None and server.dialect.deterministic and request.sampling.min_p:
        return "SGLang with --enable-deterministic-inference cannot draw with min_p: the request would end it"
    return ""


class SglangEngine(ServerEngine):
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
            SglangClient,
            weight_update,
            request_body,
            read_chunk,
            lambda tokens: tokens - CONTEXT_SPARE,
            _refusal,
        )
        super().__init__(where, kind, slots=slots, refit_mode=refit_mode, rng_seed=rng_seed)
