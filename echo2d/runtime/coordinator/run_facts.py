"""The facts that define a run: shown to people, and compared by the next start.

    config, tasks, config.json --> facts --compare with the ledger's--> continue | alert | refuse

All batches, buffered groups and versions of a run have one model and one group size, so a start with
another model or group size is refused. A change that the run survives, but that a mistyped config may
have caused, is an alert until the next start. Every change is logged.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.coordinator.events import RunFactsKept
from echo2d.core.rules.run import RunRules
from echo2d.core.status.schema import NamedTask, RunFacts
from echo2d.errors import OperatorFault
from echo2d.runtime.coordinator.data_plane import OpenTask
from echo2d.this_build import THIS_BUILD

# The keys of a model's config.json that give its shape.
SHAPE_KEYS = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers")
MODEL = "config.json of run.base_model"
# The start is refused if these change: other values do not fit what the ledger holds.
FIXED = frozenset({MODEL, "run.key", "policy.group_size", "policy.trajectories_per_step"})
# A change of these is an alert: it is either intended or a mistake.
ODD = frozenset({"run.base_model", "tasks"})
DAY = "the day that chat templates see"
# Replaces an empty value in a sentence.
NONE = "none"

log = logging.getLogger("echo2d.coordinator")

Facts = Mapping[str, str]


def run_facts(
    config: CoordinatorConfig, tasks: Sequence[OpenTask], changes: Sequence[str]
) -> RunFacts:
    """The facts for the status. changes: sentences about what `go_on` found."""
    run, model = config.run, config.run.base_model
    return RunFacts(
        name=run.name or run.run_dir.absolute().name,
        model="" if model is None else str(model.absolute()),
        tasks=tuple(NamedTask(task.name, task.table.kind) for task in tasks),
        software=THIS_BUILD.name,
        started_at=time.time(),
        changes=tuple(changes),
    )


def facts_of(
    config: CoordinatorConfig,
    rules: RunRules,
    model: Mapping[str, Any],
    tasks: Sequence[OpenTask],
    day: str,
) -> dict[str, str]:
    """The facts for the ledger. model: the base model's config.json; empty: no base model is named. day: what
    `day_of` returned."""
    shape = {key: model[key] for key in SHAPE_KEYS if key in model} or {
        "vocab_size": rules.vocab_size
    }
    base = config.run.base_model
    return {
        "run.key": rules.run_id,
        MODEL: ", ".join(f"{key} {_plain(value)}" for key, value in shape.items()),
        "run.base_model": "" if base is None else str(base.absolute()),
        "tasks": ", ".join(sorted(f"{task.name} ({task.table.kind})" for task in tasks)),
        "policy.group_size": str(rules.group_size),
        "policy.trajectories_per_step": str(rules.trajectories_per_step),
        "policy.staleness_max": str(rules.staleness_max),
        "policy.publish_every": str(rules.publish_every),
        DAY: day,
    }


def day_of(before: Facts) -> str:
    """The day, in UTC, on which the run began. Chat templates use it as today's date, whenever they are rendered."""
    return before.get(DAY) or datetime.now(UTC).date().isoformat()


def go_on(before: Facts, now: Facts) -> tuple[list[RunFactsKept], list[str]]:
    """The records for the ledger, and a sentence about each odd change.

    OperatorFault: the run cannot continue with this change.
    """
    changed = {key: then for key, then in before.items() if now.get(key, then) != then}
    for key in sorted(FIXED & changed.keys()):
        raise OperatorFault(
            f"{key}: this run began with {changed[key]}; found {now[key]}. Put the old value back, or "
            "begin a new run in another run.run_dir; `echo2d keep export --last` writes the model that "
            "the new run can begin with"
        )
    for key, then in changed.items():
        log.warning("changed key=%s before=%r now=%r", key, then, now[key])
    odd = [
        f"{key} changed since the last start, from {changed[key] or NONE} to {now[key] or NONE}"
        for key in sorted(ODD & changed.keys())
    ]
    return ([] if dict(before) == dict(now) else [RunFactsKept(tuple(now.items()))]), odd


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
