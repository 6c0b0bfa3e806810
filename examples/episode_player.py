"""Play episodes of an environment with the version that an engine serves, as a run's workers do."""

import json
from pathlib import Path
from typing import Any

from echo2d.core.base.model_config import end_token_ids
from echo2d.core.protocol.control_messages import Finish
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.engines.base import Engine, FinishReason, GenerateRequest
from echo2d.errors import Fault
from echo2d.tasks.episodes import EpisodeEnd, Episodes, EpisodeTurn, StepCall
from echo2d.tasks.pool import Score, TaskPool


def version_directory(run: Path, version: int) -> Path:
    """Fault: the coordinator did not keep this version."""
    if version == 0:
        return run / "model"
    for found in (run / "coordinator" / "versions").glob(f"{version}-*"):
        return found
    raise Fault(f"{run}/coordinator/versions has no version {version}; it was not kept")


class EpisodePlayer:
    """Draws the answers. max_new_tokens: of each. model: a directory with its config."""

    def __init__(self, engine: Engine, pool: TaskPool, max_new_tokens: int, model: Path) -> None:
        self._engine, self._episodes, self._tokens = engine, Episodes(pool), max_new_tokens
        ends = end_token_ids(json.loads((model / "config.json").read_text()))
        self._ends = tuple(sorted({*ends, *pool.about.stop_token_ids}))

    async def play(self, row: int, sampling: Sampling, label: str) -> Score:
        """Play the episode of one row. Fault: it failed."""
        turn: Any = await self._episodes.reset(row, row, row)
        so_far, written, turns = b"", 0, 0
        while isinstance(turn, EpisodeTurn):
            so_far = turn.given if turn.branch else so_far + turn.given
            answer, finish = await self._answer(
                GenerateRequest(
                    f"{label} {row} {turns}",
                    unpack_tokens(so_far).tolist(),
                    samples=1,
                    max_new_tokens=self._tokens,
                    sampling=sampling,
                    stop_token_ids=self._ends,
                    rng_seeds=[row],
                    written=written,
                )
            )
            packed = pack_tokens(answer)
            turn = await self._episodes.step(
                StepCall(row, turns, turn.state, so_far, packed, finish)
            )
            so_far, written, turns = so_far + packed, written + len(answer), turns + 1
        if not isinstance(turn, EpisodeEnd):
            raise Fault(f"the episode of row {row} failed: {turn}")
        return turn.score

    async def _answer(self, request: GenerateRequest) -> tuple[list[int], Finish]:
        tokens: list[int] = []
        finish: FinishReason | None = None
        async for delta in self._engine.generate(request):
            tokens += delta.tokens
            finish = delta.finish
        if finish is None or finish == "abort":
            raise Fault("the engine ended before the answer")
        return tokens, finish
