"""TOML tables as frozen, checked dataclasses.

Each key is declared in one place with its default, unit, limits and meaning. A program reads its
own tables of a file that may serve several programs. Relative paths count from the file's folder.
Any mistake is an OperatorFault that names `table.key`, what was expected and what was found.
"""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, Union

from echo2d.errors import OperatorFault, path_fault

NUMBERS = (int, float)
_ALIKE = 0.7  # of two names, one of which is a mistyped other


def key(
    doc: str,
    default: Any = dataclasses.MISSING,
    *,
    choices: Collection[str] | None = None,
    or_else: str = "",
    **limits: float,
) -> Any:
    """One key of a table. A key without a default is required.

    limits: `low` and `high` (inclusive), `above` (exclusive). choices: the values that a key of
    type `str` may have; for a registry's names, which a `Literal` cannot list. or_else: what stands
    for a required key that is left out, where the table's reader fills it in.
    """
    metadata = {"doc": doc, "or_else": or_else, **limits}
    if choices is not None:
        metadata["choices"] = tuple(choices)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def _matches(hint: Any, value: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(part, value) for part in parts)
    if origin is Literal:
        return type(value) is str and value in parts
    if origin is tuple and parts[-1] is Ellipsis:
        return type(value) is tuple and all(_matches(parts[0], part) for part in value)
    if origin is tuple:
        return (
            type(value) is tuple and len(value) == len(parts) and all(map(_matches, parts, value))
        )
    if hint is float:
        return type(value) in NUMBERS
    if hint is Path:
        return isinstance(value, Path)
    return type(value) is (origin or hint)


_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    dict: "a table",
}


def _describe(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(part) for part in parts if part is not type(None))
    if origin is Literal:
        return _quoted(parts)
    if origin is tuple:
        return f"[{', '.join('...' if part is Ellipsis else _describe(part) for part in parts)}]"
    return _NAMES[origin or hint]


def _quoted(choices: Collection[str]) -> str:
    return " or ".join(f'"{choice}"' for choice in choices)


def _expected(hint: Any, item: "dataclasses.Field[Any]") -> str:
    return _quoted(item.metadata.get("choices", ())) or _describe(hint)


def _range_text(limits: Mapping[str, Any]) -> str:
    words = {"above": "more than", "low": "at least", "high": "at most"}
    return ", ".join(f"{word} {limits[name]}" for name, word in words.items() if name in limits)


def _in_range(value: Any, limits: Mapping[str, Any]) -> bool:
    if type(value) is tuple:
        return all(_in_range(part, limits) for part in value)
    if type(value) not in NUMBERS:
        return True
    above, low, high = limits.get("above"), limits.get("low"), limits.get("high")
    return (
        (above is None or value > above)
        and (low is None or value >= low)
        and (high is None or value <= high)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One TOML table. Subclasses declare its keys. Every instance is checked when it is made."""

    TABLE: ClassVar[str]

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            self._check(item, hints[item.name])

    def _check(self, item: "dataclasses.Field[Any]", hint: Any) -> None:
        value = getattr(self, item.name)
        choices = item.metadata.get("choices", (value,))
        if not (_matches(hint, value) and value in choices and _in_range(value, item.metadata)):
            expected = ", ".join(filter(None, (_expected(hint, item), _range_text(item.metadata))))
            raise OperatorFault(f"{self.TABLE}.{item.name}: expected {expected}; found {value!r}")

    @classmethod
    def read(cls, values: Mapping[str, Any], folder: Path = Path()) -> Self:
        """Make the table from parsed TOML, where paths are text. folder: relative paths count from it."""
        hints = typing.get_type_hints(cls)
        keys = {item.name: item for item in dataclasses.fields(cls)}
        for name in values:
            if name not in keys:
                raise OperatorFault(f"{cls.TABLE}.{name}: unknown key; {meant(name, keys)}")
        for name, item in keys.items():
            if name not in values and item.default is item.default_factory is dataclasses.MISSING:
                raise OperatorFault(
                    f"{cls.TABLE}.{name}: expected {_expected(hints[name], item)}; found nothing"
                )
        defaults = {
            name: item.default for name, item in keys.items() if isinstance(item.default, Path)
        }
        return cls(
            **{
                name: _from_toml(hints[name], value, folder)
                for name, value in {**defaults, **values}.items()
            }
        )


def meant(name: str, keys: Collection[str]) -> str:
    """Which key was probably meant; all of them, if none is alike."""
    near = difflib.get_close_matches(name, keys, 1, _ALIKE)
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
    """The parsed document, in which each TABLE.KEY=VALUE is put into every table of that name.

    A value that is no TOML is taken for text. OperatorFault: a setting is malformed.
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
                raise OperatorFault(f"--set: expected TABLE.KEY=VALUE; {part} is no table")
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
    limits = _expected(hint, item) if listed else _range_text(item.metadata)
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
        hints = typing.get_type_hints(table)
        keys = dataclasses.fields(table)
        lines = [line for item in keys for line in _key_lines(item, hints[item.name])]
        blocks.append("\n".join([f"[{table.TABLE}]", *lines, ""]))
    return "\n".join(blocks)
