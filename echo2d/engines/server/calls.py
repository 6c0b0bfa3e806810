"""One generation call while it runs: its samples, what each has so far, and how it is asked of the server. No I/O."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

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


def request_body(rid: str, label: str, call: GenerationCall, sample: SampleState) -> dict[str, Any]:
    request = call.request
    return {
        "rid": rid,
        "input_ids": [*request.prompt, *sample.output],
        "sampling_params": {
            "max_new_tokens": sample.room,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": -1,
            "stop_token_ids": sorted(sample.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": ((call.seed + sample.index) * 1_000_003 + len(sample.output) * 7919)
            & 0x7FFFFFFF,
        },
        "return_logprob": True,
        "cache_salt": label,
        "stream": True,
        "no_logs": True,
    }
