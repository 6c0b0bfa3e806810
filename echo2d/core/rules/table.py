"""Tables of keys: frozen dataclasses that check themselves.

Each key is declared in one place with its type, default, unit, limits and meaning. The files of the coordinator and of
a worker, scenarios, `--print-config` and the rules of the core are made from these declarations. A wrong value is an
OperatorFault that names `table.key`, what was expected and what was found.
Not here: reading and printing them (`config.tables`).
"""

import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Union

from echo2d.errors import OperatorFault

NUMBERS = (int, float)


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
    type `str` may have; for a registry's names, which a `Literal` cannot list. or_else: the value of
    a required key that is left out, in words, where the table's reader fills it in.
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
    kind = origin or hint
    return type(value) is kind or (kind.__module__ != "builtins" and isinstance(value, kind))


_NAMES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "Path": "a path",
    "dict": "a table",
}


def _describe(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(part) for part in parts if part is not type(None))
    if origin is Literal:
        return _quoted(parts)
    if origin is tuple:
        return f"[{', '.join('...' if part is Ellipsis else _describe(part) for part in parts)}]"
    return _NAMES[(origin or hint).__name__]


def _quoted(choices: Collection[str]) -> str:
    return " or ".join(f'"{choice}"' for choice in choices)


def expected_text(hint: Any, item: "dataclasses.Field[Any]") -> str:
    return _quoted(item.metadata.get("choices", ())) or _describe(hint)


def range_text(limits: Mapping[str, Any]) -> str:
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


def same_key(table: "type[Table]", name: str, **changes: Any) -> Any:
    """The key of another table, with its default, limits and meaning. changes: arguments of `key` that differ here."""
    declared = table.__dataclass_fields__[name]
    arguments = {**declared.metadata, "default": declared.default, **changes}
    return key(arguments.pop("doc"), **arguments)


_types: dict[Any, dict[str, Any]] = {}


def types_of(table: "type[Table]") -> dict[str, Any]:
    """The type of each field, by its name."""
    if table not in _types:
        _types[table] = typing.get_type_hints(table)
    return _types[table]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Keys under one name. Subclasses declare them, and may add fields that are no keys. Every instance is checked."""

    TABLE: ClassVar[str]

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            if "doc" in item.metadata:
                self._check(item, types_of(type(self))[item.name])

    def _check(self, item: "dataclasses.Field[Any]", hint: Any) -> None:
        value = getattr(self, item.name)
        choices = item.metadata.get("choices", (value,))
        if not (_matches(hint, value) and value in choices and _in_range(value, item.metadata)):
            limits = range_text(item.metadata)
            expected = ", ".join(filter(None, (expected_text(hint, item), limits)))
            raise OperatorFault(f"{self.TABLE}.{item.name}: expected {expected}; found {value!r}")

    def values(self) -> dict[str, Any]:
        """The values by name, to make a table that has these keys and more."""
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
