"""Episodes in real processes: an acknowledged turn is never played again, whatever dies or hangs."""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.protocol.control_messages import Finish
from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.errors import OperatorFault
from echo2d.tasks.environment import STATE_BYTES_MAX
from echo2d.tasks.episodes import EPISODE_RETRIES, EpisodeEnd, Episodes, EpisodeTurn, StepCall
from echo2d.tasks.pool import Score, TaskPool, TextSettings
from echo2d.tasks.process import TaskFailed, TaskProcess
from echo2d.tasks.served_environment import CONTENT_CHARS_MAX, GIVEN_TOKENS_MAX
from tests.support.nasty_environment import MEETING, ROWS, act
from tests.support.polling import HANG_S
from tests.support.processes import is_running
from tests.support.shared_folder import shared_folder
from tests.support.turn_texts import (
    END,
    MAKE,
    end_of,
    read,
    turns_tokenizer,
    write_turn_model,
    written,
)

NASTY = "tests.support.nasty_environment:Nasty"
NASTY_ASYNC = "tests.support.nasty_environment:NastyAsync"
BOTH = pytest.mark.parametrize("kind", [NASTY, NASTY_ASYNC])
TIMEOUT_S = 600.0  # no test waits for it
HANG_TIMEOUT_S = 0.5

Found = EpisodeTurn | EpisodeEnd | TaskFailed


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@asynccontextmanager
async def episodes_of(
    kind: str, directory: Path, *, processes: int = 1, timeout_s: float = TIMEOUT_S
) -> AsyncIterator[Episodes]:
    options = {"directory": str(directory)}
    async with TaskPool(kind, options, processes=processes, timeout_s=timeout_s) as pool:
        yield Episodes(pool)


class Player:
    """One episode, and what the coordinator keeps of it."""

    def __init__(self, episodes: Episodes, episode: int = 7) -> None:
        self.episodes, self.episode = episodes, episode
        self.turns = 0
        self.state: bytes | None = None
        self.transcript: list[int] = []

    async def reset(self, row: int = 3, seed: int = 0) -> EpisodeTurn:
        found = await self.episodes.reset(self.episode, row, seed)
        assert isinstance(found, EpisodeTurn), found
        self.transcript, self.state = unpack_tokens(found.given).tolist(), found.state
        return found

    async def step(self, tokens: list[int], finish: Finish = "stop") -> Found:
        call = StepCall(
            *(self.episode, self.turns, self.state),
            *(pack_tokens(self.transcript), pack_tokens(tokens), finish),
        )
        found = await self.episodes.step(call)
        if isinstance(found, EpisodeTurn):
            self.turns += 1
            self.state = found.state
            before = [] if found.branch else [*self.transcript, *tokens]
            self.transcript = [*before, *unpack_tokens(found.given).tolist()]
        return found

    async def go_on(self, tokens: list[int]) -> EpisodeTurn:
        found = await self.step(tokens)
        assert isinstance(found, EpisodeTurn), found
        return found

    async def given(self, tokens: list[int]) -> list[int]:
        given: list[int] = unpack_tokens((await self.go_on(tokens)).given).tolist()
        return given


