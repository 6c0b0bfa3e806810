"""Scores the answers of an order with a version that the engine holds."""

import asyncio

from echo2d.core.base.ids import version_label
from echo2d.core.protocol.control_messages import AnswersScored, ScoreAnswers
from echo2d.engines.base import ScoringEngine


async def score_order(
    engine: ScoringEngine, order: ScoreAnswers, *, loading_s: float = 0.0
) -> AnswersScored:
    """Score an order. EngineFault: the engine does not hold the version, or an answer is malformed."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    found = await engine.score(
        order.answers,
        label=version_label(order.version, order.digest),
        replay=order.replay,
    )
    return AnswersScored(order.order, tuple(found), loop.time() - begun, loading_s)
