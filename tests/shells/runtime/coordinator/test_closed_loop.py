"""A running coordinator decides by its own measurements: real sockets, real workers, fake engines."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.coordinator import activation_loop
from echo2d.engines.base import AdapterBase, GenerateRequest, RefitReport, SampleOutput
from echo2d.engines.fake import FakeEngine, FakePolicy
from tests.support.live_run import TOKENS, a_run, paced
from tests.support.peer import a_worker

T_TRAIN_S = 0.25  # with 4 trajectories a step 16/s are needed
NEEDED = 4 / T_TRAIN_S
AUTO = {"activation.mode": "auto", "activation.learner_usd_per_h": 0.1}
PRICES = {"one": 0.1, "two": 0.2, "three": 0.3}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Periods of a quarter of a second are none of a real run."""
    monkeypatch.setattr(activation_loop, "REVIEW_S_MIN", 0.1)


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.usefixtures("often")
async def test_surplus_workers_stand_by_and_step_in(tmp_path: Path) -> None:
    async with (
        a_run(tmp_path, AUTO, t_train_s=T_TRAIN_S, prices=PRICES) as run,
        AsyncExitStack() as others,
        AsyncExitStack() as cheapest,
    ):
        for name, stack in (("one", cheapest), ("two", others), ("three", others)):
            await stack.enter_async_context(
                a_worker(run, tmp_path / name, paced(3 * NEEDED), slots=4)
            )
        await run.until(lambda _: run.active() == {"one"} and len(run.workers()) == 3)
        await run.until(
            lambda _: not any(run.workers()[name]["leases"] for name in ("two", "three"))
        )
        before = run.workers()
        facts = await run.go_on(4)
        for name in ("two", "three"):
            row = run.workers()[name]
            assert (row["leases"], row["leased"], row["accepted"]) == (
                0,
                0,
                before[name]["accepted"],
            )
            assert row["serving"]["version"] > before[name]["serving"]["version"], (
                "it receives versions all the same"
            )
        assert run.workers()["one"]["accepted"] > before["one"]["accepted"]
        assert facts["provision"]["mu_min"] == pytest.approx(NEEDED, rel=0.2)
        assert facts["provision"]["shortfall"] < 0

        await cheapest.aclose()  # as by kill -9
        await run.until(lambda _: "one" not in run.workers())
        missed_at = run.steps
        await run.until(lambda _: run.active() == {"two"})
        assert run.steps <= missed_at + 1, "no review is waited for"
        facts = await run.go_on(4)
        assert max(map(int, facts["staleness"])) <= facts["staleness_max"]
        assert facts["groups_dropped"] == {}


@pytest.mark.usefixtures("often")
async def test_a_worker_with_a_spot_notice_ends_when_it_has_finished(tmp_path: Path) -> None:
    async with (
        a_run(tmp_path, AUTO, t_train_s=T_TRAIN_S, prices=PRICES) as run,
        a_worker(run, tmp_path / "one", paced(3 * NEEDED), slots=4) as leaver,
        a_worker(run, tmp_path / "two", paced(3 * NEEDED), slots=4),
    ):
        await run.until(lambda _: run.active() == {"one"} and len(run.workers()) == 2)
        leaver.leave("the test says so")
        await run.until(lambda _: "two" in run.active())
        facts = await run.until(lambda _: "one" not in run.workers())
        gone = next(row for row in facts["workers"] if row["name"] == "one")
        assert (gone["state"], gone["leases"]) == ("gone", 0)
        await run.go_on(3)
        facts = run.status()
        assert not {fault["kind"] for fault in facts["faults"]} & {"lease", "result"}
        assert (facts["groups_dropped"], facts["handed_over"]["partials"]) == ({}, 0)


class Watched(FakeEngine):
    """Writes down when it is told to stand still, to go on, to refit, and when it hands out tokens."""

    def __init__(self) -> None:
        policy = FakePolicy(answer_tokens=(TOKENS, TOKENS))
        super().__init__(policy, tokens_per_s=400.0, slots=4, refit_s=0.05)
        self.story: list[str] = []

    async def hold(self) -> None:
        await super().hold()
        self.story.append("held")

    async def release(self) -> None:
        self.story.append("released")
        await super().release()

    async def refit(
        self, snapshot: Path, label: str, base: AdapterBase | None = None
    ) -> RefitReport:
        report = await super().refit(snapshot, label, base)
        self.story.append("refitted")
        return report

    async def generate(self, request: GenerateRequest) -> AsyncIterator[SampleOutput]:
        async for delta in super().generate(request):
            self.story.append("tokens")
            yield delta


