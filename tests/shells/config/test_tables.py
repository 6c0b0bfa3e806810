"""Tables read from TOML: an error has the name of the key, the expected and the found value."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from echo2d.config.tables import print_tables, read_table, read_toml, table_of
from echo2d.core.rules.table import Table, key
from echo2d.errors import OperatorFault
from echo2d.learner.config import LearnerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Table):
    TABLE: ClassVar[str] = "example"

    home: Path = key("where")
    cache: Path | None = key("where else", None)
    kind: Literal["star", "chain"] = key("how", "star")
    ratio: float = key("share", 0.5, above=0.0, high=1.0)
    betas: tuple[float, float] = key("of AdamW", (0.9, 0.95), low=0.0, high=0.999)
    options: dict[str, Any] = key("anything", dict)
    engine: str = key("which", "fast", choices={"fast": 1, "exact": 2})


def test_a_table_is_read_into_its_types() -> None:
    table = read_table(
        Example, {"home": "/x", "cache": "/y", "ratio": 1, "betas": [0.1, 0.2], "options": {"a": 1}}
    )
    assert table == Example(
        home=Path("/x"), cache=Path("/y"), ratio=1, betas=(0.1, 0.2), options={"a": 1}
    )


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, "example.home: expected a path; found nothing"),
        ({"home": 3}, "example.home: expected a path; found 3"),
        (
            {"home": "/x", "kind": "ring"},
            'example.kind: expected "star" or "chain"; found \'ring\'',
        ),
        (
            {"home": "/x", "ratio": 0},
            "example.ratio: expected a number, more than 0.0, at most 1.0; found 0",
        ),
        (
            {"home": "/x", "ratio": True},
            "example.ratio: expected a number, more than 0.0, at most 1.0; found True",
        ),
        (
            {"home": "/x", "betas": [0.9, 1.5]},
            "example.betas: expected [a number, a number], at least 0.0, at most 0.999; found (0.9, 1.5)",
        ),
        (
            {"home": "/x", "betas": [0.9]},
            "example.betas: expected [a number, a number], at least 0.0, at most 0.999; ",
        ),
        (
            {"hom": "/x"},
            "example.hom: unknown key; did you mean home?",
        ),
        (
            {"home": "/x", "engine": "loud"},
            'example.engine: expected "fast" or "exact"; found \'loud\'',
        ),
    ],
)
def test_an_error_names_the_key_and_what_was_expected(values: dict[str, Any], line: str) -> None:
    with pytest.raises(OperatorFault) as fault:
        read_table(Example, values)
    assert str(fault.value).startswith(line)


def test_a_file_that_is_missing_or_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="cannot read"):
        read_toml(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(OperatorFault, match="is not TOML"):
        read_toml(tmp_path / "bad.toml")
    assert table_of({}, "example") == {}
    with pytest.raises(OperatorFault, match="example: expected a table; found 3"):
        table_of({"example": 3}, "example")


@pytest.mark.parametrize("table", [Example, LearnerConfig])
def test_printed_tables_can_be_read_again(table: type[Table]) -> None:
    printed = tomllib.loads(print_tables(table))[table.TABLE]
    required = dict.fromkeys(
        ("url", "token_file", "model", "snapshot_root", "out_dir", "home"), "/x"
    )
    known = {
        name: value
        for name, value in {**required, "steps": 1}.items()
        if name in table.__dataclass_fields__
    }
    read_table(table, {**printed, **known})


def test_a_printed_table_lists_the_choices_of_each_key() -> None:
    lines = print_tables(Example).splitlines()
    assert '# how ("star" or "chain")' in lines
    assert '# which ("fast" or "exact")' in lines


def test_a_compiled_learner_is_refused_at_its_start_if_engines_tell_experts() -> None:
    learner = {"compile": True, "steps": 1, **dict.fromkeys(("url", "token_file", "model"), "/x")}
    learner |= {"snapshot_root": "/x", "out_dir": "/x"}
    with pytest.raises(OperatorFault, match=r"learner\.compile: expected false"):
        LearnerConfig.of({"learner": learner, "policy": {"columns": ["experts"]}})
    LearnerConfig.of({"learner": learner, "policy": {"columns": []}})
