"""Every number that an operator needs has a name, a unit and a help text, and is in docs/reference/metrics.md."""

import asyncio
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from echo2d.core.base.ids import Digest, LeaseId, PeerId, Version
from echo2d.core.protocol.control_messages import Heartbeat
from echo2d.core.protocol.sampling import WHOLE
from echo2d.core.protocol.trajectory import StepFigures
from echo2d.core.rules.tasks import EvalRules, TaskRules
from echo2d.core.status.schema import (
    ALERT_KINDS,
    Alert,
    EpisodesStatus,
    ProcessStatus,
    RentingStatus,
    Status,
)
from echo2d.core.work.calls.events import CallAsked, CallId
from echo2d.core.worker.events import (
    EngineRefitFailed,
    EngineRefitted,
    GenerationFailed,
    SampleProgressed,
)
from echo2d.runtime.coordinator.metrics import CoordinatorMetrics
from echo2d.runtime.process import prometheus as metrics_module
from echo2d.runtime.process.prometheus import LoopMetrics
from echo2d.runtime.worker.metrics import WorkerMetrics
from tests.support.coordinator_world import RULES, World, train
from tests.support.paths import REPO
from tests.support.polling import HANG_S
from tests.support.status_page import PAGE, metrics_page, page
from tests.support.tinker_clients import serving

DOCUMENT = (REPO / "docs" / "reference" / "metrics.md").read_text()
ROWS = re.findall(r"^\| `(\w+)`(?: \((.*?)\))? \| (\w+) \| (.*) \|$", DOCUMENT, re.MULTILINE)
RENTING = RentingStatus(
    usd_per_h=1.5,
    usd_per_h_max=2.0,
    spent_usd=3.0,
    set_aside_usd=2.0,
    committed_usd=5.0,
    left_usd=15.0,
    usd_total_max=20.0,
    why="",
    blind=(),
    states={"serving": 3},
    boxes=(),
    alerts=(),
)
PROCESS = ProcessStatus(run_id="run-1", peer_faults=2, learner_silent_s=7.0, renting=RENTING)
WORKER = {
    "connected": True,
    "running": 3,
    "links": 2,
    "slots": 4,
    "serving_version": 7,
    "publish_seq": 8,
}
DIGEST = Digest(bytes(32))


def trained() -> Status:
    """The status of a run with everything in it."""
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
    world = World(replace(RULES, evals=evals))
    world.connect("seed", kind="seed")
    world.connect("a")
    train(world, 3)
    world.drain()
    world.say(world.peers["a"], Heartbeat(1, 10**9))
    world.handle(CallAsked(CallId(0), "app", b"\1\0\0\0", 1, 8, WHOLE, (), None, Version(99), ""))
    statistics = world.state._statistics
    statistics.measurements.settle(1.0, {PeerId("a"): 1.0}, now=world.now)
    quality = statistics.qualities.of(PeerId("a"))
    assert quality is not None
    quality.above = 0.25
    quality.learner_k, quality.learner_z = 0.01, -0.5
    statistics.fault("lease", "x")
    statistics.dropped("stale", 2, [40, 60, 80])
    statistics.refused_results["bad"] += 1
    statistics.sent.seed_sent(3, 1.25)
    statistics.still_s.append(0.5)
    status = world.state.status(now=world.now)
    episodes = EpisodesStatus(offered=2, parked=5, waiting=3, tool_s_median=0.25, tool_s_p90=4.0)
    tasks = tuple(replace(task, episodes=episodes) for task in status.tasks)
    workers = tuple(replace(each, tokens_per_s=30.0) for each in status.workers)
    learner = replace(status.learner, figures=StepFigures(entropy=1.5, loss=-0.25))
    return replace(
        status,
        tasks=tasks,
        workers=workers,
        learner=learner,
        tinker=serving().clients(),
        process=PROCESS,
    )


def coordinator(tmp_path: Path) -> CoordinatorMetrics:
    made = CoordinatorMetrics(ledger=tmp_path / "ledger.sqlite")
    made.tokens_expire({"worker": 2e9})
    return made


def families(text: bytes) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def values(text: bytes) -> dict[str, float]:
    found = {}
    for family in families(text).values():
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def described(text: bytes) -> set[tuple[str, str, str, str]]:
    """Name, labels, kind, help of all of ours. Counters as they are scraped: with _total."""
    rows = set()
    for family in families(text).values():
        if family.name.startswith("echo2d_"):
            own = {"le"} if family.type == "histogram" else set()
            labels = sorted({label for sample in family.samples for label in sample.labels} - own)
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.add((name, ", ".join(labels), family.type, family.documentation))
    return rows


