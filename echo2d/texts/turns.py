"""The prompts of a conversation with several turns, as tokens that only grow.

    first prompt | answer (written) | given | answer (written) | given | ...

The next prompt consists of the last prompt, the tokens that the model wrote, and a rendering of the new
messages only. Nothing that an engine has read or written is ever tokenized again, because a text does not
determine the tokens that it came from. The *given* tokens begin with those that the chat template puts after an
answer (its end token if the model did not write it, then often an end of line), and end where the next answer
begins.

A template that changes earlier text, for example by dropping the reasoning of earlier answers, is
found by `template_probe` and refused: NoContinuation. If the package `renderers` knows the model, it
is used in place of the template.
Not here: which tokens are trained on, and the messages of environments.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from echo2d.core.protocol.control_messages import Finish
from echo2d.texts.continuation import NoContinuation
from echo2d.texts.model_renderer import model_renderer
from echo2d.texts.model_texts import ModelTexts, UnusableText
from echo2d.texts.plain_contents import (
    RenderedPiece,
    encode_pieces,
    encode_prompt,
    for_template,
)
from echo2d.texts.template_probe import (
    Messages,
    TemplateProbe,
    around_answer,
    behind_answer,
    ignores_tools,
    opens_reasoning,
    turn_end,
)
from echo2d.texts.tool_calls import END_THINK, THINK, AnswerTurn, call_form, read_answer

__all__ = ["AnswerTurn", "Demonstration", "NoContinuation", "TurnTexts"]

# A longer row of equal roles is probed as one of this length.
EQUAL_ROLES_MAX = 3


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation that others wrote, in the tokens that it would have as an episode of the model."""

    prompt: list[int]
    output: list[int]  # from the first answer that counts to the end token of the last one
    given: tuple[tuple[int, int], ...]  # [start, end) of the output's tokens between two answers
    whole: bool  # whether all answers count; otherwise only the last one


