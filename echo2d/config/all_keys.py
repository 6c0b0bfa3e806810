"""Prints every key of the coordinator and of a worker, with its default, unit and meaning."""

from echo2d.config.coordinator import COORDINATOR_TABLES
from echo2d.config.renting import print_providers
from echo2d.config.tables import print_tables
from echo2d.config.tasks import EvalTable, TaskTable
from echo2d.config.worker import WorkerConfig
from echo2d.core.rules.prices import PriceTable
from echo2d.core.rules.table import Table


def print_config() -> str:
    """All keys of the coordinator and of a worker, as commented TOML with their defaults."""
    tables = print_tables(*COORDINATOR_TABLES, TaskTable, WorkerConfig)
    tables = tables.replace("[task]", "[[task]]")
    several = [_optional(each) for each in (EvalTable, PriceTable)]
    return "\n".join([tables, *several, print_providers()])


def _optional(table: type[Table]) -> str:
    """All keys of a table of which there may be none: commented out."""
    text = print_tables(table).replace(f"[{table.TABLE}]", f"[[{table.TABLE}]]")
    return "".join(f"# {line}\n" if line else "\n" for line in text.splitlines())