def test_the_document_lists_every_metric(tmp_path: Path) -> None:
    made = coordinator(tmp_path)
    made.events.labels("PeerSaid").inc()
    worker = WorkerMetrics()
    worker.handled(EngineRefitFailed(Version(1), DIGEST, "x", None))
    ours = described(made.render(trained())) | described(worker.render(WORKER))
    documented = {
        (name, ", ".join(sorted(labels.split(", "))), kind, text)
        for name, labels, kind, text in ROWS
    }
    assert ours == documented
    assert len(ROWS) == len(set(ROWS))


def test_the_page_of_metrics_equals_the_declarations_of_the_status() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.support.status_page"
    assert metrics_page() == DOCUMENT, "python -m tests.support.status_page"


def test_names_of_metrics_follow_the_conventions(tmp_path: Path) -> None:
    """Base units, in the plural; counters end in _total, and nothing else does.

    Labels that Prometheus gives a meaning are used for nothing else.
    """
    for name, labels, kind, text in described(coordinator(tmp_path).render(trained())) | described(
        WorkerMetrics().render(WORKER)
    ):
        assert re.fullmatch(r"echo2d_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"_(ms|kb|mb|minutes|s)(_|$)", name)
        assert not {"quantile", "le"} & set(labels.split(", "))
        assert text
        assert not text.endswith(".")


def test_the_metrics_of_a_run_have_its_numbers(tmp_path: Path) -> None:
    seen = values(coordinator(tmp_path).render(trained()))
    assert seen["echo2d_epoch"] == 1
    assert seen["echo2d_committed_step"] == 3
    assert seen["echo2d_newest_version"] == 3
    assert seen["echo2d_peers{kind=worker,state=joined}"] == 1
    assert seen["echo2d_trajectories_trained_total"] == 12
    assert seen["echo2d_trained_staleness_steps_bucket{le=0.0}"] == 4
    assert (
        seen["echo2d_trained_staleness_steps_bucket{le=2.0}"]
        == seen["echo2d_trained_staleness_steps_count"]
        == 12
    )
    assert seen["echo2d_trained_staleness_steps_sum"] == 0 + 4 + 8
    assert seen["echo2d_faults_total{kind=lease}"] == 1
    assert seen["echo2d_groups_dropped_total{reason=stale}"] == 1
    assert seen["echo2d_seed_copies"] == 1.25
    assert seen["echo2d_seed_usd_total"] == 0
    assert seen["echo2d_reward_mean"] == trained().rewards[-1][1]
    assert seen["echo2d_version_full_bytes"] == trained().version_bytes[3].full_bytes
    assert seen["echo2d_learner_silent_seconds"] == 7
    assert (seen["echo2d_learner_loss"], seen["echo2d_learner_entropy"]) == (-0.25, 1.5)
    assert "echo2d_learner_mfu" not in seen, "the learner did not say"
    assert seen["echo2d_tokens_trained_total"] == trained().tokens_trained > 0
    assert seen["echo2d_token_expiry_timestamp_seconds{role=worker}"] == 2e9
    assert seen["echo2d_gateway_calls_total{outcome=version}"] == 1
    assert seen["echo2d_recent_train_step_seconds{percentile=50}"] == 1.0
    assert seen["echo2d_worker_accepted_total{name=a,worker=a}"] > 0
    assert seen["echo2d_broadcast_peers{state=verified}"] == 1
    assert seen["echo2d_task_parked_samples{task=}"] == 5
    assert seen["echo2d_task_tool_seconds{percentile=90,task=}"] == 4.0


def test_clients_of_the_tinker_api_are_counted_by_caller(tmp_path: Path) -> None:
    seen = values(coordinator(tmp_path).render(trained()))
    found = {name: value for name, value in seen.items() if name.startswith("echo2d_tinker_")}
    assert {name for name in found if name.endswith("{caller=bob}")} == {
        name.replace("ann", "bob") for name in found if name.endswith("{caller=ann}")
    }
    assert len(found) == 16, "a sample for each caller, and none for a session"
    for name, value in {
        "sessions{caller=ann}": 1, "models{caller=ann}": 2, "steps_total{caller=ann}": 2,
        "trained_tokens_total{caller=ann}": 200, "train_seconds_total{caller=ann}": 6.0,
        "operations_waiting{caller=ann}": 1, "sampled_tokens_total{caller=bob}": 6, "samples_waiting{caller=bob}": 1,
    }.items():  # fmt: skip
        assert found[f"echo2d_tinker_{name}"] == value


def test_an_unknown_value_has_no_sample(tmp_path: Path) -> None:
    seen = values(coordinator(tmp_path).render(replace(World().state.status(), process=PROCESS)))
    assert "echo2d_newest_version" not in seen
    assert not any(name.startswith("echo2d_recent_") for name in seen)
    assert not any("parked" in name for name in seen), "no task of it is an environment"
    assert "echo2d_serving_version" not in values(
        WorkerMetrics().render({**WORKER, "serving_version": None})
    )


def test_an_infeasible_run_reports_infinitely_many_missing_workers(tmp_path: Path) -> None:
    """So mu_pool / mu_min is 0 then, and the alert on it fires."""
    status = trained()
    for feasible, expected in ((False, math.inf), (None, None)):
        provision = replace(status.provision, mu_min=None, feasible=feasible)
        seen = values(coordinator(tmp_path).render(replace(status, provision=provision)))
        assert seen.get("echo2d_mu_min") == expected


def test_alerts_are_counted_by_kind(tmp_path: Path) -> None:
    status = World().state.status()
    seen = values(coordinator(tmp_path).render(status))
    counted = {kind: seen[f"echo2d_alerts{{kind={kind}}}"] for kind in ALERT_KINDS}
    assert {kind for kind, count in counted.items() if count} == {
        "no_learner",
        "no_workers",
        "seed_away",
    }
    assert sum(counted.values()) == seen["echo2d_attention"] == 3


def test_a_finished_run_raises_no_alert(tmp_path: Path) -> None:
    told = tuple(Alert(kind, "x") for kind in ("run_finished", "run_changed", "seed_away"))
    seen = values(coordinator(tmp_path).render(replace(World().state.status(), alerts=told)))
    assert seen["echo2d_attention"] == 1
    assert seen["echo2d_alerts{kind=run_finished}"] == 1


def test_a_role_without_a_token_that_expires_has_no_sample(tmp_path: Path) -> None:
    made = coordinator(tmp_path)
    made.tokens_expire({"viewer": 3e9})
    seen = values(made.render(trained()))
    assert [name for name in seen if "expiry" in name] == [
        "echo2d_token_expiry_timestamp_seconds{role=viewer}"
    ]


def test_a_worker_counts_tokens_refits_and_failures() -> None:
    made = WorkerMetrics()
    progress = SampleProgressed(LeaseId(1), 0, 0, (1, 2, 3), (0.0, 0.0, 0.0), (), None)
    for event in (
        progress,
        GenerationFailed(LeaseId(1), 0, "x"),
        EngineRefitted(Version(0), DIGEST, 130.0, memory_ok=True),
        EngineRefitted(Version(1), DIGEST, 0.02, True, recomputed_tokens=7, recompute_s=None),
        EngineRefitted(Version(2), DIGEST, 0.0, True, recomputed_tokens=5, recompute_s=0.5),
        EngineRefitFailed(Version(1), DIGEST, "x", None),
    ):
        made.handled(event)
    seen = values(made.render(WORKER))
    assert seen["echo2d_events_total{kind=SampleProgressed}"] == 1
    assert seen["echo2d_tokens_generated_total"] == 3
    assert seen["echo2d_generations_failed_total"] == seen["echo2d_refits_failed_total"] == 1
    assert seen["echo2d_refit_pause_seconds_sum"] == 0.02, "the engine's start is not one"
    assert seen["echo2d_kv_tokens_dropped_total"] == 12
    assert seen["echo2d_recompute_seconds_count"] == 1, "of the first it is not known"
    assert seen["echo2d_recompute_seconds_sum"] == 0.5
    assert (seen["echo2d_connected"], seen["echo2d_serving_version"]) == (1, 7)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "_TICK_S", 0.001)
    monkeypatch.setattr(metrics_module, "KERNEL_TICKS", 1)


