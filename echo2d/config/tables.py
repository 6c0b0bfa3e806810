"""Reads tables from TOML files, and prints them.

A program reads its own tables of a file that may serve several programs. Relative paths count from the file's folder.
Any mistake is an OperatorFault that names `table.key`, what was expected and what was found.
"""

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from echo2d.core.rules.table import Table, expected_text, range_text, types_of
from echo2d.errors import OperatorFault, path_fault

AnyTable = TypeVar("AnyTable", bound=Table)


def read_table(table: type[AnyTable], values: Mapping[str, Any], folder: Path = Path()) -> AnyTable:
    """Make the table from parsed TOML, in which paths are text. folder: relative paths count from it."""
    hints, name = types_of(table), table.TABLE
    keys = {item.name: item for item in dataclasses.fields(table)}
    for each in values:
        if each not in keys:
            raise OperatorFault(f"{name}.{each}: unknown key; {meant(each, keys)}")
    for each, item in keys.items():
        if each not in values and item.default is item.default_factory is dataclasses.MISSING:
            expected = expected_text(hints[each], item)
            raise OperatorFault(f"{name}.{each}: expected {expected}; found nothing")
    defaults = {each: item.default for each, item in keys.items() if isinstance(item.default, Path)}
    given = {**defaults, **values}
    return table(**{each: _from_toml(hints[each], value, folder) for each, value in given.items()})


def meant(name: str, keys: Collection[str]) -> str:
    """Say which key was probably meant, or list all keys if none is similar."""
    # If the similarity is at least 0.7, one name may be the other one with a typing mistake.
    near = difflib.get_close_matches(name, keys, 1, 0.7)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(keys)}"


def _from_toml(hint: Any, value: Any, folder: Path) -> Any:
    """Convert what TOML cannot express: paths and tuples."""
    if typing.get_origin(hint) is tuple and type(value) is list:
        return tuple(_from_toml(typing.get_args(hint)[0], each, folder) for each in value)
    if (hint is Path or Path in typing.get_args(hint)) and isinstance(value, str | Path):
        try:
            return folder / Path(value).expanduser()
        except RuntimeError as error:
            raise OperatorFault(f"{value}: there is no such user's directory") from error
    return value


def table_of(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The table of this name in a parsed document; empty if there is none."""
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise OperatorFault(f"{name}: expected a table; found {table!r}")
    return table


def folder_of(path: Path) -> Path:
    """The folder from which the relative paths of this file count."""
    return path.absolute().parent


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise path_fault(f"cannot read {path}", error) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OperatorFault(f"{path} is not TOML: {error}") from error


def split_setting(setting: str) -> tuple[str, str, str]:
    """Table, key and value of TABLE.KEY=VALUE; the table may be one inside another.

    OperatorFault: it is malformed.
    """
    name, given, value = setting.partition("=")
    table, _, key_name = name.strip().rpartition(".")
    if not given or not table:
        raise OperatorFault(f"--set: expected TABLE.KEY=VALUE; found {setting!r}")
    return table, key_name, value.strip()


def with_settings(document: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Put each TABLE.KEY=VALUE into every table of that name; return the document.

    A value that is not TOML counts as text. OperatorFault: a setting is malformed.
    """
    for setting in settings:
        table, key_name, text = split_setting(setting)
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        rows: list[Any] = [document]
        for part in table.split("."):
            found = [row.setdefault(part, {}) for row in rows]
            rows = [row for each in found for row in (each if isinstance(each, list) else [each])]
            if not all(isinstance(row, dict) for row in rows):
                raise OperatorFault(f"--set: expected TABLE.KEY=VALUE; {part} is not a table")
        for row in rows:
            row[key_name] = value
    return document


def _toml(value: Any) -> str:
    if type(value) is tuple:
        return f"[{', '.join(map(_toml, value))}]"
    return (
        str(value)
        if isinstance(value, float)
        else json.dumps(str(value) if isinstance(value, Path) else value)
    )


def _key_lines(item: "dataclasses.Field[Any]", hint: Any) -> list[str]:
    listed = "choices" in item.metadata or typing.get_origin(hint) is Literal
    limits = expected_text(hint, item) if listed else range_text(item.metadata)
    comment = f"# {item.metadata['doc']}" + (f" ({limits})" if limits else "")
    if item.default_factory is not dataclasses.MISSING:
        return [comment, f"{item.name} = {{}}"]
    if item.default is dataclasses.MISSING:
        other = item.metadata["or_else"]
        return [comment + (f"; left out: {other}" if other else "; required"), f"# {item.name} ="]
    return [
        comment,
        f"# {item.name} =" if item.default is None else f"{item.name} = {_toml(item.default)}",
    ]


def print_tables(*tables: type[Table]) -> str:
    """All keys with their defaults, as commented TOML."""
    blocks = []
    for table in tables:
        hints = types_of(table)
        keys = dataclasses.fields(table)
        lines = [line for item in keys for line in _key_lines(item, hints[item.name])]
        blocks.append("\n".join([f"[{table.TABLE}]", *lines, ""]))
    return "\n".join(blocks)
