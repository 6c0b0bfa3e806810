"""Texts of turns over a tokenizer of bytes, for environments in text."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from echo2d.tasks.served_task import ModelFiles
from echo2d.texts.continuation import NoContinuation
from tests.support.texts import bytes_tokenizer, write_text_model

END = "<|end|>"  # ends every message; a control token
MAKE = "tests.support.turn_texts:make_turn_texts"


def end_of(tokenizer: Tokenizer) -> int:
    end = tokenizer.token_to_id(END)
    assert end is not None
    return end


def turns_tokenizer() -> Tokenizer:
    made = bytes_tokenizer()
    made.add_special_tokens([AddedToken(END, special=True)])
    return made


def write_turn_model(directory: Path) -> Path:
    """A directory with the files of a model whose environments are in text."""
    write_text_model(directory)
    (directory / "tokenizer.json").write_text(turns_tokenizer().to_str())
    return directory


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    text: str
    tool_calls: Sequence[Call]
    reasoning: str = ""


class BytesTurnTexts:
    """A message is "<role>content" and an end token; "<answer>" follows the last message."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Only this code adds control tokens; the text of a message never becomes one.
        self._tokenizer.encode_special_tokens = True
        self.end = end_of(tokenizer)

    def first(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        told = [{"role": "tools", "content": json.dumps(tools)}] if tools else []
        return self._rendered([*told, *messages])

    turn_end = None

    def caution(self) -> str:
        return ""

    def following(self, so_far: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if so_far[-1] != self.end:
            raise NoContinuation("tokens", "the answer was cut off")
        return self._rendered(messages)

    def answer(self, tokens: Sequence[int], finish: str) -> Written:
        own = tokens[:-1] if finish == "stop" else tokens
        text = self._tokenizer.decode(own, skip_special_tokens=False)
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
        return Written(
            re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL),
            [Call(**json.loads(call)) for call in calls],
        )

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            text = f"<{message['role']}>{message['content']}"
            ids += [*self._tokenizer.encode(text, add_special_tokens=False).ids, self.end]
        return ids + self._tokenizer.encode("<answer>").ids


def make_turn_texts(model: ModelFiles) -> BytesTurnTexts:
    return BytesTurnTexts(Tokenizer.from_buffer(model.files["tokenizer.json"]))


def written(text: str) -> list[int]:
    """The tokens of an answer that ends by itself."""
    tokenizer = turns_tokenizer()
    texts = BytesTurnTexts(tokenizer)
    return [*tokenizer.encode(text, add_special_tokens=False).ids, texts.end]


def read(tokens: Sequence[int]) -> str:
    return str(turns_tokenizer().decode(tokens, skip_special_tokens=False))
