"""Collects the output of one choice, and formats it as OpenAI's JSON or as vLLM's `generate`.

Every choice names the versions of its tokens in `version_spans`, a list of {start, end, version,
digest} over all its output tokens so far, the end token included.
Not here: the source of the tokens, and HTTP.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from echo2d.core.gateway.events import ChoiceGrew
from echo2d.core.protocol.control_messages import Finish, VersionSpan
from echo2d.core.protocol.trajectory import unpack_logprobs, unpack_tokens
from echo2d.texts.detokenizer import Detokenizer
from echo2d.texts.model_texts import ModelTexts


@dataclass(frozen=True, slots=True)
class OutputStep:
    """What one event adds to a choice.

    cut: a stop text has come while the engine still generates, so the choice must be stopped.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish | None
    cut: bool


class ChoiceOutput:
    """The output of one choice: text, tokens, logprobs, version spans and how it finished."""

    def __init__(
        self, index: int, texts: ModelTexts, stops: Sequence[str], *, special: bool
    ) -> None:
        self.index = index
        self._texts = texts
        self._reader = Detokenizer(texts, stops, special=special)
        self._spans: tuple[VersionSpan, ...] = ()
        self.text = ""
        self.tokens = array("i")
        self.logprobs = array("f")
        self.finish: Finish | None = None

    def take(self, event: ChoiceGrew) -> OutputStep:
        tokens, logprobs = (
            unpack_tokens(event.tokens).tolist(),
            unpack_logprobs(event.logprobs).tolist(),
        )
        # After a "stop" the last token is the end token, which is no text.
        readable = tokens[:-1] if event.finish == "stop" else tokens
        piece = self._reader.put(readable)
        if piece.stopped:
            tokens, logprobs = tokens[: piece.tokens], logprobs[: piece.tokens]
        self.finish = "stop" if piece.stopped else event.finish
        text = piece.text + (self._reader.end() if self.finish and not piece.stopped else "")
        self.text += text
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self._spans = event.spans
        return OutputStep(
            text,
            tuple(tokens),
            tuple(logprobs),
            self.finish,
            piece.stopped and event.finish is None,
        )

    @property
    def spans(self) -> list[dict[str, Any]]:
        count = len(self.tokens)
        return [
            {
                "start": span.start,
                "end": min(span.end, count),
                "version": span.version,
                "digest": span.digest.hex(),
            }
            for span in self._spans
            if span.start < count
        ]

    def facts(self, *, ids: bool) -> dict[str, Any]:
        """The fields common to all formats. ids: include the token ids."""
        return {"version_spans": self.spans, **({"token_ids": self.tokens.tolist()} if ids else {})}

    def record(self) -> dict[str, Any]:
        """The whole choice, for the call's record."""
        told = {"text": self.text, "tokens": self.tokens, "logprobs": self.logprobs}
        return {**told, "finish": self.finish, "version_spans": self.spans}

    # --- OpenAI's chat format

    def message(self, *, logprobs: bool) -> dict[str, Any]:
        content = self._chat_logprobs(self.tokens, self.logprobs) if logprobs else None
        message = {"role": "assistant", "content": self.text, "refusal": None}
        return {
            "index": self.index,
            "message": message,
            "logprobs": content,
            "finish_reason": self.finish,
        }

    def delta(self, step: OutputStep, *, first: bool, logprobs: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        content = self._chat_logprobs(step.tokens, step.logprobs) if logprobs else None
        delta = {**role, "content": step.text} if first or step.text else {}
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": content,
            "finish_reason": step.finish,
        }

    # --- OpenAI's completion format

    def completion(self, *, logprobs: bool) -> dict[str, Any]:
        listed = self._legacy_logprobs(self.tokens, self.logprobs, 0) if logprobs else None
        return {
            "index": self.index,
            "text": self.text,
            "logprobs": listed,
            "finish_reason": self.finish,
        }

    def completion_chunk(self, step: OutputStep, *, logprobs: bool) -> dict[str, Any]:
        offset = len(self.text) - len(step.text)
        listed = self._legacy_logprobs(step.tokens, step.logprobs, offset) if logprobs else None
        return {
            "index": self.index,
            "text": step.text,
            "logprobs": listed,
            "finish_reason": step.finish,
        }

    # --- vLLM's generate format

    def generated(self, *, logprobs: bool) -> dict[str, Any]:
        content = [
            {"token": f"token_id:{t}", "logprob": p}
            for t, p in zip(self.tokens, self.logprobs, strict=True)
        ]
        return {
            "index": self.index,
            "token_ids": self.tokens.tolist(),
            "logprobs": {"content": content} if logprobs else None,
            "finish_reason": self.finish,
        }

    # --- inside

    def _read_alone(self, tokens: Iterable[int]) -> list[str]:
        return [self._texts.decode([token]) for token in tokens]

    def _chat_logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        content = []
        for text, logprob in zip(self._read_alone(tokens), logprobs, strict=True):
            content.append(
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": list(text.encode()),
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}

    def _legacy_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], offset: int
    ) -> dict[str, Any]:
        texts = self._read_alone(tokens)
        offsets = list(accumulate(map(len, texts), initial=offset))[: len(texts)]
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }


def usage_of(prompt_tokens: int, outputs: Iterable[ChoiceOutput]) -> dict[str, int]:
    """OpenAI's token counts, end tokens included."""
    completion = sum(len(output.tokens) for output in outputs)
    total = prompt_tokens + completion
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion, "total_tokens": total}
