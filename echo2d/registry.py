"""The names that an operator can choose from, and where the code behind each one is.

To add an engine, a provider, a plan shape, a task or a scorer, write its module and add one line here. The
config's checks, `--print-config`, `--help` and the programs read these tables.

Another distribution adds commands, engines, providers and tasks by entry points of the groups
`echo2d.commands`, `echo2d.engines`, `echo2d.providers` and `echo2d.tasks`. It cannot replace a name that is
listed here. A scorer of another distribution needs no entry point: its name is "package.module:function".

An entry is the text "module:attribute". So the names can be read without an import, and `load` imports only the entry
that is needed.

    COMMANDS    a click command, shown by `echo2d --help`
    ENGINES     factory: engines.base.EngineOptions -> list[Engine]
    PROVIDERS   factory: providers.base.ProviderOptions -> Provider
    SHAPES      planner: core.topology.shapes.Planner
    TASKS       class:   tasks.base.Task or TextTask, or tasks.environment.Environment
    SCORERS     factory: the scorer's options -> tasks.scorers.base.Scorer
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

_INSTALLED = entry_points()


@dataclass(frozen=True, slots=True)
class ProviderKind:
    """A kind of provider."""

    factory: str
    meaning: str
    # Whether the provider starts and stops boxes that cost money. If not, its boxes join by themselves.
    rents: bool = True
    # Whether the operator must give the commands `start`, `stop` and `list`. If not, there must be none.
    commands: bool = False
    # Whether the provider reads `provider.options`. If not, they must be empty.
    options: bool = False


def installed(group: str) -> dict[str, str]:
    """The entries that other distributions add to a registry, by name."""
    return {each.name: each.value for each in _INSTALLED.select(group=f"echo2d.{group}")}


COMMANDS: Mapping[str, str] = installed("commands")

ENGINES: Mapping[str, str] = {
    **installed("engines"),
    "torch": "echo2d.engines.torch_engine.engine:make_torch_engines",
    "sglang": "echo2d.engines.sglang.engine:make_sglang_engines",
    "vllm": "echo2d.engines.vllm.engine:make_vllm_engines",
    "fake": "echo2d.engines.fake:make_fake_engines",
}

PROVIDERS: Mapping[str, ProviderKind] = {
    **{
        name: ProviderKind(entry, f"rents by {entry}", options=True)
        for name, entry in installed("providers").items()
    },
    "exec": ProviderKind(
        "echo2d.providers.exec:make_exec_provider", "runs the commands below", commands=True
    ),
    "static": ProviderKind(
        "echo2d.providers.static:make_static_provider",
        "its boxes join by themselves",
        rents=False,
    ),
}

SHAPES: Mapping[str, str] = {
    "auto": "echo2d.core.topology.planner:plan_auto",
    "star": "echo2d.core.topology.planner:plan_star",
    "chain": "echo2d.core.topology.planner:plan_chains",
}

TASKS: Mapping[str, str] = {
    **installed("tasks"),
    "rows": "echo2d.tasks.rows.task:RowsTask",
    "gym": "echo2d.tasks.gym:GymTask",
    "sort_digits": "echo2d.tasks.sort_digits:SortDigits",
    "agents": "echo2d.tasks.agents:Agents",
}

SCORERS: Mapping[str, str] = {
    "math": "echo2d.tasks.scorers.math:math",
    "exact": "echo2d.tasks.scorers.text:exact",
    "regex": "echo2d.tasks.scorers.text:regex",
    "choice": "echo2d.tasks.scorers.text:choice",
    "remote": "echo2d.tasks.scorers.remote:remote",
}


def load(entry: str) -> Any:
    """Import what "module:attribute" names. ImportError, AttributeError: it does not exist."""
    module, _, attribute = entry.partition(":")
    return getattr(importlib.import_module(module), attribute)


def one_of(names: Mapping[str, object]) -> str:
    """The names of a registry for a sentence, in quotes: "a", "b" or "c"."""
    *others, last = (f'"{name}"' for name in names)
    return f"{', '.join(others)} or {last}" if others else last
