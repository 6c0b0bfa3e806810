"""Converts text to tokens and back with a snapshot's tokenizer and chat template. Blocking.

The output of engines is only decoded, never tokenized again.
No other module tokenizes: the gateway's calls and the tasks' prompts come here.
Not here: reading the files (`tokenizer_files`), what a template may do (`chat_template`), and the choice of the
snapshot.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel

from echo2d.core.base.model_config import context_max
from echo2d.core.cluster.statistics import printable
from echo2d.errors import Fault
from echo2d.texts.chat_template import compiled, render, templates_of
from echo2d.texts.tokenizer_files import load_tokenizer

# Most characters of a rendered template; a request has at most 1 MiB.
PROMPT_CHARS_MAX = 4 << 20
# Most characters of a template's own error message.
TEMPLATE_WORDS_MAX = 300


class UnusableText(Fault):
    """A text that this model cannot take. part: "prompt" or "messages". code: one short word."""

    def __init__(self, part: str, detail: str, code: str = "invalid_value") -> None:
        super().__init__(f"{part}: {detail}")
        self.part, self.detail, self.code = part, detail, code


class ModelTexts:
    """The tokenizer and chat template of one snapshot.

    files: the content of the TEXT_FILES that the snapshot has. template: replaces the snapshot's own template.
    day: the day that counts as today in the template, such as 2026-11-28; empty: today.
    context_max: most tokens of prompt and output together; None if the snapshot does not say.
    OperatorFault: the snapshot's tokenizer cannot be read.
    """

    def __init__(
        self, files: Mapping[str, bytes], template: str | None = None, *, day: str = ""
    ) -> None:
        loaded = load_tokenizer(files)
        self.tokenizer, self._named = loaded.tokenizer, loaded.named
        self.context_max = context_max(loaded.config)
        added = self.tokenizer.get_added_tokens_decoder()
        self._bytes_per_token = _bytes_per_token(loaded.document, list(added.values()))
        # Texts that always become one token. Those of `special` control the model.
        self.added = {each: token.content for each, token in added.items()}
        self.special = frozenset(each for each, token in added.items() if token.special)
        self._templates = (
            {"default": template} if template else templates_of(files, loaded.settings)
        )
        self.template = self._templates.get("default")
        self._day, self._compiled = day, dict[str, Template]()

    def encode(self, text: str, *, special: bool, tokens_max: int | None = None) -> list[int]:
        """The text's token ids. special: with the tokens that the tokenizer puts around a text.

        UnusableText: it has too many bytes for tokens_max or the context.
        """
        return self.encode_each([text], special=special, tokens_max=tokens_max)[0]

    def encode_each(
        self, texts: Sequence[str], *, special: bool, tokens_max: int | None = None
    ) -> list[list[int]]:
        """The token ids of each text, as from `encode`; together they must fit."""
        limits = [most for most in (tokens_max, self.context_max) if most is not None]
        if limits and self._bytes_per_token is not None:
            bytes_max = min(limits) * self._bytes_per_token
            size = sum(len(text.encode()) for text in texts)
            if size > bytes_max:
                detail = (
                    f"this model's maximum context length is {min(limits)} tokens; "
                    f"{size} bytes of text are too many"
                )
                raise UnusableText("prompt", detail, "context_length_exceeded")
        # The tokenizer's own `encode` holds the GIL even in a thread, and would stop the coordinator's loop.
        try:
            encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=special)
        # The library raises a bare Exception, for example if it lacks the token for unknown text.
        except Exception as error:
            raise UnusableText("prompt", f"the tokenizer says: {error}", "tokenizer") from error
        return [each.ids for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, including special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt that the chat template makes from the messages, up to the beginning of the answer.

        options: further variables of the template; for `tools`, a model may have another template.
        UnusableText: there is no template, or it fails.
        """
        with_tools = options.get("tools") is not None and "tool_use" in self._templates
        name = "tool_use" if with_tools else "default"
        if name not in self._templates:
            raise UnusableText(
                "messages",
                "this model has no chat template; use /v1/completions",
                "no_chat_template",
            )
        try:
            if name not in self._compiled:
                self._compiled[name] = compiled(self._templates[name], self._day)
            text = render(self._compiled[name], messages, options, self._named)
            # A template can produce half a surrogate pair, which cannot be encoded.
            text.encode()
        # The template is a foreign program and may raise anything.
        except Exception as error:
            detail = f"the chat template says: {printable(str(error), TEMPLATE_WORDS_MAX)}"
            raise UnusableText("messages", detail, "chat_template") from error
        if len(text) > PROMPT_CHARS_MAX:
            raise UnusableText(
                "messages",
                f"the chat template makes more than {PROMPT_CHARS_MAX} characters of them",
            )
        return text


def _bytes_per_token(tokenizer: Mapping[str, Any], added: Sequence[AddedToken]) -> int | None:
    """The most bytes of a text that one token covers; None if they are not known.

    They are known for a byte-level BPE without normalizer, because it does not change, drop or cut off anything
    before the merges. In its vocabulary every byte is one character.
    """
    model = tokenizer["model"]
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers") or [steps]
    if (
        tokenizer.get("normalizer") is not None
        or model.get("type") != "BPE"
        or not set(ByteLevel.alphabet()) <= model["vocab"].keys()
        or not any(step.get("type") == "ByteLevel" for step in steps)
        or not all(step.get("type") in ("ByteLevel", "Digits", "Split") for step in steps)
        or any(step.get("behavior") == "Removed" for step in steps)
        # Such a token also covers the spaces beside it.
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    own = (len(token.content.encode()) for token in added)
    return max(*map(len, model["vocab"]), *own)
