"""A short real run with one or two `kill -9` in it, and what must be true afterwards.

There are two witnesses. Neither asks the processes that are killed:

- the `Tap` between the coordinator and all other processes knows which results were acknowledged to
  a worker;
- triggers in the ledger (`watch_ledger`) record all rows that are written or deleted, in the same
  transactions; without them most rows would be lost, because the learner's checkpoints delete them.
"""

import contextlib
import json
import random
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from echo2d.client import Coordinator
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.demo.chaos import VICTIM_KINDS, VictimKind, kill_process, start_again
from echo2d.demo.processes import Program
from echo2d.demo.results import read_rows
from echo2d.demo.run import DEMO_LEARNER
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.store.ledger import Ledger
from echo2d.store.ledger_rows import _unpack_trajectory
from tests.support.connection_tap import Tap
from tests.support.polling import START_S
from tests.support.programs import Site

STEPS = 8
GROUPS = 4  # of each batch
GROUP_SIZE = 8
LATE_MAX = max(1, GROUP_SIZE // 8)  # samples that a group may be trained without (`group_patience`)
STALENESS = 1  # the site's policy.staleness_max
STEP_FLOOR_S = 0.2  # a step takes at least this long, so that there is time to kill a process
CHECKPOINT_EVERY = 3
START_UP_S = 6.0  # about the time in which a program starts
AGAIN = 0.3  # share of the drawn points that have a second kill
RUN_S_MAX = 120.0  # a run takes 15 s on an idle machine

Story = list[tuple[str, Any, Any, Any, Any]]

WITNESS = """
CREATE TABLE story (at INTEGER PRIMARY KEY, what TEXT NOT NULL, a, b, c, d);
CREATE TRIGGER told_epoch AFTER INSERT ON epochs BEGIN
    INSERT INTO story (what, a, b) VALUES ('epoch', new.epoch, new.resume_step); END;
CREATE TRIGGER told_sample AFTER INSERT ON samples BEGIN
    INSERT INTO story (what, a, b, c, d)
    VALUES ('kept', new.group_id, new.sample, new.lease || '.' || new.attempt || '.' || new.sample,
        new.trajectory); END;
CREATE TRIGGER told_reward AFTER UPDATE OF reward ON samples WHEN new.reward IS NOT NULL BEGIN
    INSERT INTO story (what, a, b, c) VALUES ('scored', new.group_id, new.sample, new.reward); END;
CREATE TRIGGER told_left_out AFTER INSERT ON left_out BEGIN
    INSERT INTO story (what, a, b) VALUES ('left out', new.group_id, new.sample); END;
CREATE TRIGGER told_batch AFTER INSERT ON batches BEGIN
    INSERT INTO story (what, a, b, c) VALUES ('frozen', new.step, new.digest, new.groups); END;
CREATE TRIGGER told_commit AFTER INSERT ON commits BEGIN
    INSERT INTO story (what, a, b, c) VALUES ('committed', new.step, new.digest, new.epoch); END;
CREATE TRIGGER told_revoked AFTER UPDATE OF revoked ON versions BEGIN
    INSERT INTO story (what, a, b) VALUES ('revoked', new.version, new.digest); END;
CREATE TRIGGER told_end BEFORE DELETE ON groups BEGIN
    INSERT INTO story (what, a) VALUES ('gone', old.group_id); END;
"""


def watch_ledger(path: Path, more: str = "") -> None:
    """Make the ledger of a run that has not started yet, with the triggers of the witness. more: further triggers."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    RunDirectory(path.parent)
    Ledger.open(path).close()
    with contextlib.closing(sqlite3.connect(path)) as ledger:
        ledger.executescript(WITNESS + more)


def read_story(path: Path) -> Story:
    """All changes of the ledger so far, in order."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
        return ledger.execute("SELECT what, a, b, c, d FROM story ORDER BY at").fetchall()


@dataclass(frozen=True, slots=True)
class Point:
    """The process that is killed, and when. The first delay counts from this train step (0: from the
    start of the run), the second one from the restart of the process.

    also: other kinds that are killed at the same moment, before anything starts again.
    """

    kind: VictimKind
    step: int
    delays_s: tuple[float, ...] = (0.1,)
    also: tuple[VictimKind, ...] = ()

    @staticmethod
    def draw(rng_seed: int) -> "Point":
        """Draw a kill before the last two steps, and sometimes a second kill while the process recovers."""
        rng = random.Random(rng_seed)
        step = rng.randrange(STEPS - 1)
        delay_s = rng.uniform(0.0, STEP_FLOOR_S if step else START_UP_S)
        again_s = [rng.uniform(0.0, START_UP_S)] if rng.random() < AGAIN else []
        return Point(VICTIM_KINDS[rng_seed % len(VICTIM_KINDS)], step, (delay_s, *again_s))


class CrashSite(Site):
    """A site whose programs reach the coordinator through a tap."""

    learner_table = DEMO_LEARNER.replace(
        "checkpoint_every = 15", f"checkpoint_every = {CHECKPOINT_EVERY}"
    ) + (f'step_floor_s = {STEP_FLOOR_S}\nurl = "{{url}}"\n')
    tap: Tap

    def url(self) -> str:
        super().url()
        return self.tap.url

    @property
    def ledger(self) -> Path:
        return self.run_dir / "ledger.sqlite"

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.directory / "learner" / "metrics.jsonl")

    @property
    def patience(self) -> float:
        return CoordinatorConfig.load(self.config).policy.group_patience

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait. It is a failure if a program ends by itself meanwhile."""
        deadline = time.monotonic() + RUN_S_MAX
        while not condition():
            self.programs.check()
            assert time.monotonic() < deadline, (
                f"stuck after step {[row['step'] for row in self.rows]}"
            )
            time.sleep(0.05)

    def wait_until_trained(self, steps: int) -> None:
        self.wait_until(lambda: len(self.rows) >= steps)


def run_with_crashes(site: CrashSite, *points: Point, workers: int) -> None:
    """Run to the end through these kills, and assert that the books balance."""
    watch_ledger(site.ledger)
    with Tap(site.run_dir) as site.tap:
        site.coordinate()
        for number in range(1, workers + 1):
            site.join(f"worker-{number}", "--threads=1")
        learner = site.learn(STEPS)
        seen: list[Story | None] = []
        for point in points:
            site.wait_until_trained(point.step)
            struck = [
                strike(site, (point.kind, *point.also), delay_s, learner)
                for delay_s in point.delays_s
            ]
            assert struck[0] is not None, f"no {point.kind} was killed"
            seen += struck
        site.wait_until(lambda: learner.returncode is not None)
        assert learner.returncode == 0, learner.tail()
        with Coordinator(
            site.url(), token_file=site.run_dir / "tokens" / "viewer.token"
        ) as coordinator:
            settle(coordinator, site.ledger, workers)
        story = read_story(site.ledger)
        for before in filter(None, seen):
            assert story[: len(before)] == before, "what was written before a kill has changed"
        balance(story, site.rows, site.tap.acknowledged, patience=site.patience)


def strike(
    site: CrashSite, kinds: Sequence[VictimKind], delay_s: float, learner: Program
) -> Story | None:
    """Kill processes of these kinds, and start again those without a supervisor.

    Returns the story of the ledger just before the kill, or None: the learner had ended, and
    nothing was killed.
    """
    time.sleep(delay_s)  # any moment may be hit
    names = {
        kind: {"worker": "worker-1", "learner": learner.name}.get(kind, kind) for kind in kinds
    }
    while learner.returncode is None:
        seen = read_story(site.ledger)
        struck = [
            kind
            for kind, name in names.items()
            if kill_process(kind, name, site.programs) is not None
        ]
        for kind in struck:
            start_again(kind, names[kind], site.programs)
        if struck:
            return seen
        time.sleep(0.01)
    return None


def settle(coordinator: Coordinator, ledger: Path, workers: int) -> None:
    """Wait until all workers have the last version and coordinator and ledger hold the same."""
    deadline = time.monotonic() + START_S
    while unsettled := _unsettled(coordinator.status(), whole_groups(ledger), workers):
        assert time.monotonic() < deadline, f"not yet so (found, expected): {unsettled}"
        time.sleep(0.1)


def _unsettled(status: dict[str, Any], whole: int, workers: int) -> dict[str, tuple[Any, Any]]:
    groups = status["groups"]
    ends = [
        each["serving"] and (each["serving"]["version"], each["memory_ok"])
        for each in status["workers"]
    ]
    pairs = {
        "committed step": (status["committed_step"], STEPS),
        "seed": (status["seed_alive"], True),
        "workers": (ends, [(STEPS, True)] * workers),
        "groups in flight": (groups["in_flight"], 0),
        "whole groups in the coordinator and its ledger": (groups["buffered"], whole),
    }
    return {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}


def whole_groups(path: Path) -> int:
    """The groups in the ledger that are in no batch and whose samples are all scored or left out."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
        (count,) = ledger.execute(
            "SELECT count(*) FROM (SELECT group_id FROM (SELECT group_id, sample FROM samples "
            "WHERE reward IS NOT NULL UNION SELECT group_id, sample FROM left_out) "
            "WHERE group_id NOT IN (SELECT value FROM batches, json_each(groups)) "
            "GROUP BY group_id HAVING count(*) = ?)",
            (GROUP_SIZE,),
        ).fetchone()
    return int(count)


