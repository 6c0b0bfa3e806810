"""Runs that have something of everything in their status, and the keys that its JSON must have."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from echo2d.core.base.ids import GroupId, PeerId, Version
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.rules.audit import AuditRules
from echo2d.core.rules.run import ActivationTable
from echo2d.core.rules.tasks import EpisodeRules, EvalRules, TaskRules
from echo2d.core.work.calls.events import CallAsked, CallId
from echo2d.core.work.training.reward_watch import ALERT_FAILURES
from tests.support.catch_up import newcomer, running
from tests.support.coordinator_world import RULES, World, train
from tests.support.rollouts import world_of
from tests.support.status_page import PAGE
from tests.support.tinker_clients import serving

# Mappings whose keys are data: versions, reasons, kinds, states.
DATA_KEYS = {
    "staleness", "groups_dropped", "answer_tokens", "wasted_tokens", "results_refused", "seed_copies", "seed_usd",
    "version_bytes",
    "fault_counts", "gateway.ended", "renting.states",
}  # fmt: skip


def pinned_keys() -> set[str]:
    """Every key of `GET /v1/status` as a path: `workers[].serving.version`."""
    section = PAGE.read_text(encoding="utf-8").split("\n## ")[1]
    paths = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    found = {path.removesuffix("[]").replace("{}", ".*") for path in paths}
    return found | {path.removesuffix(".*") for path in found}


def key_paths(value: Any, path: str = "") -> set[str]:
    """The same of one answer. A key that is data is written as `*`."""
    if isinstance(value, dict):
        found = set[str]()
        for key, item in value.items():
            here = f"{path}.*" if path in DATA_KEYS else f"{path}.{key}".removeprefix(".")
            found |= {here} | key_paths(item, here)
        return found
    if isinstance(value, list):
        return {each for item in value for each in key_paths(item, f"{path}[]")}
    return set()


def trained() -> World:
    """A run with three trained steps, dropped groups, a refused result, a gateway call and a relay."""
    evals = (
        EvalRules(
            TaskRules(
                "held",
                stop_token_ids=(1,),
                max_new_tokens=1024,
            ),
            rows=2,
            every=1,
            samples=1,
            hold_s=60.0,
            solved_at=1.0,
        ),
    )
    world = World(replace(RULES, activation=ActivationTable(mode="auto"), evals=evals))
    world.connect("seed", kind="seed")
    for name in "ab":
        world.connect(name)
    world.connect("r", kind="relay", slots=0)
    train(world, 3)
    world.drain()
    world.refit(world.peers["a"])
    world.handle(CallAsked(CallId(0), "app", b"\1\0\0\0", 1, 8, WHOLE, (), None, Version(99), ""))
    statistics = world.state._statistics
    statistics.fault("refit", "out of memory")
    statistics.dropped("stale", 2, [40, 60])
    watch = world.state._groups.watch
    for number in range(ALERT_FAILURES):
        watch.failed("", (GroupId(number), 0), number, PeerId("a"), "crashed", now=world.now)
    statistics.refused_results["bad"] += 1
    statistics.sent.seed_sent(3, 1.25)
    for _ in range(2):
        statistics.measurements.still.add(0.5)
        statistics.measurements.t_bcast.add(1.0)
    return world


def catching_up() -> World:
    """A run in which a newcomer needs another form than the one that spreads."""
    world = running("a", "b", steps=3)
    newcomer(world, "late", 1)
    return world


def auditing() -> World:
    """A run whose auditor has scored answers, and has learnt the limits of honest engines."""
    world = World(
        replace(
            RULES,
            audit=AuditRules(
                trusted=("t",),
            ),
        )
    )
    world.connect("seed", kind="seed")
    world.connect("auditor", kind="auditor", slots=0)
    world.connect("a", trusted=True)
    world.connect("b")
    train(world, 60)
    return world


def playing() -> World:
    """A run whose environment has answered one turn, and has not answered the next one yet."""
    task = TaskRules(
        max_new_tokens=8,
        stop_token_ids=(1,),
        episode=EpisodeRules(
            tokens_max=64,
            turns_max=16,
        ),
    )
    world, (worker,) = world_of(2, tasks=(task,))
    for answered in (True, False):
        world.say(worker, worker.finish(*worker.open[0], tokens=(3, 1)))
        if answered:
            world.drain()
    return world


RICH: tuple[Callable[[], World], ...] = (trained, catching_up, auditing, playing, serving)
