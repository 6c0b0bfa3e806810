"""The two modes of Echo (arXiv 2508.05387) in a whole simulated run: S = 0 is sequential pull, S >= 1 is push-pull."""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from echo2d.core.base.ids import GroupId, RunId
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.coordinator.events import CoordinatorRecord
from echo2d.core.rules.run import DisseminationTable, RunRules
from echo2d.core.rules.tasks import TaskRules
from echo2d.core.work.events import BatchCommitted, BatchFrozen, LeaseGiven, SampleKept
from echo2d_lab.faults.engine import STOP, VOCAB
from echo2d_lab.faults.fault_schedule import Schedule, WorkerSpec
from echo2d_lab.faults.world import SimulatedRun

WORKERS, PER_STEP, GROUP, SECONDS, TRAIN_S = 3, 16, 2, 120.0, 3.0


@dataclass
class Journal:
    """What became durable. meanwhile: by train step, leases given and answers kept while it trained, which is from
    when its batch is whole and the version before it published until it is committed. ages: of all spans of a step's
    batch. behind: answers with a token of another version than the newest. committed: the last step.
    """

    newest: int = -1
    committed: int = 0
    meanwhile: dict[int, int] = field(default_factory=dict)
    ages: dict[int, set[int]] = field(default_factory=dict)
    behind: int = 0
    written_by: dict[GroupId, set[int]] = field(default_factory=lambda: defaultdict(set))

    def note(self, record: CoordinatorRecord) -> None:
        match record:
            case VersionPublished(version=version):
                self.newest = version
            case BatchFrozen(step, groups=groups):
                self.meanwhile[step] = 0
                self.ages[step] = {step - 1 - v for group in groups for v in self.written_by[group]}
            case BatchCommitted(step):
                self.committed = step
                self.newest = -1  # until it is published, the learner does not train
            case SampleKept(group, trajectory=kept):
                versions = {int(span.version) for span in kept.spans}
                self.written_by[group] |= versions
                self.behind += versions != {self.newest}
                self._generates()
            case LeaseGiven():
                self._generates()
            case _:
                pass

    def _generates(self) -> None:
        step = self.newest + 1
        if step in self.meanwhile:
            self.meanwhile[step] += 1


def play(staleness: int, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Two minutes of a run without faults, in which workers make more than the learner trains."""
    task = TaskRules(max_new_tokens=24, stop_token_ids=(STOP,))
    rules = RunRules(
        run_id=RunId("run-1"),
        staleness_max=staleness,
        publish_every=1,
        trajectories_per_step=PER_STEP,
        group_size=GROUP,
        tasks=(task,),
        vocab_size=VOCAB,
        over_stale="drop",
        filter_zero_variance=False,
        dissemination=DisseminationTable(shape="auto", chains=1),
    )
    worker = WorkerSpec(6, 0.005, 0.1, 0.0, 0.0, 0.0, "")
    run = SimulatedRun(Schedule(0, rules, (worker,) * WORKERS, (), SECONDS, TRAIN_S, 1, 0.0))
    journal, persist = Journal(), run.judge.persist

    def noted(record: CoordinatorRecord) -> None:
        persist(record)
        journal.note(record)

    monkeypatch.setattr(run.judge, "persist", noted)
    run.run()
    assert journal.committed >= 15
    return journal


def test_workers_generate_nothing_while_a_step_trains_under_sequential_pull(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S = 0: fresh weights before each generation, and nobody generates while a step trains."""
    journal = play(0, monkeypatch)
    assert set().union(*journal.ages.values()) == {0}
    assert journal.behind == 0
    assert not any(journal.meanwhile.values())


@pytest.mark.parametrize("staleness", [1, 3])
def test_workers_generate_while_the_learner_trains_under_push_pull(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S >= 1: workers go on while the learner trains, and nothing older than S is trained.

    But for a step whose successors are whole when it begins: there were up to three of 32 in eight seeds.
    """
    journal = play(staleness, monkeypatch)
    assert max(set().union(*journal.ages.values())) == staleness
    busy = sum(bool(journal.meanwhile[step]) for step in range(1, journal.committed + 1))
    assert busy >= 0.9 * journal.committed
