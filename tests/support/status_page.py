"""Writes what the fields of the status declare into the pages: `python -m tests.support.status_page`.

docs/reference/status.md has every key of `GET /v1/status` and `GET /v1/status/own`, and is the coordinator's promise
to programs that read them; docs/reference/metrics.md gets its table of the coordinator's metrics.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from echo2d.core.status.schema import OwnPeerStatus, OwnStatus, ProcessStatus, Status, WorkerStatus
from echo2d.runtime.coordinator.metrics import FAMILIES
from tests.support.paths import REPO

PAGE, METRICS = (
    REPO / "docs" / "reference" / "status.md",
    REPO / "docs" / "reference" / "metrics.md",
)
HEAD = """# Every key of the status

What `GET /v1/status` and `echo2d status --json` say. `python -m tests.support.status_page` writes this page from the
declarations in `echo2d/core/status/schema.py`. `[]` stands for each item of a list, `{}` for each value of an object.
Durations are in seconds, uplinks in bytes/s, `mu` in trajectories/s. `null`: not known yet, or there is none.

"""


def _inner(hint: Any) -> tuple[str, Any]:
    """The rest of the path to the record inside this type, and the record; None: there is none."""
    if dataclasses.is_dataclass(hint):
        return "", hint
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return next((found for found in map(_inner, parts) if found[1]), ("", None))
    if origin is tuple and parts[-1] is Ellipsis:
        return "[]", _inner(parts[0])[1]
    if origin is Mapping:
        return "{}", _inner(parts[1])[1]
    return "", None


def _kind(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _kind(part) for part in parts)
    if origin is Literal:
        return "text"
    if origin is tuple:
        return "list"
    if origin is Mapping or dataclasses.is_dataclass(hint):
        return "object"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[hint]


def rows(kind: type, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Path, type and meaning of each key. OwnPeerStatus repeats fields of WorkerStatus without their meaning."""
    hints, here = typing.get_type_hints(kind), WorkerStatus.__dataclass_fields__
    for item in dataclasses.fields(kind):
        place = (
            path if item.type is ProcessStatus or item.name == "process" else f"{path}{item.name}"
        )
        told = item if item.metadata or kind is not OwnPeerStatus else here[item.name]
        suffix, record = _inner(hints[item.name])
        if item.name != "process":
            yield place + suffix, _kind(hints[item.name]), _sentence(told.metadata["meaning"])
        if record is not None:
            yield from rows(record, f"{place}{suffix}." if item.name != "process" else path)


def _sentence(meaning: str) -> str:
    """The text with a capital letter, unless it begins with a key or a symbol."""
    first = meaning.split()[0]
    is_word = first.isalpha() and first not in ("kappa", "mu", "null")
    return meaning[0].upper() + meaning[1:] if is_word else meaning


def page() -> str:
    parts = []
    for title, kind in (("`GET /v1/status`", Status), ("`GET /v1/status/own`", OwnStatus)):
        lines = [f"| `{path}` | {what} | {meaning} |" for path, what, meaning in rows(kind)]
        parts.append(
            "\n".join(
                [f"## {title}\n", "| key | type | meaning |", "| --- | --- | --- |", *lines, ""]
            )
        )
    return HEAD + "\n".join(parts)


def metrics_page() -> str:
    """The metrics page with the coordinator's metrics as they are declared; those that its process counts stay."""
    families = {each.name + ("_total" if each.counter else ""): each for each in FAMILIES}
    before, title, rest = METRICS.read_text(encoding="utf-8").partition("## Of the coordinator\n")
    table, end, behind = rest.partition("\n## ")
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    kept = [line for line in lines if line.split("`")[1] not in families]
    made = []
    for name, each in families.items():
        labels = f" ({', '.join(sorted(each.labels))})" if each.labels else ""
        made.append(
            f"| `{name}`{labels} | {'counter' if each.counter else 'gauge'} | {each.help} |"
        )
    head = "\n| metric (labels) | kind | what it says |\n| --- | --- | --- |\n"
    return before + title + head + "\n".join([*made, *kept]) + "\n" + end + behind


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    METRICS.write_text(metrics_page(), encoding="utf-8")
