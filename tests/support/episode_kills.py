"""A run with outside agents and an environment of its own, many `kill -9` in it, and what must be true afterwards.

Four witnesses are never killed: triggers in the ledger and the tap on the coordinator's connections, as in
`crash.py`; the diary of the agent, a file; and the `Witness` of the environment's steps.
"""

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from echo2d.client import Coordinator
from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.seeds import episode_seed, seed_key
from echo2d.core.protocol.trajectory import Partial, TrajectoryRecord, unpack_tokens
from echo2d.demo.processes import Program, Programs
from echo2d.demo.two_turns import OPENING
from echo2d.net.security.auth import load_or_make_key
from echo2d.runtime.run_dir.tokens import create_token
from echo2d.store.ledger_rows import _unpack_partial, _unpack_trajectory
from echo2d.tasks.sort_digits import EOS
from tests.support.crash import CrashSite, Story, batches_stay, read_story, samples_are_whole
from tests.support.diary_agent import read_diary
from tests.support.processes import is_running
from tests.support.witnessed_game import TURNS, Execution, Witness

Victim = Literal["coordinator", "worker", "learner", "agent", "environment"]
KILLS: Mapping[Victim, int] = {
    "coordinator": 9,
    "worker": 6,
    "learner": 4,
    "agent": 5,
    "environment": 6,
}
STALENESS = 3
GROUPS = {"outside": 2, "witnessed": 2}  # of each step, by task
GROUP_SIZE = 4
SILENCE_S = 30.0  # longer than an agent needs to start again
DELAY_S_MAX = 0.4
PAUSE_S_MAX = 0.5  # seconds before a program is started again
EVENTS_MAX = 6  # a kill waits for 1 to this many further turns and steps
LEDGER_CLOCK_S = 0.002  # the ledger's clock has whole milliseconds
STEPS_MAX = 1000  # more steps than are trained
STEPS_AFTER = 2  # steps that are trained after the last kill

TASKS = """\
[[task]]
kind = "agents"
name = "outside"
groups_per_step = {outside}
processes = 1
timeout_s = 60.0
options = {{ opening = [{opening}], stop_token_ids = [{end}], silence_s = {silence_s} }}

[[task]]
kind = "tests.support.witnessed_game:WitnessedGame"
groups_per_step = {witnessed}
processes = 1
timeout_s = 60.0
network = true
options = {{ port = {port} }}

[gateway]
enabled = true

"""
POLICY = f"""\
[policy]
staleness_max = {STALENESS}
publish_every = 1
trajectories_per_step = {GROUP_SIZE * sum(GROUPS.values())}
group_size = {GROUP_SIZE}
group_patience = 0.0
filter_zero_variance = false

"""
# More of the story: turns of episodes, with the time of what an environment is not asked for again.
EPISODES = """
CREATE TRIGGER told_group AFTER INSERT ON groups BEGIN
    INSERT INTO story (what, a, b, c) VALUES ('group', new.group_id, new.task, new.prompt); END;
CREATE TRIGGER told_turn AFTER INSERT ON turns WHEN new.turn BEGIN
    INSERT INTO story (what, a, b, c, d) VALUES ('turn', new.group_id, new.sample,
        new.turn || ' ' || new.lease || '.' || new.attempt || '.' || new.sample || ' ' || NOW, new.partial); END;
CREATE TRIGGER told_answer AFTER UPDATE OF tokens ON turns WHEN new.tokens IS NOT NULL BEGIN
    INSERT INTO story (what, a, b, c, d) VALUES ('answered', new.group_id, new.sample, new.turn, NOW); END;
CREATE TRIGGER told_end_of_episode AFTER INSERT ON samples BEGIN
    INSERT INTO story (what, a, b, d) VALUES ('ended', new.group_id, new.sample, NOW); END;
CREATE TRIGGER told_forgotten AFTER DELETE ON turns
    WHEN EXISTS (SELECT 1 FROM groups WHERE group_id = old.group_id) BEGIN
    INSERT INTO story (what, a, b, c, d) VALUES ('forgotten', old.group_id, old.sample, old.turn, NOW); END;
""".replace("NOW", "((julianday('now') - 2440587.5) * 86400.0)")

