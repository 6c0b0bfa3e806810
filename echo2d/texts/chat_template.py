"""Renders conversations with the chat template of a model, as `transformers` 5 does. Blocking.

A template runs in jinja2's sandbox, because it comes with the weights and sees strangers' messages. It gets the
variables and functions that `apply_chat_template` of transformers 5.23 gives it, with one difference: the day that it
may ask for is fixed, so that a prompt is the same on every host and after every restart.
Not here: tokens (`model_texts`), and control tokens in messages (`plain_contents`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from echo2d.texts.files import TEMPLATE, TOOL_TEMPLATE


def templates_of(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a directory by their names, "default" and "tool_use"; others are never chosen.

    settings: of tokenizer_config.json.
    """
    # Bytes that are not UTF-8 become surrogates, and a rendering with surrogates is refused.
    found = {
        name: files[path].decode(errors="surrogateescape")
        for name, path in (("default", TEMPLATE), ("tool_use", TOOL_TEMPLATE))
        if path in files
    }
    if found:
        return found
    value = settings.get("chat_template")
    if isinstance(value, list):
        value = {each["name"]: each["template"] for each in value}
    named = value if isinstance(value, dict) else {"default": value}
    return {name: each for name, each in named.items() if isinstance(each, str)}


def compiled(template: str, day: str) -> Template:
    """Compile a template. day: the day that `strftime_now` formats, such as 2026-11-28; empty: today.

    TemplateError: it is not a template.
    """
    today = datetime.fromisoformat(day) if day else datetime.now(UTC)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=today.strftime, namespace=_Namespace, dict=_Dict()
    )
    return environment.from_string(template)


def render(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    named: Mapping[str, str],
) -> str:
    """The text of the messages, up to the beginning of the answer.

    options: further variables of the template. named: the special tokens that have names. The template may raise any
    exception.
    """
    values = {"tools": None, "documents": None, **named, **options}
    given = [
        _with_reasoning({key: each for key, each in one.items() if each is not None})
        for one in messages
    ]
    return template.render(values, messages=given, add_generation_prompt=True)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    # The keys under which a message may have its reasoning. Templates read the first one.
    found = [
        message[name]
        for name in ("reasoning_content", "thinking", "reasoning")
        if message.get(name) is not None
    ]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


class _Generation(Extension):
    """The block with which trainers mark an answer; here it renders only its content, in its own scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """The namespace of jinja2, without names that give access to Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        given = dict(*rest, **kwargs)
        _require_plain(given)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_plain([name])
        super().__setitem__(name, value)


class _Dict:
    """The `dict` that a template may call, without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _require_plain(names: Any) -> None:
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no names that begin with _, such as {name}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)
