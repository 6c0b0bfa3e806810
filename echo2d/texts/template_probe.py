"""Finds the text that a chat template puts after an answer, and whether it leaves earlier text unchanged.

    rendering of (conversation, answer, new messages) = prompt | answer | given

The given text is cut out of the rendering of an example conversation, at an answer that marks the
place. It is right for every conversation only if the template appends to earlier text, which is probed first.
Spaces around an answer do not count: templates strip them, but the tokens of an answer stay.
Not here: tokens, and conversations.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echo2d.texts.continuation import NoContinuation
from echo2d.texts.model_texts import ModelTexts, UnusableText
from echo2d.texts.plain_contents import RenderedPiece, encode_pieces, rendered_pieces
from echo2d.texts.tool_calls import END_THINK, THINK

Messages = Sequence[Mapping[str, Any]]

# This answer marks a place. It is rendered before all messages of other people, so the first one found is ours.
_ANSWER = "\ue0f0an answer\ue0f0"
_QUESTION = {"role": "user", "content": "A question?"}
_CONVERSATIONS: tuple[Messages, ...] = (
    (_QUESTION,),
    ({"role": "system", "content": "A rule."}, _QUESTION),
    (_QUESTION, {"role": "assistant", "content": "Once."}, {"role": "user", "content": "Again?"}),
)
_ANSWERS = ("Paris.", "two\n\nlines, {of} <it>")
_THOUGHT = f"{THINK}\nso\n{END_THINK}\n\nParis."
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def behind_answer(
    texts: ModelTexts, messages: Messages, options: Mapping[str, Any]
) -> list[RenderedPiece]:
    """The text between an answer and the next one. UnusableText: the template refuses the messages."""
    asked = [_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages]
    pieces = rendered_pieces(texts, asked, options)
    for place, piece in enumerate(pieces):
        _, found, rest = piece.text.partition(_ANSWER)
        if found:
            return [RenderedPiece(rest), *pieces[place + 1 :]]
    raise UnusableText("messages", "the chat template leaves out an answer", "append_only")


def around_answer(texts: ModelTexts, options: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """What the template puts between a prompt and an answer that ends a conversation, and the special token that it
    puts after it. None: the prompt is no part of the conversation; there is no such token.
    """
    asked = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
    try:
        prompt, whole = texts.render([_QUESTION], options), texts.render(asked, options)
        before, found, behind = whole.partition(_ANSWER)
        after = encode_pieces(texts, [RenderedPiece(behind)])
    except UnusableText:
        return None, None
    lead = before.removeprefix(prompt) if found and before.startswith(prompt) else None
    return lead, next((token for token in after[:1] if token in texts.special), None)


def turn_end(texts: ModelTexts, options: Mapping[str, Any]) -> int | None:
    """The special token that the template puts after an answer; None: there is none."""
    try:
        behind = encode_pieces(texts, behind_answer(texts, [_QUESTION], options))
    except UnusableText:
        return None
    return next((token for token in behind[:1] if token in texts.special), None)


def ignores_tools(texts: ModelTexts, options: Mapping[str, Any]) -> bool:
    """Whether the template leaves out the tools that the model may call."""
    try:
        without = texts.render([_QUESTION], options)
        return texts.render([_QUESTION], {**options, "tools": [_TOOL]}) == without
    except UnusableText:
        return False


def opens_reasoning(texts: ModelTexts, options: Mapping[str, Any]) -> bool:
    """Whether the prompt already begins the answer's reasoning."""
    try:
        return texts.render([_QUESTION], options).rstrip().endswith(THINK)
    except UnusableText:
        return False


class TemplateProbe:
    """Probes whether a template appends messages of these roles.

    keeps_reasoning: it also appends them to an answer with reasoning. NoContinuation: it does not append.
    """

    def __init__(self, texts: ModelTexts, options: Mapping[str, Any], roles: Sequence[str]) -> None:
        self._texts, self._options = texts, options
        self._messages = [
            {"role": role, "content": f"word {number}"} for number, role in enumerate(roles)
        ]
        try:
            behind = behind_answer(texts, self._messages, options)
            self._given = "".join(piece.text for piece in behind)
            appends = all(map(self._appends, _ANSWERS))
            self.keeps_reasoning = appends and self._appends(_THOUGHT)
        except UnusableText as fault:
            raise NoContinuation("template", fault.detail) from fault
        if not appends:
            raise NoContinuation("append_only", "the chat template changes what came before")
        if not all(map(self._decodes_to_itself, self._prompts())):
            raise NoContinuation("tokens", "the tokenizer does not give back a text in parts")

    def _appends(self, answer: str) -> bool:
        said = {"role": "assistant", "content": answer}
        return all(
            self._texts.render([*conversation, said, *self._messages], options)
            == prompt + answer + self._given
            for options, conversation, prompt in self._taken()
        )

    def _decodes_to_itself(self, prompt: str) -> bool:
        """Whether a text that is encoded in parts decodes to itself."""
        parts = prompt, _ANSWERS[0], self._given
        pieces = [RenderedPiece(part) for part in parts]
        return self._texts.decode(encode_pieces(self._texts, pieces)) == "".join(parts)

    def _prompts(self) -> Iterator[str]:
        return (prompt for _, _, prompt in self._taken())

    def _taken(self) -> Iterator[tuple[Mapping[str, Any], Messages, str]]:
        """The conversations that the template accepts, without tools and with a tool."""
        for options in (self._options, {**self._options, "tools": [_TOOL]}):
            for conversation in _CONVERSATIONS:
                try:
                    prompt = self._texts.render(conversation, options)
                # Some templates have no system messages, and some no tools.
                except UnusableText:
                    continue
                yield options, conversation, prompt