PROGRAM_NAMES: Mapping[Victim, str] = {
    "coordinator": "coordinator",
    "worker": "worker-1",
    "learner": f"learner-{STEPS_MAX}",
    "agent": "agent",
}

At = tuple[int, int]  # group, sample


class EpisodeSite(CrashSite):
    """A site whose run has two tasks: outside agents play one, and the other is a witnessed environment."""

    def __init__(
        self, directory: Path, model: Path, programs: Programs, witness: Witness, rng: random.Random
    ) -> None:
        super().__init__(directory, model, programs)
        self.witness, self._rng = witness, rng
        self.diary_file = directory / "diary.jsonl"
        text = self.config.read_text()
        tasks = TASKS.format(
            **GROUPS, opening=OPENING, end=EOS, silence_s=SILENCE_S, port=witness.port
        )
        for start, end, new in (
            ("[policy]", "[sampling]", POLICY),
            ("[task]", "[dissemination]", tasks),
        ):
            text = text[: text.index(start)] + new + text[text.index(end) :]
        self.config.write_text(text)
        self._struck: dict[Victim, int] = {}  # at its last kill: rows of a learner, process id

    def play(self) -> Program:
        """Start the outside agent."""
        token = self.directory / "agent.token"
        create_token(
            self.run_dir, "agent", role="agent", url=self.url(), out=token,
            max_workers=1, expires="1h",
        )  # fmt: skip
        module = "tests.support.diary_agent"
        return self.programs.start("agent", "-m", module, str(token), str(self.diary_file))

    @property
    def diary(self) -> list[dict[str, Any]]:
        return read_diary(self.diary_file)

    def events(self) -> int:
        """The number of turns that the agent got, and of steps that the environment began."""
        said = sum(1 for entry in self.diary if entry["what"] == "said")
        return said + len(self.witness.executions)

    # --- kills

    def strike(self, kinds: Sequence[Victim]) -> None:
        """Kill each of these at a drawn moment. Between two kills the run must make some progress."""
        left = list(kinds)
        while left:
            seen, wanted = self.events(), self._rng.randint(1, EVENTS_MAX)
            self._wait_for_events(seen + wanted)
            kind = self._wait_for_one(left)
            left.remove(kind)
            time.sleep(self._rng.uniform(0.0, DELAY_S_MAX))  # any moment may be hit
            self._kill(kind)

    def run_out(self) -> None:
        """Train a few steps more, let the agent end its episodes, and stop everything."""
        steps = len(self.rows) + STEPS_AFTER
        self.wait_until(lambda: len(self.rows) >= steps and self._is_back("agent"))
        agent = self.programs["agent"]
        agent.terminate()
        self.wait_until(lambda: agent.returncode is not None)
        self.programs.stop()

    def _wait_for_events(self, count: int) -> None:
        self.wait_until(lambda: self.events() >= count)

    def _wait_for_one(self, kinds: Sequence[Victim]) -> Victim:
        """Wait until one of these has worked since its last kill. Returns it."""
        found: list[Victim] = []

        def is_one_back() -> bool:
            found.extend(kind for kind in dict.fromkeys(kinds) if not found and self._is_back(kind))
            return bool(found)

        self.wait_until(is_one_back)
        return found[0]

    def _is_back(self, kind: Victim) -> bool:
        """Whether this victim has done something since it was killed."""
        match kind:
            case "coordinator":
                return True  # there are no events without it
            case "environment":
                newest = self.witness.executions[-1].pid if self.witness.executions else None
                return newest not in (None, self._struck.get(kind)) and is_running(newest)
            case "agent":
                life = self.programs["agent"].pid
                return any(entry["life"] == life for entry in self.diary)
            case "learner":
                return len(self.rows) > self._struck.get(kind, 0)
            case "worker":
                return self._worker_serves()

    def _worker_serves(self) -> bool:
        token = self.run_dir / "tokens" / "viewer.token"
        with Coordinator(self.url(), token_file=token) as coordinator:
            workers: list[dict[str, Any]] = coordinator.status()["workers"]
        return any(
            each["name"] == "worker-1" and each["alive"] and each["serving"] for each in workers
        )

    def _kill(self, kind: Victim) -> None:
        if kind == "environment":
            pid = self.witness.executions[-1].pid
            self._struck[kind] = pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        program = self.programs[PROGRAM_NAMES[kind]]
        assert program.returncode is None, f"{program.name} has ended: {program.tail()}"
        program.kill()
        if kind == "learner":
            self._struck[kind] = len(self.rows)
        time.sleep(self._rng.uniform(0.0, PAUSE_S_MAX))
        program.start(*(["--resume"] if kind == "learner" else []))


