"""The turns of a model that the package `renderers` knows, made by that package.

It knows models by name, and a fine-tuned snapshot may have another template. So it is used only if
a few conversations get the same tokens from it as from the snapshot's own template.
Not here: models that it does not know (`template_probe`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from echo2d.texts.continuation import NoContinuation
from echo2d.texts.model_texts import ModelTexts, UnusableText
from echo2d.texts.plain_contents import RenderedPiece, encode_pieces
from echo2d.texts.template_probe import Messages
from echo2d.texts.tool_calls import AnswerTurn, UnparsedReason, WrittenCall

_QUESTION = {"role": "user", "content": "A question?"}
_ASKED: tuple[list[dict[str, Any]], ...] = (
    [_QUESTION],
    [{"role": "system", "content": "A rule."}, _QUESTION],
)
# Messages by which it may extend a conversation.
_SAID: tuple[list[dict[str, Any]], ...] = (
    [{"role": "tool", "content": "a result"}],
    [{"role": "user", "content": "a word"}],
)
# The reason, by the status of a malformed call.
_UNPARSED: Mapping[str, UnparsedReason] = {"invalid_json": "json", "unclosed_block": "unclosed"}


def model_renderer(
    texts: ModelTexts, model: str, options: Mapping[str, Any]
) -> "ModelRenderer | None":
    """The renderer of this model; None if the package is missing or does not suit the snapshot."""
    if not model:
        return None
    try:
        from renderers import create_renderer
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return None
    if model not in MODEL_RENDERER_MAP:
        return None

    def made(words: frozenset[str]) -> Any:
        tokenizer = _Tokenizer(texts, model, words)
        return create_renderer(tokenizer, chat_template_kwargs=dict(options) or None)

    control = frozenset(texts.added[token] for token in texts.special)
    try:
        usual = made(frozenset())
        wanted = [
            texts.encode(texts.render(messages, options), special=False) for messages in _ASKED
        ]
        if wanted != [_prompt(usual, messages) for messages in _ASKED]:
            return None
        # Control tokens in messages are encoded as plain text. The renderer's own tokens must stay the same.
        for words in (frozenset(texts.added.values()), control):
            careful = made(words)
            if _made_by(careful) == _made_by(usual):
                return ModelRenderer(texts, MODEL_RENDERER_MAP[model], careful)
    # The package may raise any exception on a tokenizer and options that it does not know.
    except Exception:  # noqa: BLE001
        return None
    return None


def _prompt(renderer: Any, messages: Messages) -> list[int]:
    return list(renderer.render_ids(list(messages), add_generation_prompt=True))


def _made_by(renderer: Any) -> list[Any]:
    prompts = [_prompt(renderer, messages) for messages in _ASKED]
    bridges = [renderer.bridge_to_next_turn(prompts[0], [], messages) for messages in _SAID]
    return [prompts, [None if bridge is None else bridge.token_ids for bridge in bridges]]


class _Tokenizer:
    """A tokenizer with the interface that `renderers` needs. words: texts that never become control tokens."""

    def __init__(self, texts: ModelTexts, name: str, words: frozenset[str]) -> None:
        self._texts, self._words = texts, words
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return encode_pieces(self._texts, [RenderedPiece(text, self._words)])

    def decode(self, tokens: Any, **_: Any) -> str:
        return self._texts.decode([tokens] if isinstance(tokens, int) else tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        find = self._texts.tokenizer.token_to_id
        return find(tokens) if isinstance(tokens, str) else [find(token) for token in tokens]


class ModelRenderer:
    """See the module docstring."""

    def __init__(self, texts: ModelTexts, name: str, renderer: Any) -> None:
        self.name = name
        self._texts = texts
        self._renderer = renderer
        self._prompt = _prompt(renderer, [_QUESTION])
        before = renderer.render_ids([_QUESTION], add_generation_prompt=False)
        self._opening = self._prompt[len(before) :]

    def following(self, so_far: Sequence[int], messages: Messages) -> list[int]:
        """As in TurnTexts."""
        so_far = list(so_far)
        at, size = len(so_far), len(self._opening)
        while at > 0 and so_far[at - size : at] != self._opening:
            at -= 1
        try:
            made = self._renderer.bridge_to_next_turn(so_far[:at], so_far[at:], list(messages))
        except UnusableText as fault:
            raise NoContinuation("template", fault.detail) from fault
        whole = [] if made is None else list(made.token_ids)
        if whole[: len(so_far)] != so_far:
            raise NoContinuation("renderer", f"{self.name} does not extend this one")
        return whole[len(so_far) :]

    def answer(self, tokens: Sequence[int]) -> AnswerTurn:
        """As in TurnTexts."""
        found = self._renderer.parse_response(list(tokens), prompt_ids=self._prompt)
        calls: list[WrittenCall] = []
        text, unparsed = found.content, list[UnparsedReason]()
        for call in found.tool_calls:
            if call.status.value == "ok" and isinstance(call.arguments, dict):
                calls.append(WrittenCall(call.name, call.arguments))
            else:
                text += call.raw
                unparsed.append(_UNPARSED.get(call.status.value, "shape"))
        return AnswerTurn(text, tuple(calls), found.reasoning_content or "", tuple(unparsed))