def balance(
    story: Story, rows: list[dict[str, Any]], acknowledged: set[str], *, patience: float
) -> None:
    """Check that the records of the two witnesses and of the learner agree."""
    nothing_is_lost(story, acknowledged)
    batches = batches_stay(story)
    trained = samples_are_whole(story, GROUP_SIZE, late_max=LATE_MAX if patience else 0)
    steps_are_whole(story, batches)
    learner_agrees(story, rows, batches, trained)


def nothing_is_lost(story: Story, acknowledged: set[str]) -> None:
    """Every acknowledged result is in the ledger once; every whole group that was deleted had a reason."""
    kept = [what for what in story if what[0] == "kept"]
    assert acknowledged, "the tap has heard nothing"
    assert acknowledged <= {result for _, _, _, result, _ in kept}, (
        "acknowledged and not in the ledger"
    )
    assert max(Counter((group, sample) for _, group, sample, *_ in kept).values()) == 1, (
        "a sample was kept twice"
    )
    wrote: dict[int, set[tuple[int, bytes]]] = defaultdict(set)
    groups: dict[int, GroupRows] = defaultdict(GroupRows)
    revoked: set[tuple[int, bytes]] = set()
    batched: set[int] = set()
    newest = 0  # the newest step whose batch is frozen
    for what, first, second, third, fourth in story:
        groups[first].note(what, second, third)
        match what:
            case "kept":
                wrote[first] |= {
                    (span.version, span.digest) for span in _unpack_trajectory(fourth).spans
                }
            case "revoked":
                revoked.add((first, second))
            case "frozen":
                newest = max(newest, first)
                batched |= set(json.loads(third))
            case "gone" if first not in batched and groups[first].is_whole(GROUP_SIZE):
                too_old = newest - min(version for version, _ in wrote[first]) > STALENESS
                equal = len(set(groups[first].rewards.values())) == 1
                assert equal or wrote[first] & revoked or too_old, (
                    f"group {first} was dropped for no reason"
                )