# --- what must be true


@dataclass(frozen=True, slots=True)
class Books:
    """The records of the witnesses. seeds: the episode of each environment seed."""

    story: Story
    rows: list[dict[str, Any]]
    diary: list[dict[str, Any]]
    executions: list[Execution]
    acknowledged: set[str]
    log: str
    seeds: Mapping[int, At]

    @staticmethod
    def of(site: EpisodeSite) -> "Books":
        story = read_story(site.ledger)
        key = seed_key(load_or_make_key(site.run_dir / "run.key").private_bytes_raw())
        seeds = {
            episode_seed(key, GroupId(group), sample): (group, sample)
            for group, task in _tasks(story).items()
            for sample in range(GROUP_SIZE)
            if task == "witnessed"
        }
        log = (site.directory / "logs" / "coordinator.log").read_text()
        executions = list(site.witness.executions)
        return Books(story, site.rows, site.diary, executions, site.tap.acknowledged, log, seeds)

    def balance(self) -> None:
        results_are_kept(self)
        answers_stay(self)
        agents_and_ledger_agree(self)
        tickets_end_for_a_reason(self)
        steps_run_once(self)
        groups_are_trained_once(self)


class Turn(NamedTuple):
    """turn: its number in the episode. result: as the `Tap` names it. at_s: when it was written down."""

    turn: int
    result: str
    at_s: float


def _turn(facts: str) -> Turn:
    turn, result, at_s = facts.split()
    return Turn(int(turn), result, float(at_s))


def _tasks(story: Story) -> dict[int, str]:
    return {group: task for what, group, task, *_ in story if what == "group"}


def _kept(story: Story, task: str) -> dict[At, TrajectoryRecord]:
    tasks = _tasks(story)
    return {
        (group, sample): _unpack_trajectory(packed)
        for what, group, sample, _, packed in story
        if what == "kept" and tasks[group] == task
    }


def _prompts(story: Story) -> dict[int, list[int]]:
    return {
        group: unpack_tokens(prompt).tolist()
        for what, group, _, prompt, _ in story
        if what == "group"
    }


def _tokens(kept: TrajectoryRecord | Partial) -> list[int]:
    tokens: list[int] = unpack_tokens(kept.tokens).tolist()
    return tokens


def _answers(kept: TrajectoryRecord) -> list[tuple[int, ...]]:
    """What the policy wrote, by turn."""
    tokens, start = _tokens(kept), 0
    found: list[tuple[int, ...]] = []
    for given in kept.given:
        found.append(tuple(tokens[start : given.start]))
        start = given.end
    return [*found, tuple(tokens[start:])]


def results_are_kept(books: Books) -> None:
    """Every result that was acknowledged to a worker, a turn or a whole episode, is in the ledger."""
    results = {result for what, _, _, result, _ in books.story if what == "kept"}
    results |= {_turn(facts).result for what, _, _, facts, _ in books.story if what == "turn"}
    assert books.acknowledged, "the tap has heard nothing"
    lost = books.acknowledged - results
    assert not lost, f"acknowledged to a worker, and not in the ledger: {lost}"