async def test_exclusive_workers_write_nothing_while_a_version_arrives(tmp_path: Path) -> None:
    engine = Watched()
    exclusive = {"dissemination.mode": "exclusive", "policy.staleness_max": 2}
    async with (
        a_run(tmp_path, exclusive, t_train_s=0.05) as run,
        a_worker(run, tmp_path / "one", engine, slots=4),
    ):
        facts = await run.until(lambda _: run.steps >= 6 and engine.story.count("released") >= 4)
    story, held = Counter[str](), False
    for event in engine.story:
        assert not (held and event == "tokens"), engine.story
        held = event == "held" or (held and event != "released")
        story[event] += 1
    assert story["held"] - 1 <= story["released"] <= story["refitted"]
    assert story["tokens"] >= 4 * 6
    assert facts["versions_published"] >= 6
    assert facts["provision"]["mode"] == "exclusive"


async def test_only_the_seed_sends_without_p2p(tmp_path: Path) -> None:
    async with (
        a_run(tmp_path, {"dissemination.p2p": False}, t_train_s=0.05) as run,
        a_worker(run, tmp_path / "one", paced(100.0)) as one,
        a_worker(run, tmp_path / "two", paced(100.0)) as two,
    ):
        await run.until(
            lambda _: all(row["serving"] and row["lag"] <= 1 for row in run.workers().values())
        )
        facts = await run.until(
            lambda facts: run.steps >= 4 and max(facts["seed_copies"].values(), default=0.0) > 1.9
        )
        assert len(run.workers()) == 2
        assert sum(run.seed._receiver._sent.values()) > 0
        assert [sum(worker._receiver._sent.values()) for worker in (one, two)] == [0, 0]
        assert max(facts["seed_copies"].values()) < 2.1, "each version once to each of the two"


async def test_a_seed_that_pays_for_its_bytes_sends_each_version_once(tmp_path: Path) -> None:
    """As soon as T_train and T_bcast are measured, and there is time; two copies are faster here."""
    priced = {
        "link.usd_per_gb_up": 0.09,
        "policy.staleness_max": 4,
        "policy.publish_every": 1,
        "dissemination.shape": "auto",
    }
    async with (
        a_run(tmp_path, priced, t_train_s=1.0) as run,
        a_worker(run, tmp_path / "one", paced(100.0)),
        a_worker(run, tmp_path / "two", paced(100.0)),
    ):
        await run.until(lambda _: len(run.workers()) == 2)
        facts = await run.until(
            lambda facts: run.steps >= 4 and 0.9 < list(facts["seed_copies"].values())[-1] < 1.1
        )
    newest = max(facts["seed_usd"], key=int)
    wire_bytes = facts["version_bytes"][newest]["wire_bytes"]
    paid = 0.09e-9 * facts["seed_copies"][newest] * wire_bytes
    assert facts["seed_usd"][newest] == pytest.approx(paid)
    assert facts["seed_usd_total"] >= facts["seed_usd"][newest]


SLOW_TASK: dict[str, Any] = {
    "task.kind": "tests.support.slow_task:SlowTask",
    "task.options": {"reward_s": 0.05},
}
# The worker takes 2 s for the answers of a step. A busy machine may take a second for what else a step needs: for a
# publish, a broadcast, a commit, and a reward. With a fast worker it is the machine that the learner waits for. And S
# is so large that broadcasts which are slow for this reason are fast enough.
SLOW_WORKER: dict[str, Any] = {"policy.trajectories_per_step": 8, "policy.staleness_max": 64}


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "t_train_s", "pace", "refit_s", "changes"),
    [
        ("learner", 0.25, 200.0, 0.0, {}),
        ("rollout", 0.1, 4.0, 0.0, SLOW_WORKER),
        ("reward", 0.02, 400.0, 0.0, SLOW_TASK),
        ("dissemination", 0.2, 800.0, 0.5, {"policy.staleness_max": 1}),
    ],
)
async def test_the_status_sentence_names_what_the_run_waits_for(
    kind: str,
    t_train_s: float,
    pace: float,
    refit_s: float,
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    async with (
        a_run(tmp_path, changes, t_train_s=t_train_s) as run,
        a_worker(run, tmp_path / "one", paced(pace, refit_s=refit_s), slots=16 if refit_s else 4),
    ):
        await run.until(lambda _: run.steps >= 4)
        facts = await run.until(lambda facts: facts["provision"]["bottleneck"]["kind"] == kind)
        found = facts["provision"]
        text = found["bottleneck"]["text"]
        assert f"waits {found['bubble']:.1%} of its time" in text
        assert (found["bubble"] > 0.02) == (kind != "learner")
        if kind != "reward":
            assert f"1 worker makes {3600 * found['mu_pool']:,.0f} trajectories/h" in text
        if kind in ("learner", "rollout"):
            assert 0 < found["mu_pool"] < 1.4 * pace, (
                "a machine that has much else to do makes it less"
            )
        if found["mu_min"] is not None and kind != "reward":
            assert f"the learner needs {3600 * found['mu_min']:,.0f}" in text
        if kind == "dissemination":
            assert f"a broadcast takes {found['estimates']['t_bcast_s']['value']:.3g} s" in text
            assert found["estimates"]["refit_pause_s"]["value"] == pytest.approx(refit_s, rel=0.2)
        if kind == "reward":
            assert f"batch lacks {max(0, 4 - facts['groups']['buffered'])} " in text
