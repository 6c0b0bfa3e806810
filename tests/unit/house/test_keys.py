"""A key of the configuration is declared once, and everything else is made from its declaration."""

from collections.abc import Iterator

from echo2d.config.coordinator import COORDINATOR_TABLES
from echo2d.config.renting import OfferTable, ProviderTable
from echo2d.config.tasks import EvalTable, TaskTable
from echo2d.config.worker import WorkerConfig
from echo2d.core.rules.prices import PriceTable
from echo2d.core.rules.run import ActivationTable, DisseminationTable, PolicyTable, RunRules
from echo2d.core.rules.table import Table
from echo2d.learner.config import LearnerConfig
from echo2d.plan.fleet.spec import TABLES, CentralizedTable
from tests.support.keys_page import PAGE, page

RUN = (*COORDINATOR_TABLES, TaskTable, EvalTable, PriceTable, ProviderTable, OfferTable)


def declared(*tables: type[Table]) -> Iterator[tuple[str, str, str]]:
    """Table, key, meaning."""
    for table in tables:
        for item in table.__dataclass_fields__.values():
            if "doc" in item.metadata:
                yield table.TABLE, item.name, item.metadata["doc"]


def test_the_meaning_of_a_key_is_declared_in_one_place() -> None:
    """A copied declaration has the same words, unless it is the same key of another table, as `same_key` makes it."""
    seen: dict[str, tuple[str, str]] = {}
    for table, name, doc in declared(*RUN, WorkerConfig, LearnerConfig):
        if len(doc) < 20:
            continue  # "of AdamW"
        first = seen.setdefault(doc, (table, name))
        assert first[1] == name, f"{table}.{name} and {'.'.join(first)} mean the same"


def test_rules_and_scenarios_take_the_keys_of_a_run() -> None:
    """By their declaration, so that neither has a default or a limit of its own."""
    policy = PolicyTable.__dataclass_fields__
    assert policy.items() <= RunRules.__dataclass_fields__.items()
    chosen = {
        name: item.metadata
        for table in (DisseminationTable, ActivationTable, PriceTable, PolicyTable)
        for name, item in table.__dataclass_fields__.items()
        if name not in ("mode", "trajectories_per_h")
    }
    for table in TABLES:
        for name, item in table.__dataclass_fields__.items():
            if name in chosen and table is not CentralizedTable and name != "usd_per_gb_up":
                expected = chosen[
                    "learner_usd_per_h" if (table.TABLE, name) == ("learner", "usd_per_h") else name
                ]
                assert item.metadata == expected, f"{table.TABLE}.{name}: take it with `same_key`"


def test_the_page_of_keys_equals_what_the_tables_declare() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.support.keys_page"
