"""One generation call while it runs: its samples, and what each has so far. No I/O."""

import asyncio
from dataclasses import dataclass, field

from echo2d.engines.base import FinishReason, GenerateRequest
from echo2d.engines.server.continuation import ReportedToken
from echo2d.engines.stream import RequestStream, SampleBuffer


@dataclass(slots=True)
class GenerationCall:
    """One request while it runs."""

    request: GenerateRequest
    stream: RequestStream
    seed: int
    begun: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # the prompt's KV is there, or never will be
    rids: dict[int, str] = field(default_factory=dict)  # of each sample that the server has
    outputs: "list[SampleState]" = field(default_factory=list)
    aborted: bool = False
    cached_tokens: int = 0


class SampleState:
    """One continuation: what it has so far."""

    def __init__(self, call: GenerationCall, index: int, eos: frozenset[int]) -> None:
        self._request = call.request
        self.index = index
        self.stop = eos.union(call.request.stop_token_ids)
        self.output: list[int] = []
        self.buffer = SampleBuffer(index)
        self.fruitless = 0

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._request.max_new_tokens - len(self.output)

    def extend(self, tokens: list[ReportedToken]) -> None:
        for each in tokens:
            self.output.append(each.token)
            self.buffer.add(each.token, each.logprob, each.label)
        self.fruitless = 0 if tokens else self.fruitless

    def finish(self) -> FinishReason | None:
        """By what it has, whatever cut it."""
        if self.output and self.output[-1] in self.stop:
            return "stop"
        return None if self.room else "length"
