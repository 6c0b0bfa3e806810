"""Ends answers at stop strings, by the tokenizer of the version that is served.

    engine's tokens --text so far--> a stop string is complete: cut after this token, "stop_string"

Engines need not know stop strings: each sample is a request of its own, which is ended once its text
has a stop string. An answer ends with a whole token, so it may have a few characters after the stop
string; the task cuts them off (`tasks/served_task.py`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from echo2d.core.protocol.columns import cut_columns
from echo2d.core.protocol.control_messages import LeaseGranted
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.core.worker.events import LabelSpan
from echo2d.engines.base import SampleOutput
from echo2d.errors import EngineFault, OperatorFault
from echo2d.texts.detokenizer import Detokenizer
from echo2d.texts.model_texts import ModelTexts


class ServedTexts:
    """The tokenizer of the served version. It is made again only when one of its files has changed."""

    def __init__(self) -> None:
        self._files: Mapping[str, bytes] = {}
        self._made: tuple[Mapping[str, bytes], ModelTexts] | None = None

    def serve(self, files: Mapping[str, bytes]) -> None:
        """Take the text files of the version that is served from now on."""
        if files != self._files:
            self._files = files

    async def get(self) -> ModelTexts:
        """The tokenizer. EngineFault: the version has none that can be read."""
        source = self._files
        if self._made is None or self._made[0] is not source:
            try:
                self._made = source, await asyncio.to_thread(ModelTexts, source)
            except OperatorFault as fault:
                raise EngineFault(f"stop strings need a tokenizer: {fault}") from fault
        return self._made[1]


class StopWatch:
    """Watches one sample of a lease."""

    def __init__(self, texts: ModelTexts, lease: LeaseGranted) -> None:
        self._detokenizer = Detokenizer(texts, lease.stop_strings, special=False)
        written = unpack_tokens(lease.prompt)[len(lease.prompt) // 4 - lease.written :]
        self._detokenizer.put(written.tolist())

    def cut(self, output: SampleOutput) -> SampleOutput:
        """The output, up to the token that completes a stop string."""
        piece = self._detokenizer.put(output.tokens)
        if not piece.stopped:
            return output
        if piece.tokens == len(output.tokens) and output.finish == "stop":
            return output
        return replace(
            output,
            tokens=output.tokens[: piece.tokens],
            logprobs=output.logprobs[: piece.tokens],
            spans=_first(output.spans, piece.tokens),
            finish="stop_string",
            columns=cut_columns(tuple(output.columns), 0, piece.tokens),
        )


def _first(spans: Sequence[LabelSpan], tokens: int) -> list[LabelSpan]:
    """The spans of the first tokens. Positions count from the sample's first output token."""
    if not spans:
        return []
    end = spans[0].start + tokens
    return [replace(span, end=min(span.end, end)) for span in spans if span.start < end]