def answers_stay(books: Books) -> None:
    """The same call of an agent had the same answer each time, and its turn is in the ledger."""
    refused = [entry for entry in books.diary if entry["what"] == "refused"]
    assert not refused, "calls of the agent were refused"
    tickets = _tickets(books.diary)
    said: dict[tuple[At, str, tuple[int, ...]], set[tuple[int, ...]]] = defaultdict(set)
    for entry in books.diary:
        if entry["what"] == "said":
            ticket = entry["ticket"]
            said[tickets[ticket], ticket, tuple(entry["asked"])].add(tuple(entry["said"]))
    repeated = {key: each for key, each in said.items() if len(each) > 1}
    assert not repeated, "an acknowledged turn was written again"
    prompts = _prompts(books.story)
    turns = {
        (group, sample, *prompts[group], *_tokens(_unpack_partial(partial)))
        for what, group, sample, _, partial in books.story
        if what == "turn"
    }
    for (at, _, asked), (answer,) in said.items():
        assert (*at, *asked, *answer) in turns, "an acknowledged turn is not in the ledger"


def _tickets(diary: list[dict[str, Any]]) -> dict[str, At]:
    return {
        entry["ticket"]: (entry["group"], entry["sample"])
        for entry in diary
        if entry["what"] == "taken"
    }


def agents_and_ledger_agree(books: Books) -> None:
    """The ledger keeps each episode that the agent ended as the agent saw it, and no other episode."""
    tickets, prompts = _tickets(books.diary), _prompts(books.story)
    ending: dict[tuple[int, ...], float] = {}
    acknowledged: set[At] = set()
    for entry in books.diary:
        if entry["what"] == "ending":
            ending[(*tickets[entry["ticket"]], *entry["tokens"])] = entry["reward"]
        elif entry["what"] == "ended":
            acknowledged.add(tickets[entry["ticket"]])
            told = entry["told"]
            assert (told["turns"], told["branches"], told["differs"]) == (TURNS, 1, "")
    rewards = {
        (group, sample): reward
        for what, group, sample, reward, _ in books.story
        if what == "scored"
    }
    kept = {
        (*at, *prompts[at[0]], *_tokens(each)): rewards[at]
        for at, each in _kept(books.story, "outside").items()
    }
    assert acknowledged, "the agent ended nothing"
    assert kept.items() <= ending.items(), "an episode is kept otherwise than its agent ended it"
    lost = acknowledged - {key[:2] for key in kept}
    assert not lost, f"ended, and not kept: {lost}"


def tickets_end_for_a_reason(books: Books) -> None:
    """A ticket with an acknowledged turn ends early only if the agent was silent, or the turns became useless."""
    tickets = _tickets(books.diary)
    ends = {(group, sample) for what, group, sample, *_ in books.story if what == "ended"}
    heard: dict[str, list[float]] = defaultdict(list)
    entries: dict[str, set[str]] = defaultdict(set)
    for entry in books.diary:
        if entry["ticket"] in tickets:
            heard[entry["ticket"]].append(entry["at_s"])
            entries[entry["ticket"]].add(entry["what"])
    useless = _useless(books.story)
    for ticket, whats in entries.items():
        if "over" not in whats or "said" not in whats:
            continue
        at = tickets[ticket]
        times = heard[ticket]
        silent = max(after - before for before, after in pairwise(times))
        reasons = {
            "its end was acknowledged, and not heard": "ending" in whats and at in ends,
            "silence": silent >= SILENCE_S,
            "useless turns": at in useless,
        }
        assert any(reasons.values()), f"the episode {at} of a ticket is over for no reason"