def batches_stay(story: Story) -> dict[int, tuple[bytes, list[int]]]:
    """A step's batch never changes: neither its digest nor its groups."""
    found: dict[int, set[tuple[bytes, str]]] = defaultdict(set)
    for what, step, digest, groups, _ in story:
        if what == "frozen":
            found[step].add((digest, groups))
    changed = {step for step, each in found.items() if len(each) > 1}
    assert not changed, "these batches have changed"
    batches = {step: (digest, json.loads(groups)) for step, ((digest, groups),) in found.items()}
    for what, step, digest, *_ in story:
        assert what != "committed" or batches[step][0] == digest, (
            f"step {step} was committed with another batch"
        )
    return batches


@dataclass(slots=True)
class GroupRows:
    """The rows of one group in the ledger so far, by sample. left_out: samples that the group declares as left out."""

    kept: set[int] = field(default_factory=set)
    rewards: dict[int, float] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)

    def note(self, what: str, sample: int, reward: float) -> None:
        """Take in an entry of the story. Entries that are about no group are ignored."""
        match what:
            case "kept":
                self.kept.add(sample)
            case "scored":
                self.rewards[sample] = reward
            case "left out":
                self.left_out.add(sample)

    def is_whole(self, size: int) -> bool:
        """Whether each sample is scored or left out."""
        return self.rewards.keys() | self.left_out == set(range(size))


