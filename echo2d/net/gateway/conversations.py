"""Turns an agent's chat call into tokens that continue the turns before it.

    the messages of the last call, its answer, new ones --> all tokens so far + the new messages alone
    any other messages                                  --> all of them rendered: a branch

An answer that the agent sends back unchanged keeps the tokens that were written, even if its text has other
tokenizations. A text that the agent has changed never counts as written by a version.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from blake3 import blake3

from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.events import StepEnvironment
from echo2d.net.gateway.episodes import HeardMessages, Spoken, asked, last_turn
from echo2d.net.gateway.responses import CallReader, ChoiceOutput
from echo2d.texts.model_texts import ModelTexts
from echo2d.texts.turns import NoContinuation, TurnTexts

ChatMessages = Sequence[Mapping[str, Any]]
# Combinations of template options and tools for which the probed templates are kept.
TURN_TEXTS_MAX = 16


class Conversation:
    """A chat call's messages.

    first: the tokens of all messages rendered, int32. read: as in `ChoiceOutput.message`.
    options: of the template, with the tools.
    """

    def __init__(
        self,
        texts: ModelTexts,
        messages: ChatMessages,
        options: Mapping[str, Any],
        first: bytes,
        read: CallReader | None,
    ) -> None:
        self._texts, self._messages, self._options = texts, messages, options
        self._first, self._read = first, read

    def spoken(self, task: TaskRules, order: StepEnvironment, heard: HeardMessages) -> Spoken:
        """The tokens of this call, which follows the turn `order`. Blocking.

        heard: the number and the hash of the messages of the call before.
        """
        count, before = heard
        now = len(self._messages), digest_of(self._messages, self._options)
        if order.turn and now == heard:
            return Spoken(asked(order), *now)
        reason = ""
        if order.turn and count:
            reason = "rewritten"
            if self._continues(task, order, count, before):
                so_far = order.prompt + order.output.branch
                new = self._messages[count + 1 :]
                try:
                    turns = _turn_texts(self._texts, json.dumps(self._options), task)
                    given = turns.following(unpack_tokens(so_far).tolist(), new)
                    return Spoken(so_far + pack_tokens(given), *now)
                except NoContinuation as fault:
                    reason = fault.reason
        return Spoken(self._first, *now, reason)

    def _continues(
        self, task: TaskRules, order: StepEnvironment, count: int, before: bytes
    ) -> bool:
        """Whether the messages begin with those of the last call and its answer."""
        messages = self._messages
        if len(messages) < count + 2 or digest_of(messages[:count], self._options) != before:
            return False
        answer = ChoiceOutput(0, self._texts, task.stop_strings, special=False)
        answer.take(last_turn(order))
        said = answer.message(logprobs=False, read=self._read)["message"]
        return plainly(said) == plainly(messages[count])


def digest_of(messages: ChatMessages, options: Mapping[str, Any]) -> bytes:
    """A hash of what the messages say, and of the template's other input."""
    said = [[plainly(message) for message in messages], dict(options)]
    return blake3(json.dumps(said, sort_keys=True).encode()).digest(16)


def plainly(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the ids of its calls, and without the reasoning, which clients leave out."""
    calls = [
        [call["function"]["name"], _parsed(call["function"]["arguments"])]
        for call in message.get("tool_calls") or []
    ]
    kept = {key: message[key] for key in ("role", "name") if message.get(key)}
    return {**kept, "content": message.get("content") or "", "calls": calls}


def _parsed(arguments: str) -> Any:
    """The parsed JSON, because clients format JSON in their own way. A text that is not JSON is returned unchanged."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


@lru_cache(maxsize=TURN_TEXTS_MAX)
def _turn_texts(texts: ModelTexts, options: str, task: TaskRules) -> TurnTexts:
    return TurnTexts(
        texts,
        options=json.loads(options),
        end_token_ids=task.stop_token_ids,
        stops=task.stop_strings,
    )
