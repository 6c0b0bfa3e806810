"""Collects the output of one choice, and formats it as OpenAI's JSON or as vLLM's `generate`.

Every choice names the versions of its tokens in `version_spans`, a list of {start, end, version,
digest} over all its output tokens so far, the end token included. `version_first` and `version_last`
are the versions of its first and last token.
Not here: the source of the tokens, and HTTP.
"""

import json
import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from echo2d.core.protocol.control_messages import Finish, VersionSpan
from echo2d.core.protocol.trajectory import unpack_logprobs, unpack_tokens
from echo2d.core.work.calls.events import ChoiceGrew
from echo2d.texts.detokenizer import Detokenizer
from echo2d.texts.model_texts import ModelTexts
from echo2d.texts.tool_calls import AnswerTurn, WrittenCall

CallReader = Callable[[str], AnswerTurn]


@dataclass(frozen=True, slots=True)
class OutputStep:
    """What one event adds to a choice.

    cut: the text contains a stop text and the engine still generates, so the choice must be stopped.
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
        # With "stop" the last token is the end token, which is not part of the text.
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
        return {**self.versions(), **({"token_ids": self.tokens.tolist()} if ids else {})}

    def versions(self) -> dict[str, Any]:
        """The versions of all tokens, of the first token and of the last token."""
        spans = self.spans
        first, last = (spans[0]["version"], spans[-1]["version"]) if spans else (None, None)
        return {"version_spans": spans, "version_first": first, "version_last": last}

    def record(self) -> dict[str, Any]:
        """The whole choice, for the call's record."""
        told = {"text": self.text, "tokens": self.tokens, "logprobs": self.logprobs}
        return {**told, "finish": self.finish, "version_spans": self.spans}

    # --- OpenAI's chat format

    def message(self, *, logprobs: bool, read: CallReader | None) -> dict[str, Any]:
        """read: reads the tool calls of its text; None: there are no tools."""
        content = self._chat_logprobs(self.tokens, self.logprobs) if logprobs else None
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        choice = {"index": self.index, "logprobs": content, "finish_reason": self.finish}
        if read is not None:
            said, facts = self._with_calls(read)
            message, choice = {**message, **said}, {**choice, **facts}
        return {**choice, "message": message}

    def delta(
        self, step: OutputStep, *, first: bool, logprobs: bool, read: CallReader | None
    ) -> dict[str, Any]:
        """read: as in `message`. With it the text is sent at the end, because it may contain tool calls."""
        delta = {"role": "assistant"} if first else {}
        content = self._chat_logprobs(step.tokens, step.logprobs) if logprobs else None
        choice = {"index": self.index, "logprobs": content, "finish_reason": step.finish}
        if read is None and (first or step.text):
            delta["content"] = step.text
        elif read is not None and step.finish is not None:
            said, facts = self._with_calls(read)
            for number, call in enumerate(said.get("tool_calls", [])):
                call["index"] = number
            delta, choice = {**delta, **said}, {**choice, **facts}
        return {**choice, "delta": delta}

    def _with_calls(self, read: CallReader) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the tool calls in the text add to the message, and to the choice."""
        answer = read(self.text)
        said: dict[str, Any] = {"content": answer.text}
        facts: dict[str, Any] = {}
        if answer.reasoning:
            said["reasoning_content"] = answer.reasoning
        if answer.unparsed:
            facts["unparsed_tool_calls"] = list(answer.unparsed)
        if answer.tool_calls:
            said["content"] = answer.text or None
            said["tool_calls"] = [_call_of(call) for call in answer.tool_calls]
            facts |= {"finish_reason": "tool_calls"} if self.finish == "stop" else {}
        return said, facts

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


def _call_of(call: WrittenCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def usage_of(prompt_tokens: int, outputs: Iterable[ChoiceOutput]) -> dict[str, int]:
    """OpenAI's token counts, end tokens included."""
    completion = sum(len(output.tokens) for output in outputs)
    total = prompt_tokens + completion
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion, "total_tokens": total}