def samples_are_whole(story: Story, size: int, *, late_max: int) -> dict[int, set[int]]:
    """When its batch freezes, a group has all samples with rewards, or declares which ones never came (I5).

    late_max: samples that may be missing. Returns the samples that were trained, by group.
    """
    groups: dict[int, GroupRows] = defaultdict(GroupRows)
    trained: dict[int, set[int]] = {}
    for what, first, second, third, _ in story:
        groups[first].note(what, second, third)
        for group in json.loads(third) if what == "frozen" else ():
            assert groups[group].is_whole(size), f"group {group} is not whole: {groups[group]}"
            trained[group] = set(groups[group].rewards)
    for group, rows in groups.items():
        assert len(rows.left_out) <= late_max, f"group {group} lacks too many samples: {rows}"
        assert not rows.left_out & rows.kept, f"group {group} lacks a result that was kept: {rows}"
    return trained


def steps_are_whole(story: Story, batches: Mapping[int, tuple[bytes, list[int]]]) -> None:
    """Steps are committed in order without a gap, and each group is in one step only."""
    steps = list(range(1, STEPS + 1))
    resumed = {epoch: resume_step for what, epoch, resume_step, *_ in story if what == "epoch"}
    for epoch, resume_step in resumed.items():
        trained = [
            step
            for what, step, _, by, _ in story
            if what == "committed" and by == epoch and step > resume_step
        ]
        assert trained == steps[resume_step : resume_step + len(trained)], (
            f"epoch {epoch} has a gap"
        )
    assert {step for what, step, *_ in story if what == "committed"} == set(steps)
    trained = [group for step in steps for group in batches[step][1]]
    assert len(set(trained)) == len(trained) == STEPS * GROUPS, "a group was trained twice"


def learner_agrees(
    story: Story,
    rows: list[dict[str, Any]],
    batches: Mapping[int, tuple[bytes, list[int]]],
    trained: Mapping[int, set[int]],
) -> None:
    """The learner's metrics have the same batches and numbers of samples, none too stale, and resume at checkpoints."""
    resumed = {epoch: resume_step for what, epoch, resume_step, *_ in story if what == "epoch"}
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1))
    for row in rows:
        digest, groups = batches[row["step"]]
        assert bytes.fromhex(row["batch"]) == digest, "the learner trained on another batch"
        assert sum(row["staleness"].values()) == sum(len(trained[group]) for group in groups), (
            "the learner trained on other samples"
        )
        assert all(0 <= int(staleness) <= STALENESS for staleness in row["staleness"])
    for before, row in pairwise(rows):
        follows = (
            before["step"] + 1 if before["epoch"] == row["epoch"] else resumed[row["epoch"]] + 1
        )
        assert row["step"] == follows <= before["step"] + 1, "the steps have a gap"