async def watched(
    made: LoopMetrics[Status], path: Path, holds: Callable[[dict[str, float]], bool]
) -> dict[str, float]:
    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(made.watch(path))
        while not holds(seen := values(made.render(trained()))):
            await asyncio.to_thread(os.sched_yield)
        watching.cancel()
    return seen


@pytest.mark.usefixtures("quick")
async def test_metrics_measure_the_event_loop_and_the_disk(tmp_path: Path) -> None:
    made = coordinator(tmp_path)
    await asyncio.to_thread((tmp_path / "ledger.sqlite").write_bytes, b"x" * 100)
    await asyncio.to_thread((tmp_path / "ledger.sqlite-wal").write_bytes, b"x" * 11)
    seen = await watched(
        made, tmp_path, lambda seen: seen["echo2d_event_loop_delay_seconds_count"] > 2
    )
    assert seen["echo2d_disk_free_bytes"] > 1e6
    assert seen["echo2d_ledger_bytes"] == 111
    assert seen["process_resident_memory_bytes"] > 0


@pytest.mark.usefixtures("quick")
async def test_a_missing_disk_has_no_sample(tmp_path: Path) -> None:
    seen = await watched(
        coordinator(tmp_path),
        tmp_path / "gone",
        lambda seen: seen["echo2d_event_loop_delay_seconds_count"] > 1,
    )
    assert seen["echo2d_disk_free_bytes"] != seen["echo2d_disk_free_bytes"]