class TurnTexts:
    """The turns of conversations with one model. Blocking; many conversations may share it.

    options: further variables of the chat template. end_token_ids: tokens that end an answer,
    besides the tokenizer's special ones. stops: texts at which an answer may end ("stop_string"),
    which are not part of it. model: its public name, such as "Qwen/Qwen3-4B", by which
    the package `renderers` knows it.
    """

    def __init__(
        self,
        texts: ModelTexts,
        *,
        options: Mapping[str, Any] | None = None,
        end_token_ids: Iterable[int] = (),
        stops: Sequence[str] = (),
        model: str = "",
    ) -> None:
        self._texts = texts
        self._options = dict(options or {})
        own_ends = tuple(end_token_ids)
        self._ends, self._end = texts.special.union(own_ends), next(iter(own_ends), None)
        self._stops = tuple(stops)
        self._form = call_form(texts.template)
        self._thinking = opens_reasoning(texts, self._options)
        self._probes: dict[tuple[str, ...], TemplateProbe | NoContinuation] = {}
        self._renderer = model_renderer(texts, model, self._options)

    def first(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The tokens of the first prompt, up to the beginning of the answer.

        UnusableText: the chat template refuses these messages.
        """
        options = {**self._options, "tools": list(tools)} if tools else self._options
        return encode_prompt(self._texts, messages, options)

    def caution(self) -> str:
        """A warning if the first prompt of an environment with tools lacks them; empty: none."""
        if self._renderer is not None or not ignores_tools(self._texts, self._options):
            return ""
        return (
            "the model's chat template leaves out tools, so the model never sees them: use a template "
            "that renders them, or describe them in a message"
        )

    @property
    def turn_end(self) -> int | None:
        """The special token that ends a turn; None: there is none."""
        return turn_end(self._texts, self._options)

    def following(self, so_far: Sequence[int], messages: Messages) -> list[int]:
        """The given tokens that come after so_far, up to the beginning of the next answer.

        so_far: the first prompt and all written and given tokens, including the end token of the last
        answer if the model wrote one. NoContinuation: the conversation cannot go on like this.
        """
        messages = for_template(messages)
        roles = [str(message.get("role")) for message in messages]
        if not roles or "assistant" in roles:
            raise NoContinuation("messages", "expected messages of a user, a system or tools")
        if self._renderer is not None:
            return self._renderer.following(so_far, messages)
        probe = self._probe(_kind(roles))
        if not probe.keeps_reasoning and END_THINK in self._texts.decode(so_far):
            raise NoContinuation("append_only", "the chat template drops an answer's reasoning")
        try:
            behind = behind_answer(self._texts, messages, self._options)
            given = encode_pieces(self._texts, behind)
        except UnusableText as fault:
            raise NoContinuation("template", fault.detail) from fault
        last = list(so_far[-1:])
        return given[1:] if last == given[:1] and self._ends.issuperset(last) else given

    def answer(self, tokens: Sequence[int], finish: Finish) -> AnswerTurn:
        """Read an answer from its written tokens, the end token included if there is one."""
        if self._renderer is not None:
            said = self._renderer.answer(tokens)
        else:
            text = self._texts.decode(tokens[:-1] if finish == "stop" else tokens)
            said = read_answer(text, self._form, thinking=self._thinking)
        if finish != "stop_string":
            return said
        # The text is cut after the calls are read, because the stop may be the end of a tool call.
        ends = [place for stop in self._stops if (place := said.text.find(stop)) >= 0]
        return replace(said, text=said.text[: min(ends, default=None)])

    def demonstration(self, messages: Messages) -> Demonstration:
        """The tokens of a conversation that ends with an answer.

        If the template changes earlier answers, only the last one counts. Spaces around an answer do not. UnusableText,
        NoContinuation: the conversation has no such tokens.
        """
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        try:
            return self._demonstration(messages, answers)
        except NoContinuation:
            if len(answers) == 1:
                raise
            return replace(self._demonstration(messages, answers[-1:]), whole=False)

    def _demonstration(self, messages: Messages, answers: Sequence[int]) -> Demonstration:
        prompt = self.first(messages[: answers[0]])
        output = self.written(messages[answers[0]]["content"])
        given = []
        for before, at in pairwise(answers):
            between = self.following([*prompt, *output], messages[before + 1 : at])
            given.append((len(output), len(output) + len(between)))
            output = [*output, *between, *self.written(messages[at]["content"])]
        return Demonstration(prompt, output, tuple(given), whole=True)

    def written(self, answer: str) -> list[int]:
        """The tokens with which the model would write this answer, from its prompt's last token to the end token.

        An answer without reasoning begins with what the template puts before it, such as an empty block of reasoning.
        """
        text, (lead, end) = answer.strip(), self._frame
        if END_THINK in text:
            lead = ""
            text = text.removeprefix(THINK).lstrip("\n") if self._thinking else text
        elif lead is None:
            raise NoContinuation(
                "template", f"its prompts begin an answer with {THINK}, and this has no {END_THINK}"
            )
        control = frozenset(self._texts.added[token] for token in self._texts.special)
        pieces = [RenderedPiece(lead), RenderedPiece(text, control)]
        if not any(word in text for word in control):
            # A token may cover the end of one and the beginning of the other.
            pieces = [RenderedPiece(lead + text)]
        return [*encode_pieces(self._texts, pieces), end]

    @cached_property
    def _frame(self) -> tuple[str | None, int]:
        """The text that the template puts before an answer without reasoning (None: its prompts begin a reasoning that
        is not in it), and the token that ends the answer.
        """
        lead, own = around_answer(self._texts, self._options)
        ends = [each for each in (own, self.turn_end, self._end) if each is not None]
        if not ends:
            raise UnusableText("messages", "no token is known that ends an answer of this model")
        return (None if lead is None and self._thinking else lead or ""), ends[0]

    def _probe(self, kind: tuple[str, ...]) -> TemplateProbe:
        if kind not in self._probes:
            try:
                self._probes[kind] = TemplateProbe(self._texts, self._options, kind)
            except NoContinuation as fault:
                self._probes[kind] = fault
        found = self._probes[kind]
        if isinstance(found, NoContinuation):
            raise NoContinuation(found.reason, found.detail)
        return found


def _kind(roles: Sequence[str]) -> tuple[str, ...]:
    """The roles, with at most EQUAL_ROLES_MAX equal ones in a row."""
    kept: list[str] = []
    for role in roles:
        if kept[-EQUAL_ROLES_MAX:] != [role] * EQUAL_ROLES_MAX:
            kept.append(role)
    return tuple(kept)
