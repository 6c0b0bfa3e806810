"""The config file of a recipe: fill it in, and change single keys in it."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from echo2d.config.tables import split_setting
from echo2d.errors import OperatorFault


def filled(recipe: str, values: Mapping[str, Any]) -> str:
    """The config of this recipe with these values, in TOML."""
    text = files(__package__).joinpath(f"{recipe}.toml").read_text(encoding="utf-8")
    return Template(text).substitute({name: toml(value) for name, value in values.items()})


def toml(value: Any) -> str:
    """A value in TOML: text, a number, a truth value, or a list or inline table of these."""
    if isinstance(value, Mapping):
        entries = ", ".join(f"{name} = {toml(each)}" for name, each in value.items())
        return f"{{ {entries} }}" if entries else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    # TOML has no surrogate pairs, and requires escapes for control characters and line ends.
    text = json.dumps(value, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def parsed(text: str) -> dict[str, Any]:
    """The parsed config. OperatorFault: a setting made it invalid TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OperatorFault(f"--set: the config is no longer valid TOML: {error}") from error


def changed(text: str, settings: Sequence[str]) -> str:
    """The config with each "table.key=value" set.

    A setting changes every table of that name. If there is none, it adds one at the end. A value that is not valid TOML
    becomes a text.
    OperatorFault: a setting is malformed.
    """
    for setting in settings:
        table, key, value = split_setting(setting)
        text = _put(text, table, key, _as_toml(value))
    return text


def _as_toml(value: str) -> str:
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return toml(value)
    return value


def _put(text: str, table: str, key: str, value: str) -> str:
    lines, places, inside = list[str](), list[int](), False
    for line in text.rstrip("\n").split("\n"):
        if line.startswith("["):
            inside = line.partition("#")[0].strip() in (f"[{table}]", f"[[{table}]]")
            if inside:
                places.append(len(lines) + 1)
        if inside and line.partition("=")[0].strip() == key:
            continue
        lines.append(line)
    if not places:
        lines += ["", f"[{table}]"]
        places.append(len(lines))
    for place in reversed(places):
        lines.insert(place, f"{key} = {value}")
    return "\n".join(lines) + "\n"
