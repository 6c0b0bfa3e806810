"""Environments in their processes, with the core's requests."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.trajectory import (
    NOTHING,
    Partial,
    RewardPart,
    Source,
    pack_tokens,
    unpack_tokens,
)
from echo2d.core.work.events import (
    DrawPrompt,
    EnvironmentStepped,
    EpisodeEnded,
    ForgetEpisode,
    PromptDrawn,
    PromptsEnded,
    StepEnvironment,
)
from echo2d.runtime.coordinator.environment_calls import EnvironmentCalls
from echo2d.runtime.coordinator.task_calls import OnError
from echo2d.tasks.episodes import Episodes
from echo2d.tasks.pool import TaskPool, TextSettings
from tests.support.nasty_environment import ROWS, act
from tests.support.shared_folder import shared_folder
from tests.support.texts import DROPS, chat_texts, write_chat_model

NASTY = "tests.support.nasty_environment:Nasty"
PROMPT = pack_tokens([3, 3])
SEED = 5


@pytest.fixture
def directory() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@asynccontextmanager
async def calls_of(
    directory: Path, *, on_error: OnError = "drop_sample"
) -> AsyncIterator[EnvironmentCalls]:
    async with TaskPool(NASTY, {"directory": str(directory)}) as pool:
        yield EnvironmentCalls(Episodes(pool), name="nasty", vocab_size=100, on_error=on_error)


def first(*answer: int) -> StepEnvironment:
    """The first turn of row 3, sample 1 of group 9."""
    return StepEnvironment(
        GroupId(9), 1, 0, 1, 3, SEED, PROMPT, written(NOTHING, answer), "stop", None, "nasty"
    )


def written(before: Partial, answer: Iterable[int]) -> Partial:
    tokens = pack_tokens(answer)
    return before.plus(tokens, bytes(len(tokens)), ())


def after(order: StepEnvironment, found: object, *answer: int) -> StepEnvironment:
    """The next turn."""
    assert isinstance(found, EnvironmentStepped), found
    return replace(
        order,
        turn=order.turn + 1,
        output=written(order.output.with_given(found.tokens, anew=found.anew), answer),
        state=found.state,
    )


async def test_prompts_are_the_first_turns_of_rows_until_the_rows_end(directory: Path) -> None:
    async with calls_of(directory) as calls:
        drawn = await calls.draw(DrawPrompt(3, "nasty"))
        assert isinstance(drawn, PromptDrawn)
        assert (drawn.tokens, drawn.source) == (PROMPT, Source("nasty", "r3"))
        assert [(tag.name, tag.value) for tag in drawn.tags] == [("row", "3")]
        assert await calls.draw(DrawPrompt(ROWS, "nasty")) == PromptsEnded(ROWS, "nasty")


async def test_an_episode_has_its_own_seed_and_ends_with_a_reward(directory: Path) -> None:
    async with calls_of(directory) as calls:
        order = first(*act("go on", 4))
        stepped = await calls.step(order)
        assert isinstance(stepped, EnvironmentStepped)
        assert stepped.tokens == pack_tokens([4])
        ended = await calls.step(after(order, stepped, *act("end", 1)))
        parts = (RewardPart("seed", float(SEED)),)
        assert ended == EpisodeEnded(GroupId(9), 1, 0, 2, 5.0, "", parts)


async def test_an_episode_goes_on_from_its_last_answered_turn_after_a_restart(
    directory: Path,
) -> None:
    """Other processes, and another coordinator: the state is all that is left."""
    order = first(*act("go on", 4))
    async with calls_of(directory) as calls:
        stepped = await calls.step(order)
    async with calls_of(directory) as calls:
        again = replace(after(order, stepped, *act("end", 1)), again=True)
        ended = await calls.step(again)
    assert isinstance(ended, EpisodeEnded)
    assert ended.reward == 5.0


async def test_a_process_that_dies_costs_no_answered_turn(directory: Path) -> None:
    """It is killed after it took the second turn, and before anybody heard of that."""
    async with calls_of(directory) as calls:
        order = first(*act("go on", 4))
        second = after(order, await calls.step(order), *act("kill once", 2))
        third = after(second, await calls.step(second), *act("end", 1))
        ended = await calls.step(third)
    assert isinstance(ended, EpisodeEnded)
    assert ended.reward == 7.0


@pytest.mark.parametrize(
    ("on_error", "name", "reward"),
    [
        ("drop_sample", "raise", None),
        ("zero", "raise", 0.0),
        ("zero", "unjudged", None),
        ("zero", "kill", None),
    ],
)
async def test_an_environment_that_fails_gives_no_reward(
    on_error: OnError, name: str, reward: float | None, directory: Path
) -> None:
    """Only an error of the environment may count as a zero, if the operator says so."""
    async with calls_of(directory, on_error=on_error) as calls:
        ended = await calls.step(first(*act(name)))
        assert isinstance(ended, EpisodeEnded)
        assert ended.reward == reward
        assert ended.reason


async def test_the_prompt_of_a_group_must_be_the_first_turn_of_its_samples(directory: Path) -> None:
    async with calls_of(directory) as calls:
        ended = await calls.step(replace(first(*act("go on")), prompt=pack_tokens([3, 4])))
        assert isinstance(ended, EpisodeEnded)
        assert ended.reward is None
        assert "the first turn depends on more than the row" in ended.reason


async def test_given_tokens_outside_the_vocabulary_are_refused(directory: Path) -> None:
    async with calls_of(directory) as calls:
        ended = await calls.step(first(*act("go on", 100)))
        assert isinstance(ended, EpisodeEnded)
        assert ended.reward is None
        assert "below 100" in ended.reason


async def test_an_episode_may_be_forgotten_before_its_turn_is_awaited(
    directory: Path,
) -> None:
    """The core forgets it in the turn in which it asks; nothing of it stays open."""
    async with calls_of(directory) as calls:
        work = calls.step(first(*act("go on", 4)))
        calls.forget(ForgetEpisode(GroupId(9), 1, "nasty"))
        ended = await work
        assert isinstance(ended, EpisodeEnded)
        assert (ended.reward, calls._open, calls._episodes._seat_of) == (None, {}, {})


async def test_a_sample_that_begins_again_gets_another_episode(directory: Path) -> None:
    """A sample that begins anew has another episode, also while the old one is still there."""
    async with calls_of(directory) as calls:
        order = first(*act("go on", 4))
        await calls.step(order)
        calls.forget(ForgetEpisode(GroupId(9), 1, "nasty"))
        calls.forget(ForgetEpisode(GroupId(9), 1, "nasty"))
        anew = replace(order, begun=1, output=written(NOTHING, act("end", 1)))
        ended = await calls.step(anew)
        assert isinstance(ended, EpisodeEnded)
        assert (ended.begun, ended.reward) == (1, 1.0)


# Conversations that cannot go on as tokens

THOUGHT = "<think>so</think>more<|im_end|>"


@asynccontextmanager
async def talks_of(directory: Path, template: str) -> AsyncIterator[EnvironmentCalls]:
    model = write_chat_model(directory / "model", template)
    model.chmod(0o755)
    talk = "tests.support.nasty_environment:Talk"
    async with TaskPool(talk, texts=TextSettings(str(model))) as pool:
        yield EnvironmentCalls(Episodes(pool), name="talk", vocab_size=300)


async def test_a_conversation_that_loses_its_reasoning_goes_on_in_a_branch(directory: Path) -> None:
    """Also in other processes, and for another coordinator."""
    made = chat_texts(DROPS)
    question, more, also = (
        {"role": role, "content": content}
        for role, content in (("user", "row 0"), ("assistant", "more"), ("user", "and?"))
    )
    thought = made.encode(THOUGHT, special=False)
    prompt = pack_tokens(made.encode(made.render([question], {}), special=False))
    order = replace(first(*thought), cursor=0, prompt=prompt, task="talk")
    for turn in (1, 2, 3):
        async with talks_of(directory, DROPS) as calls:
            stepped = await calls.step(order)
            assert isinstance(stepped, EnvironmentStepped)
            # Nothing of the second answer is dropped, which has no reasoning.
            assert (stepped.anew, calls.branches["append_only"]) == (turn != 2, int(turn != 2))
        answer = made.encode("more<|im_end|>", special=False) if turn == 1 else thought
        order = after(order, stepped, *answer)
        whole = made.decode(unpack_tokens(prompt + order.output.branch).tolist()).removesuffix(
            made.decode(answer)
        )
        assert whole == made.render([question, *[more, also] * turn], {})
    assert len(order.output.branches) == 2


async def test_a_branch_must_begin_with_the_groups_prompt(directory: Path) -> None:
    """This template opens the reasoning of an answer, and drops that later."""
    opens = DROPS.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    assert opens != DROPS
    made = chat_texts(opens)
    question = {"role": "user", "content": "row 0"}
    prompt = pack_tokens(made.encode(made.render([question], {}), special=False))
    thought = made.encode(THOUGHT.removeprefix("<think>"), special=False)
    async with talks_of(directory, opens) as calls:
        ended = await calls.step(replace(first(*thought), cursor=0, prompt=prompt, task="talk"))
        assert isinstance(ended, EpisodeEnded)
        assert ended.reward is None
        assert ended.reason.startswith("no_continuation: append_only: ")
        assert ended.reason.endswith("it does not begin with the group's prompt")
        assert not calls.branches
        assert (calls._open, calls._episodes._seat_of) == ({}, {})
