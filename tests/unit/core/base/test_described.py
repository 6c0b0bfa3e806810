"""A described field keeps its default, and carries its description."""

from dataclasses import dataclass, fields

from echo2d.core.base.described import described


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    needed: int = described("How many there are", "echo2d_there", counter=True)
    named: str = described("its name", default="a")
    each: tuple[int, ...] = described("all of them", default=(), rows={"worker": "id"})


def test_a_field_keeps_its_default_and_its_meaning() -> None:
    assert Example(needed=3) == Example(needed=3, named="a", each=())
    needed, named, each = fields(Example)
    assert dict(needed.metadata) == {
        "meaning": "How many there are", "metric": "echo2d_there", "counter": True, "label": "", "rows": {},
    }  # fmt: skip
    assert (named.metadata["metric"], each.metadata["rows"]) == ("", {"worker": "id"})
