"""Draws the samples of clients of the Tinker API by calls of the gateway.

    DrawSample --> calls of at most CHOICES_MAX choices, by exactly one version --> tokens --> SampleEnded

A stop text is part of a sequence, as the API has it: the sequence ends at the token that completes the text.
Not here: which sample is next, and which version is served (`core/tinker/samplers`).
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from blake3 import blake3

from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.core.tinker.events import DrawSample, SampleEnded, SampleOrder
from echo2d.core.tinker.futures import Failed, FutureId
from echo2d.core.work.calls.events import CallAsked, CallId, CallRefused, ChoiceGrew
from echo2d.core.work.calls.open_calls import CHOICES_MAX
from echo2d.net.gateway.errors import Unread

# A stop text lies within this many tokens, and those that come together.
STOP_TOKENS_MAX = 128
# What the gateway says of calls that another try may answer.
_AGAIN = ("busy", "version", "late", "failed", "revoked")

Decode = Callable[[Sequence[int]], str]

log = logging.getLogger("echo2d.coordinator")


class _RefusedError(Exception):
    def __init__(self, refused: CallRefused) -> None:
        super().__init__(refused.detail)
        self.refused = refused


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)
    # It ends with a stop text.
    stopped: bool = False
    # Why it has ended. It may be trained on only then.
    finish: str | None = None

    def cut_at_stop(self, known: int, stops: Sequence[str], decode: Decode) -> bool:
        """Cut it after the first token that completes a stop text. Returns whether it has one.

        known: its first tokens, which have none.
        """

        def stopped(end: int) -> bool:
            text = decode(self.tokens[max(0, known - STOP_TOKENS_MAX) : end])
            return any(stop in text for stop in stops)

        if not stopped(len(self.tokens)):
            return False
        for end in range(known + 1, len(self.tokens) + 1):
            if stopped(end):
                del self.tokens[end:]
                del self.logprobs[4 * end :]
                self.stopped = True
                break
        return self.stopped


class _OpenCall(Protocol):
    async def next(self) -> ChoiceGrew | CallRefused: ...

    async def stop(self, choice: int) -> None: ...


class CallsOfGateway(Protocol):
    def open(
        self, make: Callable[[CallId], CallAsked]
    ) -> AbstractAsyncContextManager[_OpenCall]: ...


class SampleDrawer:
    """decode: the text of token ids. tell: puts an event into the core's mailbox."""

    def __init__(
        self,
        gateway: CallsOfGateway,
        decode: Decode,
        tell: Callable[[SampleEnded], Coroutine[Any, Any, None]],
    ) -> None:
        self._gateway, self._decode, self._tell = gateway, decode, tell
        self._tasks: dict[FutureId, asyncio.Task[None]] = {}

    def draw(self, action: DrawSample, tasks: asyncio.TaskGroup) -> None:
        """Draw this in a task, which tells the core."""

        async def run() -> None:
            try:
                ended = await self._drawn(action)
            finally:
                self._tasks.pop(action.future, None)
            await self._tell(ended)

        self._tasks[action.future] = tasks.create_task(run())

    def stop(self, future: FutureId) -> None:
        """Stop drawing this sample, which may have ended already."""
        if (task := self._tasks.pop(future, None)) is not None:
            task.cancel()

    async def _drawn(self, action: DrawSample) -> SampleEnded:
        counts = _shares(action.order.count)
        refused: CallRefused | None = None
        unread = False
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [
                    tasks.create_task(self._call(action, count, sum(counts[:place])))
                    for place, count in enumerate(counts)
                ]
        except* _RefusedError as errors:
            refused = next(
                each.refused for each in errors.exceptions if isinstance(each, _RefusedError)
            )
        except* Unread:
            # This process stood still for so long that its own queue was full.
            unread = True
        if unread:
            failed = Failed("the coordinator was too busy to read the sample", "server")
            return SampleEnded(action.future, failed, again=True)
        if refused is not None:
            failed = Failed(f"the sample was not drawn: {refused.detail}", "server")
            gone = refused.code in ("version", "revoked")
            return SampleEnded(action.future, failed, again=refused.code in _AGAIN, gone=gone)
        # Only runs with [tinker] have protobuf.
        from echo2d.tinker.wire import SampledTokens, write_sample_result

        found = [
            SampledTokens(
                pack_tokens(each.tokens),
                bytes(each.logprobs),
                each.finish == "length" and not each.stopped,
            )
            for call in calls
            for each in call.result()
        ]
        tokens = sum(len(each.tokens) for call in calls for each in call.result())
        return SampleEnded(action.future, write_sample_result(found), tokens=tokens)

    async def _call(self, action: DrawSample, count: int, first: int) -> list[_Sequence]:
        """Draw `count` sequences; `first` were drawn by other calls."""
        order, found = action.order, [_Sequence() for _ in range(count)]
        async with self._gateway.open(lambda number: _asked(action, number, count, first)) as call:
            while any(each.finish is None for each in found):
                grown = await call.next()
                if isinstance(grown, CallRefused):
                    raise _RefusedError(grown)
                sequence = found[grown.choice]
                sequence.finish = grown.finish
                if sequence.stopped:
                    continue
                known = len(sequence.tokens)
                sequence.tokens += unpack_tokens(grown.tokens).tolist()
                sequence.logprobs += grown.logprobs
                stopped = order.stops and sequence.cut_at_stop(known, order.stops, self._decode)
                if stopped and grown.finish is None:
                    await call.stop(grown.choice)
        return found


def _asked(action: DrawSample, number: CallId, count: int, first: int) -> CallAsked:
    order: SampleOrder = action.order
    # An audit draws the tokens again, by the same seed.
    seed = secrets.randbits(48) if order.rng_seed is None else _seed_of(order.rng_seed) + first
    return CallAsked(
        number,
        action.caller,
        order.prompt,
        count,
        order.tokens_max,
        order.sampling,
        order.stop_token_ids,
        seed,
        action.version,
        action.future,
        action.version,
        trained=True,
    )


def _seed_of(rng_seed: int) -> int:
    """The seed of the first sequence; those of the others follow it. So those of seeds side by side do not overlap."""
    return int.from_bytes(blake3(str(rng_seed).encode()).digest(6), "little")


def _shares(count: int) -> list[int]:
    """How many sequences each call draws."""
    whole, rest = divmod(count, CHOICES_MAX)
    return [CHOICES_MAX] * whole + [rest] * (rest > 0)
