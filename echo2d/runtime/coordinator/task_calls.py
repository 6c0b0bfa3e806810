"""Prompts and rewards for the core: asks the task pool and turns its answers into events.

Every DrawPrompt and every ScoreSample is answered by exactly one event, so the core never asks
twice. The pool answers each call even if a task process dies, hangs or cannot be started. An
exception that the pool does not turn into TaskFailed ends the coordinator.
"""

import asyncio
import logging
from typing import Protocol

from echo2d.core.base.bounded_dict import keep_newest
from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.core.rollouts.events import DrawPrompt, PromptDrawn, SampleScored, ScoreSample
from echo2d.tasks.base import Prompt
from echo2d.tasks.pool import Score
from echo2d.tasks.process import TaskFailed

# Prompts kept for scoring. An evicted prompt is drawn again when its sample is scored.
PROMPTS_KEPT_MAX = 4096
PROMPT_TOKENS_MAX = 1 << 17  # 512 KiB in a lease
RETRY_S_MIN = 0.1
RETRY_S_MAX = 30.0

log = logging.getLogger("echo2d.task")


class Pool(Protocol):
    """The part of `tasks.pool.TaskPool` that is used here."""

    async def prompt(self, index: int) -> Prompt | TaskFailed: ...

    async def reward(self, prompt: Prompt, output: list[int]) -> Score | TaskFailed: ...


class TaskCalls:
    """Prompts and rewards of one task."""

    def __init__(self, pool: Pool, *, vocab_size: int) -> None:
        self._pool = pool
        self._vocab_size = vocab_size
        self._prompts: dict[int, Prompt] = {}

    async def draw(self, action: DrawPrompt) -> PromptDrawn:
        """Draw a prompt, retrying with backoff until it succeeds.

        A run without prompts stands still, but the coordinator keeps serving.
        """
        delay_s = RETRY_S_MIN
        while isinstance(found := await self._prompt(action.cursor), TaskFailed):
            log.warning(
                "prompt failed cursor=%d kind=%s reason=%s", action.cursor, found.kind, found.reason
            )
            await asyncio.sleep(delay_s)
            delay_s = min(RETRY_S_MAX, 2 * delay_s)
        return PromptDrawn(action.cursor, pack_tokens(found.tokens))

    async def score(self, action: ScoreSample) -> SampleScored:
        """Score a sample once; after a failure the reward is None and the reason is given."""
        found = await self._prompt(action.cursor)
        if isinstance(found, Prompt):
            result = await self._pool.reward(found, unpack_tokens(action.tokens).tolist())
            if isinstance(result, Score):
                return SampleScored(action.group, action.sample, result.reward, "")
            found = result
        log.warning(
            "reward failed group=%d sample=%d reason=%s", action.group, action.sample, found.reason
        )
        return SampleScored(action.group, action.sample, None, f"{found.kind}: {found.reason}")

    async def _prompt(self, cursor: int) -> Prompt | TaskFailed:
        """The prompt at a cursor. A prompt that is empty, too long or out of vocabulary fails."""
        if cursor in self._prompts:
            return self._prompts[cursor]
        found = await self._pool.prompt(cursor)
        if isinstance(found, TaskFailed):
            return found
        if not 1 <= len(found.tokens) <= PROMPT_TOKENS_MAX or not all(
            map(self._is_token, found.tokens)
        ):
            return TaskFailed(
                "error",
                f"prompt {cursor}: expected 1 to {PROMPT_TOKENS_MAX} tokens, "
                f"each from 0 to {self._vocab_size - 1}",
            )
        self._prompts[cursor] = found
        keep_newest(self._prompts, PROMPTS_KEPT_MAX)
        return found

    def _is_token(self, token: object) -> bool:
        # `type` and not `isinstance`: a bool is no token.
        return type(token) is int and 0 <= token < self._vocab_size
