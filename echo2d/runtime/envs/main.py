"""`echo2d envs`: the process that plays environments of other packages for a run."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo2d.net.security.auth import read_token_file
from echo2d.runtime.envs.gateway_link import GatewayLink
from echo2d.runtime.envs.playing import EpisodeWorkers, PlayedTotals
from echo2d.runtime.envs.ticket_endpoint import TicketEndpoint
from echo2d.runtime.envs.verifiers_player import PolicyClient, load_player, require_verifiers
from echo2d.runtime.process.lifecycle import Ending, outcome

log = logging.getLogger("echo2d.envs")


@dataclass(frozen=True, slots=True)
class EnvsOptions:
    """The options of `echo2d envs`."""

    environment: str
    gateway: str
    secret: Path
    tokenizer: str
    task: str | None = None
    workers: int = 16
    arguments: Mapping[str, Any] = field(default_factory=dict)
    renderer: Mapping[str, Any] | None = None


async def run_envs(options: EnvsOptions, show: Callable[[PlayedTotals], None]) -> int:
    """Play until a signal. Returns the exit code. show: gets the totals as they change."""
    if not log.isEnabledFor(logging.DEBUG):
        # These loggers write a line for every call or episode at level info.
        for name in ("aiohttp.access", "httpx", "verifiers"):
            logging.getLogger(name).setLevel(logging.WARNING)
    # Import from the working directory, as `python -m` does: the environment may be a module there.
    if "" not in sys.path:
        sys.path.insert(0, "")
    require_verifiers()
    link = GatewayLink(options.gateway, read_token_file(options.secret))
    with Ending() as ending:
        try:
            async with link, TicketEndpoint(link) as endpoint:
                client = PolicyClient(endpoint.url, options.tokenizer, options.renderer)
                # Load it in this thread, because classic environments install signal handlers.
                player = load_player(options.environment, options.arguments, client)
                async with player.serving():
                    log.info("playing environment=%s", options.environment)
                    workers = EpisodeWorkers(link, endpoint, player, task=options.task, show=show)
                    ending.by_signals(workers.stop)
                    await workers.run(options.workers)
        except BaseExceptionGroup as group:
            return outcome(group)
    return 0
