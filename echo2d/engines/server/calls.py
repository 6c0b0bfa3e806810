"""One generation call while it runs: its samples, and the output of each so far. No I/O."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2d.core.protocol.answer_end import OutputLimit
from echo2d.engines.base import FinishReason, GenerateRequest
from echo2d.engines.server.continuation import ReportedToken
from echo2d.engines.stream import RequestStream, SampleBuffer
from echo2d.errors import EngineFault


@dataclass(slots=True)
class GenerationCall:
    """One request while it runs."""

    request: GenerateRequest
    stream: RequestStream
    seeds: Sequence[int]
    limit: OutputLimit
    # Set once the server has the prompt's KV cache, or never will have it.
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    # The request id of each sample that the server is working on.
    rids: dict[int, str] = field(default_factory=dict)
    outputs: "list[SampleState]" = field(default_factory=list)
    aborted: bool = False
    cached_tokens: int = 0

    def put(self, sample: "SampleState") -> None:
        """Pass on what the sample has written since the last time, if anything."""
        if len(sample.buffer):
            self.stream.put(sample.buffer.take())


class SampleState:
    """One sample of a call: its output so far."""

    def __init__(self, call: GenerationCall, index: int) -> None:
        self.index = index
        self._call = call
        self._limit = call.limit
        self.seed = call.seeds[index]
        self.stop = frozenset(call.request.stop_token_ids)
        self.output: list[int] = []
        self.buffer = SampleBuffer(index)
        # Requests in a row that brought no token.
        self.fruitless = 0
        self.rewritten = (
            0  # requests whose tokens came without their experts, and are written again
        )
        # Whether its last request was cut to learn which version wrote its tokens.
        self.cut = False

    @property
    def room(self) -> int:
        """How many more tokens the sample may have."""
        return self._limit.tokens - len(self.output)

    @property
    def context_tokens(self) -> int:
        """Tokens of which the server keeps the KV cache: the prompt and the output so far."""
        return len(self._call.request.prompt) + len(self.output)

    @property
    def goes_on(self) -> bool:
        return not self._call.aborted and self.finish() is None

    @property
    def named(self) -> str | None:
        """The version that writes all its tokens; None: its request names none."""
        return self._call.request.label

    def extend(self, tokens: list[ReportedToken]) -> None:
        """EngineFault: another version than the named one wrote tokens, which are left out."""
        for each in tokens:
            if self.named not in (None, each.label):
                raise EngineFault(f"version {self.named} was dropped")
            self.output.append(each.token)
            self.buffer.add(each.token, each.logprob, each.label, each.columns)
        self.fruitless = 0 if tokens else self.fruitless

    def finish(self) -> FinishReason | None:
        """How the sample finished, judged by its tokens; None: it is not finished."""
        if self.output and self.output[-1] in self.stop:
            return "stop"
        return None if self.room else self._limit.finish
