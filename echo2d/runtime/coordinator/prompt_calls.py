"""Draws prompts for the core: asks a task or environment until it returns a prompt, ends, or fails for good."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from echo2d.core.base.canonical import digest_of
from echo2d.core.protocol.trajectory import Attachment, PromptTag, Source, unpack_tokens
from echo2d.core.work.events import DrawPrompt, PromptDrawn, PromptFailed, PromptsEnded
from echo2d.tasks.pool import TaskPrompt
from echo2d.tasks.process import TaskFailed

PROMPT_TOKENS_MAX = 1 << 17  # 512 KiB in a lease
_RETRY_S_MIN = 0.1
_RETRY_S_MAX = 30.0

log = logging.getLogger("echo2d.task")


class PromptSource(Protocol):
    """What makes the prompts of one task."""

    async def prompt(self, index: int) -> TaskPrompt | TaskFailed: ...


@dataclass(frozen=True, slots=True)
class PromptCalls:
    """Draws the prompts of one task."""

    source: PromptSource
    name: str  # of the task, in metrics and trajectories
    vocab_size: int
    # Whether a prompt is retried without limit, not only twice, if its process dies or hangs.
    patient: bool = True
    # Describes a failure for people.
    told: Callable[[TaskFailed], str] = str

    async def draw(self, action: DrawPrompt) -> PromptDrawn | PromptFailed | PromptsEnded:
        """Draw a prompt, retrying with backoff until it succeeds.

        A prompt with an error is tried twice more, and then fails. A run without prompts stops, but the
        coordinator keeps serving.
        """
        delay_s, errors = _RETRY_S_MIN, 0
        while isinstance(found := await self._prompt(action.cursor), TaskFailed):
            if found.kind == "end":
                return PromptsEnded(action.cursor, self.name)
            errors += found.kind == "error" or not self.patient
            # The third error is final.
            if errors > 2:
                return PromptFailed(action.cursor, self.told(found), self.name)
            log.warning(
                "prompt failed cursor=%d kind=%s reason=%s",
                action.cursor,
                found.kind,
                self.told(found),
            )
            await asyncio.sleep(delay_s)
            delay_s = min(_RETRY_S_MAX, 2 * delay_s)
        tags = tuple(PromptTag(name, value) for name, value in sorted(found.tags.items()))
        attached = sorted(found.attachments.items())
        source = Source(
            self.name,
            found.row,
            tuple(Attachment(name, digest_of(each), len(each)) for name, each in attached),
        )
        contents = tuple(content for _, content in attached)
        return PromptDrawn(action.cursor, found.tokens, source, tags, contents)

    async def _prompt(self, cursor: int) -> TaskPrompt | TaskFailed:
        """The prompt at a cursor. A prompt that is empty, too long or out of vocabulary fails."""
        found = await self.source.prompt(cursor)
        if isinstance(found, TaskFailed):
            return found
        if tokens_fit(found.tokens, self.vocab_size):
            return found
        return TaskFailed(
            "error",
            f"prompt {cursor}: expected 1 to {PROMPT_TOKENS_MAX} tokens, "
            f"each from 0 to {self.vocab_size - 1}",
        )


def tokens_fit(packed: bytes, vocab_size: int) -> bool:
    """Whether these are 1 to PROMPT_TOKENS_MAX tokens (int32) of the vocabulary."""
    tokens = unpack_tokens(packed)
    if not 1 <= len(tokens) <= PROMPT_TOKENS_MAX:
        return False
    return bool(0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size)