def _useless(story: Story) -> set[At]:
    """Episodes with a turn that, when it was deleted, was too old for every later batch or of a revoked version."""
    wrote: dict[At, set[tuple[int, bytes]]] = defaultdict(set)
    found: set[At] = set()
    revoked: set[tuple[int, bytes]] = set()
    newest = 0
    for what, first, second, _, fourth in story:
        match what:
            case "turn" | "kept":
                made = (_unpack_partial if what == "turn" else _unpack_trajectory)(fourth)
                wrote[first, second] |= {(span.version, span.digest) for span in made.spans}
            case "revoked":
                revoked.add((first, second))
            case "frozen":
                newest = max(newest, first)
            case "gone":
                members = [at for at in wrote if at[0] == first]
                keys = {key for at in members for key in wrote[at]}
                if keys & revoked or (keys and newest - min(keys)[0] > STALENESS):
                    found |= set(members)
            case "forgotten":
                keys = wrote.pop((first, second), set())
                if keys & revoked or (keys and newest - min(keys)[0] > STALENESS):
                    found.add((first, second))
    return found


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to an episode of the environment. answer: of a turn, or of a step that ran."""

    at_s: float
    what: str
    at: At
    turn: int
    answer: tuple[int, ...] = ()


@dataclass(slots=True)
class Episode:
    """acknowledged: its newest turn whose step is durable, so that the environment does not get it again."""

    answers: list[tuple[int, ...]] = field(default_factory=list)
    acknowledged: int = 0
    runs: Counter[int] = field(default_factory=Counter)

    def waits_for(self, turn: int, answer: tuple[int, ...]) -> bool:
        """Whether this step should run next."""
        return (turn, answer) == (self.acknowledged + 1, *self.answers[-1:]) and len(
            self.answers
        ) == turn


def _told(story: Story) -> Iterator[Moment]:
    """What happened to episodes of the environment, by the ledger."""
    tasks = _tasks(story)
    for what, group, sample, third, fourth in story:
        if what not in ("turn", "answered", "ended", "forgotten") or tasks[group] != "witnessed":
            continue
        at = group, sample
        if what == "turn":
            written = _turn(third)
            partial = _unpack_partial(fourth)
            answer = tuple(_tokens(partial)[partial.turn_start :])
            yield Moment(written.at_s, what, at, written.turn, answer)
        else:
            yield Moment(fourth, what, at, third or TURNS)


def _ran(books: Books) -> Iterator[Moment]:
    for each in books.executions:
        at_s = each.at_s + LEDGER_CLOCK_S
        yield Moment(at_s, "ran", books.seeds[each.seed], each.turn, tuple(each.answer))


def steps_run_once(books: Books) -> None:
    """No step of the environment ran again after it was acknowledged; each earlier repetition was logged."""
    told = {
        tuple(map(int, each))
        for each in re.findall(r"turn repeated group=(\d+) sample=(\d+) turn=(\d+)", books.log)
    }
    moments = sorted([*_told(books.story), *_ran(books)], key=lambda moment: moment.at_s)
    episodes: dict[At, Episode] = defaultdict(Episode)
    late: dict[At, tuple[int, tuple[int, ...]]] = {}
    for moment in moments:
        at, turn, found = moment.at, moment.turn, episodes[moment.at]
        match moment.what:
            case "turn":
                assert turn == len(found.answers) + 1
                found.answers.append(moment.answer)
            case "ran" if found.waits_for(turn, moment.answer):
                found.runs[turn] += 1
            case "ran":
                # Only the last step of an episode that meanwhile began again may still run.
                assert late.get(at) == (turn, moment.answer), f"{at}: step {turn} ran again"
            case "answered" | "ended":
                assert turn == found.acknowledged + 1
                assert found.runs[turn], f"{at}: nobody executed step {turn}"
                said_so = found.runs[turn] == 1 or (*at, turn) in told
                assert said_so, f"{at}: step {turn} ran again, and nobody said so"
                found.acknowledged = turn
            case "forgotten":
                if len(found.answers) > found.acknowledged:
                    late[at] = len(found.answers), found.answers[-1]
                del episodes[at]
    for at, kept in _kept(books.story, "witnessed").items():
        assert _answers(kept) == episodes[at].answers


def groups_are_trained_once(books: Books) -> None:
    """A step's batch never changes, has whole groups that are in no other batch, and is what the learner trained on."""
    batches, tasks = batches_stay(books.story), _tasks(books.story)
    committed = {step for what, step, *_ in books.story if what == "committed"}
    assert committed == set(range(1, max(committed) + 1)), "the steps have a gap"
    trained = [group for step in sorted(committed) for group in batches[step][1]]
    assert len(set(trained)) == len(trained), "a group was trained twice"
    samples_are_whole(books.story, GROUP_SIZE, late_max=0)
    for step in committed:
        assert Counter(tasks[group] for group in batches[step][1]) == GROUPS
    assert {row["step"] for row in books.rows} >= committed
    for row in books.rows:
        assert bytes.fromhex(row["batch"]) == batches[row["step"]][0], "another batch was trained"
        assert all(0 <= int(staleness) <= STALENESS for staleness in row["staleness"])