async def pid(player: Player) -> int:
    (found,) = await player.given(act("who"))
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ours; asyncio may have some about the end of a process."""
    return [each.message for each in caplog.records if each.name == "echo2d.task"]


def notes(directory: Path) -> list[str]:
    return (directory / "notes").read_text().splitlines()


@BOTH
async def test_an_episode_is_played_from_its_first_turn_to_its_end(
    kind: str, directory: Path
) -> None:
    async with episodes_of(kind, directory) as episodes:
        player = Player(episodes)
        first = await player.reset(row=3, seed=5)
        assert first == EpisodeTurn(pack_tokens([3, 3]), first.state, tags={"row": "3"}, row="r3")
        second = await player.go_on(act("go on", 4))
        assert second == EpisodeTurn(pack_tokens([4]), second.state)
        assert await player.given(act("go on", 6)) == [10]
        end = await player.step(act("end", 1))
        assert end == EpisodeEnd(Score(11.0, {"seed": 5.0}), "bye")
    assert notes(directory) == ["3 go on 4", "3 go on 10", "3 end 11"]


async def test_an_environment_describes_itself(directory: Path) -> None:
    async with TaskPool(NASTY, {"directory": str(directory)}) as pool:
        about = pool.about
        assert (about.environment, about.concurrent, about.in_text) == (True, False, False)
        assert about.stop_token_ids == (1,)
        failed = await pool.prompt(0)
    assert isinstance(failed, TaskFailed)
    assert "this is an environment" in failed.reason


@BOTH
async def test_episodes_of_one_process_do_not_mix(kind: str, directory: Path) -> None:
    async with episodes_of(kind, directory) as episodes:
        one, two = Player(episodes, 1), Player(episodes, 2)
        await one.reset(1)
        await two.reset(2)
        await one.given(act("go on", 4))
        assert await two.given(act("go on", 5)) == [5]
        assert await one.given(act("go on", 6)) == [10]
        await one.step(act("end"))
        # The instance of the first one plays the next episode.
        three = Player(episodes, 3)
        await three.reset(3)
        assert await three.given(act("go on", 1)) == [1]
        assert await two.given(act("go on", 1)) == [6]


@BOTH
async def test_a_kill_between_a_step_and_its_acknowledgement_loses_no_turn(
    kind: str, directory: Path
) -> None:
    """The step is executed again, says so, and those before it are not."""
    async with episodes_of(kind, directory) as episodes:
        player, other = Player(episodes), Player(episodes, 8)
        await other.reset(9)
        await player.reset()
        await player.go_on(act("go on", 1))
        again = await player.go_on(act("kill once", 2))
        assert (again.again, unpack_tokens(again.given).tolist()) == (True, [3])
        after = await player.go_on(act("go on", 4))
        assert (after.again, unpack_tokens(after.given).tolist()) == (False, [7])
        assert await other.given(act("go on", 5)) == [5]
    done = [line for line in notes(directory) if line.startswith("3 ")]
    assert done == ["3 go on 1", "3 kill once 3", "3 kill once 3", "3 go on 7"]


@BOTH
async def test_a_kill_between_two_turns_loses_no_turn(kind: str, directory: Path) -> None:
    async with episodes_of(kind, directory) as episodes:
        player = Player(episodes)
        await player.reset()
        await player.go_on(act("go on", 1))
        before = await pid(player)
        child = episodes._seats[0].process._child
        assert child is not None
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(HANG_S):
            while child.link.fault is None:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
        turn = await player.go_on(act("go on", 4))
        assert (turn.again, unpack_tokens(turn.given).tolist()) == (False, [5])
        assert await pid(player) != before


@BOTH
async def test_an_episode_goes_on_in_another_pool(kind: str, directory: Path) -> None:
    """As after a restart of the coordinator: it has kept the states, and nothing else."""
    async with episodes_of(kind, directory) as episodes:
        player = Player(episodes)
        await player.reset()
        await player.go_on(act("go on", 1))
    async with episodes_of(kind, directory) as episodes:
        player.episodes = episodes
        assert await player.given(act("go on", 4)) == [5]


@BOTH
async def test_a_step_that_always_kills_its_process_ends_only_its_episode(
    kind: str, directory: Path
) -> None:
    async with episodes_of(kind, directory) as episodes:
        player, other = Player(episodes), Player(episodes, 8)
        await player.reset()
        await other.reset(9)
        assert await player.step(act("kill")) == TaskFailed("died", "the task process died")
        assert await other.given(act("go on", 5)) == [5]
    assert notes(directory).count("3 kill 0") == EPISODE_RETRIES + 1


async def test_an_episode_beside_one_that_kills_the_process_goes_on(directory: Path) -> None:
    """Nobody knows who it was, so each step is made again alone."""
    async with episodes_of(NASTY_ASYNC, directory) as episodes:
        others = [Player(episodes, episode) for episode in range(10, 18)]
        killers = [Player(episodes, episode) for episode in range(4)]
        for player in (*others, *killers):
            await player.reset(player.episode)
        found = await asyncio.gather(
            *(other.step(act("wait", 2)) for other in others),
            *(killer.step(act("kill")) for killer in killers),
        )
        for turn in found[:8]:
            assert isinstance(turn, EpisodeTurn), turn
            assert (turn.again, unpack_tokens(turn.given).tolist()) == (True, [2])
        assert {each.kind for each in found[8:] if isinstance(each, TaskFailed)} == {"died"}
        # They are back beside each other.
        pids = await asyncio.gather(*map(pid, others))
        assert len(set(pids)) == 1


async def test_an_episode_without_a_state_is_lost_with_its_process(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with episodes_of(NASTY, directory) as episodes:
        player, other = Player(episodes), Player(episodes, 8)
        await player.reset()
        await other.reset(9)
        assert (await player.go_on(act("forget"))).state is None
        assert await player.given(act("go on", 1)) == [1]
        await other.step(act("kill"))
        failed = await player.step(act("go on", 1))
    assert isinstance(failed, TaskFailed)
    assert failed.kind == "died"
    assert "it has no saved state" in failed.reason
    assert warnings(caplog) == [
        "task=nasty its episodes are lost if their process ends: it saves no state"
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("big", f"over the limit of {STATE_BYTES_MAX}; override save and restore"),
        ("lock", "cannot be saved: TypeError: cannot pickle '_thread.lock' object"),
    ],
)
async def test_a_state_that_cannot_be_kept_is_reported_once(
    name: str, why: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with episodes_of(NASTY, directory) as episodes:
        player = Player(episodes)
        await player.reset()
        assert (await player.go_on(act(name))).state is None
        assert (await player.go_on(act("go on", 2))).state is None
    (message,) = warnings(caplog)
    assert why in message
    assert "\n" not in message


async def test_two_steps_of_an_episode_at_once_are_refused(directory: Path) -> None:
    async with episodes_of(NASTY_ASYNC, directory) as episodes:
        player = Player(episodes)
        await player.reset()
        call = StepCall(7, 0, player.state, b"", pack_tokens(act("wait", 1)))
        first, second = await asyncio.gather(episodes.step(call), episodes.step(call))
    assert isinstance(first, EpisodeTurn)
    assert second == TaskFailed("error", "episode 7: a call is under way")
    assert notes(directory) == ["3 go on 1"]


async def test_an_environment_that_hangs_costs_only_its_episode(directory: Path) -> None:
    async with episodes_of(NASTY, directory, timeout_s=HANG_TIMEOUT_S) as episodes:
        player, other = Player(episodes), Player(episodes, 8)
        await player.reset()
        await other.reset(9)
        before = await pid(other)
        assert await player.step(act("hang")) == TaskFailed("timeout", "no answer in 0.5 s")
        assert await pid(other) == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [("hang", "no answer in 1 s"), ("block", "it blocked its process for 0.5 s")],
)
async def test_a_late_step_among_others_costs_only_its_episode(
    name: str, reason: str, directory: Path
) -> None:
    async with episodes_of(NASTY_ASYNC, directory, timeout_s=1.0) as episodes:
        player, other = Player(episodes), Player(episodes, 8)
        await player.reset()
        await other.reset(9)
        before = await pid(other)
        late, turn = await asyncio.gather(
            player.step(act(name)), other.go_on(act("go on", 4)), return_exceptions=False
        )
        assert late == TaskFailed("timeout", reason)
        assert not turn.again
        assert await pid(other) == before


async def test_an_episode_beside_a_step_that_cannot_be_interrupted_goes_on(directory: Path) -> None:
    async with episodes_of(NASTY_ASYNC, directory, timeout_s=HANG_TIMEOUT_S) as episodes:
        players = [Player(episodes, episode) for episode in range(3)]
        for player in players:
            await player.reset(player.episode)
        found = await asyncio.gather(
            *(player.step(act(name)) for player, name in zip(players, ("deaf", "go on", "go on")))  # noqa: B905
        )
    assert all(isinstance(turn, EpisodeTurn) and turn.again for turn in found), found


async def test_an_environment_reports_the_end_of_its_rows(directory: Path) -> None:
    async with episodes_of(NASTY, directory) as episodes:
        assert await episodes.reset(1, ROWS, 0) == TaskFailed("end", "")


@pytest.mark.parametrize(
    ("name", "fault", "reason"),
    [
        ("nan", "error", "the reward is nan"),
        ("raise", "error", "ValueError: no"),
        ("unjudged", "unjudged", "too hard"),
        ("wide", "error", f"a turn of {GIVEN_TOKENS_MAX + 1} tokens; at most {GIVEN_TOKENS_MAX}"),
        ("nothing", "error", "a turn of this environment has tokens, and no messages"),
        ("messages", "error", "a turn of this environment has tokens, and no messages"),
        ("tools", "error", "only the first turn may have tools"),
        ("text", "error", "step returned str; expected a Turn or an End"),
    ],
)
@BOTH
async def test_an_error_of_the_environment_ends_the_episode_without_a_reward(
    name: str, fault: str, reason: str, kind: str, directory: Path
) -> None:
    async with episodes_of(kind, directory) as episodes:
        player = Player(episodes)
        await player.reset()
        failed = await player.step(act(name))
        assert isinstance(failed, TaskFailed), failed
        assert failed.kind == fault
        assert reason in failed.reason
        await player.reset()
        assert await player.given(act("go on", 2)) == [2]


async def test_sixty_four_episodes_wait_beside_each_other(directory: Path) -> None:
    async with episodes_of(NASTY_ASYNC, directory) as episodes:
        players = [Player(episodes, episode) for episode in range(MEETING)]
        await asyncio.gather(*(player.reset(player.episode) for player in players))
        await asyncio.gather(*(player.go_on(act("meet", 1)) for player in players))


async def test_episodes_are_spread_over_processes(directory: Path) -> None:
    async with episodes_of(NASTY, directory, processes=2) as episodes:
        players = [Player(episodes, episode) for episode in range(4)]
        for player in players:
            await player.reset()
        pids = [await pid(player) for player in players]
    assert sorted(map(pids.count, set(pids))) == [2, 2]


async def test_a_dropped_or_cancelled_step_does_not_go_on(directory: Path) -> None:
    async with episodes_of(NASTY_ASYNC, directory) as episodes:
        player = Player(episodes)
        await player.reset()
        await player.go_on(act("go on", 1))
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(player.step(act("hang")))
            await asyncio.sleep(0)
            episodes.drop(7)
        failed = waiting.result()
        assert isinstance(failed, TaskFailed)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await player.step(act("hang"))
        # The state is still good.
        assert await player.given(act("go on", 4)) == [5]


async def test_a_cancelled_step_does_not_stop_the_next_one(directory: Path) -> None:
    async with episodes_of(NASTY, directory) as episodes:
        player = Player(episodes)
        await player.reset()
        await player.go_on(act("go on", 1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await player.step(act("hang"))
        assert await player.given(act("go on", 4)) == [5]


async def test_a_program_of_an_environment_lives_as_long_as_its_process(directory: Path) -> None:
    async with episodes_of(NASTY, directory) as episodes:
        player = Player(episodes)
        await player.reset()
        await player.go_on(act("program"))
        program = int(notes(directory)[-1])
        await player.go_on(act("go on"))
        assert is_running(program)
    assert not is_running(program)


async def test_a_closed_pool_plays_no_episode(directory: Path) -> None:
    async with episodes_of(NASTY, directory) as episodes:
        player = Player(episodes)
        await player.reset()
    assert await player.step(act("go on")) == TaskFailed("died", "the task's processes were ended")


@pytest.mark.parametrize(
    "reply",
    [
        None,
        [],
        ["turn", b"", 0, b"", ""],
        ["turn", b"123", 0, b"", ""],
        ["turn", b"1234", -1, b"", ""],
        ["turn", b"1234", True, b"", ""],
        ["turn", b"1234", 0, "state", ""],
        ["turn", b"1234", 0, b"x" * (STATE_BYTES_MAX + 1), ""],
        ["turn", b"1234", 0, b"", None],
        ["end", float("nan"), {}, ""],
        ["end", 1.0, {}, None],
        ["end", 1.0],
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_any_answer_of_a_hostile_process_is_a_failure(
    reply: Any, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    async with episodes_of(NASTY_ASYNC, directory) as episodes:

        async def ask(_: TaskProcess, request: bytes) -> Any:
            return reply

        monkeypatch.setattr(TaskProcess, "ask_beside_others", ask)
        found = await episodes.step(StepCall(1, 0, b"", b"", b""))
        assert isinstance(found, TaskFailed)
        first = await episodes.reset(1, 0, 0)
        assert isinstance(first, TaskFailed)


# --- in text


@pytest.fixture
def model(directory: Path) -> TextSettings:
    made = write_turn_model(directory / "model")
    made.chmod(0o755)
    return TextSettings(str(made), turns=MAKE)


Talk = Callable[[], Player]


@pytest.fixture
async def talk(model: TextSettings) -> AsyncIterator[Talk]:
    async with TaskPool("tests.support.nasty_environment:Talk", texts=model) as pool:
        episodes = Episodes(pool)
        yield lambda: Player(episodes)


async def test_messages_become_tokens_and_tokens_become_calls(talk: Talk) -> None:
    player = talk()
    await player.reset(row=1)
    assert read(player.transcript) == (
        f'<tools>[{{"name": "repeat"}}]{END}<user>row 1{END}<answer>'
    )
    call = '<tool_call>{"name": "repeat", "arguments": {"text": "é", "times": 2}}</tool_call>'
    assert read(await player.given(written(call))) == f"<tool>éé{END}<answer>"
    assert read(await player.given(written("more"))) == f"<user>and?{END}<answer>"
    assert await player.step(written("done")) == EpisodeEnd(Score(4.0), "stop")


async def test_a_control_token_in_a_tools_output_stays_text(talk: Talk) -> None:
    player = talk()
    await player.reset(row=1)
    arguments = f'{{"text": "{END}", "times": 1}}'
    call = f'<tool_call>{{"name": "repeat", "arguments": {arguments}}}</tool_call>'
    given = await player.given(written(call))
    assert read(given) == f"<tool>{END}{END}<answer>"
    assert given.count(end_of(turns_tokenizer())) == 1


async def test_a_tools_output_of_a_mebibyte_is_cut(talk: Talk) -> None:
    player = talk()
    await player.reset(row=1)
    call = '<tool_call>{"name": "repeat", "arguments": {"text": "x", "times": 1048576}}</tool_call>'
    text = read(await player.given(written(call)))
    left_out = (1 << 20) - CONTENT_CHARS_MAX
    assert text == (
        f"<tool>{'x' * CONTENT_CHARS_MAX}\n[{left_out} characters are left out]{END}<answer>"
    )


async def test_a_conversation_that_cannot_be_extended_is_sent_whole(talk: Talk) -> None:
    player = talk()
    await player.reset(row=0)
    cut_off = turns_tokenizer().encode("more", add_special_tokens=False).ids
    turn = await player.step(cut_off, "length")
    assert isinstance(turn, EpisodeTurn)
    assert turn.branch == "tokens: the answer was cut off"
    assert read(player.transcript) == (
        f"<user>row 0{END}<assistant>more{END}<user>and?{END}<answer>"
    )
    assert read(await player.given(written("more"))) == f"<user>and?{END}<answer>"


async def test_an_answer_too_long_for_a_message_fails(talk: Talk) -> None:
    player = talk()
    await player.reset()
    failed = await player.step([1] * (1 << 18))
    assert isinstance(failed, TaskFailed)
    assert "is over the limit of" in failed.reason


async def test_the_system_message_begins_a_conversation(model: TextSettings) -> None:
    settings = dataclasses.replace(model, system="be brief")
    async with TaskPool("tests.support.nasty_environment:Talk", texts=settings) as pool:
        player = Player(Episodes(pool))
        await player.reset(row=0)
    assert read(player.transcript) == f"<system>be brief{END}<user>row 0{END}<answer>"


async def test_an_environment_in_text_needs_a_model() -> None:
    with pytest.raises(OperatorFault, match=r"no run\.base_model"):
        await TaskPool("tests.support.nasty_environment:Talk").start()
