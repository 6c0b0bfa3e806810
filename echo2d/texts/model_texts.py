"""Converts text to tokens and back with a snapshot's tokenizer and chat template. Blocking.

A template runs in jinja2's sandbox, because it comes with the weights and sees strangers' messages.
The output of engines is only decoded, never tokenized again.
This is the only place that tokenizes: the gateway's calls and the tasks' prompts come through here.
Not here: the choice of the snapshot, and the verification of its bytes.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from echo2d.core.base.model_config import context_max
from echo2d.core.cluster.statistics import printable
from echo2d.errors import Fault, OperatorFault

# Of a rendered template; the request has 1 MiB at most.
PROMPT_CHARS_MAX = 4 << 20
# Characters of a template's own error message.
TEMPLATE_WORDS_MAX = 300


class UnusableText(Fault):
    """A text that this model cannot take. part: "prompt" or "messages". code: one short word."""

    def __init__(self, part: str, detail: str, code: str = "invalid_value") -> None:
        super().__init__(f"{part}: {detail}")
        self.part, self.detail, self.code = part, detail, code


class ModelTexts:
    """The tokenizer and chat template of one snapshot.

    files: the content of the TEXT_FILES that the snapshot has. template: replaces its own one.
    context_max: tokens of prompt and output together; None if the snapshot does not tell.
    OperatorFault: the snapshot's tokenizer cannot be read.
    """

    def __init__(self, files: Mapping[str, bytes], template: str | None = None) -> None:
        try:
            self.tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
            settings = _object(files.get("tokenizer_config.json"))
            model = _object(files.get("config.json"))
        except Exception as error:
            raise OperatorFault(f"the snapshot's tokenizer cannot be read: {error}") from error
        self.context_max = context_max(model)
        self._bytes_per_token = _bytes_per_token(json.loads(files["tokenizer.json"]))
        added = self.tokenizer.get_added_tokens_decoder()
        # The texts that become one token wherever they stand; the special ones control the model.
        self.added = {each: token.content for each, token in added.items()}
        self.special = frozenset(each for each, token in added.items() if token.special)
        self.template = template or _template_of(files, settings)
        self._named = {
            name: _token_text(settings.get(name))
            for name in ("bos_token", "eos_token", "pad_token")
        }

    def encode(self, text: str, *, special: bool, tokens_max: int | None = None) -> list[int]:
        """The text's token ids. special: with the tokens that the tokenizer puts around a text.

        UnusableText: it has so many bytes that it cannot fit into tokens_max or the context.
        """
        return self.encode_each([text], special=special, tokens_max=tokens_max)[0]

    def encode_each(
        self, texts: Sequence[str], *, special: bool, tokens_max: int | None = None
    ) -> list[list[int]]:
        """The token ids of each text, as of `encode`; together they must fit."""
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
        # `encode` would hold the GIL, and with it the coordinator's loop.
        encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return [each.ids for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, special tokens included."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    @cached_property
    def _compiled(self) -> Template:
        assert self.template is not None
        return _environment().from_string(self.template)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt that the chat template makes of the messages, up to where the answer begins.

        options: further variables of the template. UnusableText: there is no template, or it fails.
        """
        if self.template is None:
            raise UnusableText(
                "messages",
                "this model has no chat template; use /v1/completions",
                "no_chat_template",
            )
        values = {**options, **self._named, "messages": messages, "add_generation_prompt": True}
        try:
            text = self._compiled.render(values)
            # A template can produce half a surrogate pair, which is no text.
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


def _bytes_per_token(tokenizer: Mapping[str, Any]) -> int | None:
    """The most bytes of a text that one token stands for; None if it cannot be told.

    It can if nothing of a text is changed, dropped or cut off before the merges: a byte-level BPE
    without normalizer. In its vocabulary every byte is one character.
    """
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    steps = tokenizer.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers") or [steps]
    if (
        tokenizer.get("normalizer") is not None
        or tokenizer.get("truncation") is not None
        or model.get("type") != "BPE"
        or not set(ByteLevel.alphabet()) <= model["vocab"].keys()
        or not any(step.get("type") == "ByteLevel" for step in steps)
        or not all(step.get("type") in ("ByteLevel", "Digits", "Split") for step in steps)
        or any(step.get("behavior") == "Removed" for step in steps)
        # Such a token swallows the spaces beside it.
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
    ):
        return None
    own = (len(token["content"].encode()) for token in added)
    return max(*map(len, model["vocab"]), *own)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    return environment


def _raise(message: str) -> None:
    raise TemplateError(message)


def _object(data: bytes | None) -> dict[str, Any]:
    found = {} if data is None else json.loads(data)
    return found if isinstance(found, dict) else {}


def _template_of(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        # Bytes that are no text become surrogates, which `render` refuses.
        return files["chat_template.jinja"].decode(errors="surrogateescape")
    found = settings.get("chat_template")
    # Some snapshots have several templates, each with a name.
    if isinstance(found, list):
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def _token_text(value: Any) -> str:
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""
