"""An environment served by its process: limits, and the life of its instances."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.tasks.environment import (
    STATE_BYTES_MAX,
    End,
    Environment,
    EnvironmentAnswer,
    EpisodeLost,
    Turn,
)
from echo2d.tasks.kept_episode import KEPT_BYTES_MAX
from echo2d.tasks.served_environment import OPEN_EPISODES_MAX, ServedEnvironment
from echo2d.tasks.served_task import ModelFiles
from echo2d.texts.continuation import NoContinuation
from tests.support.nasty_environment import Nasty, NastyAsync, act
from tests.support.texts import DROPS, chat_texts, chat_tokenizer


class Instances:
    """Makes instances of an environment, and counts them."""

    def __init__(self, directory: Path) -> None:
        self.made = 0
        self._directory = directory

    def served(self, kind: type[Nasty] = Nasty) -> ServedEnvironment:
        def make() -> Nasty:
            self.made += 1
            return kind(str(self._directory))

        return ServedEnvironment(make(), make, None)


def step(episode: int, turns: int, state: bytes | None, name: str = "go on") -> list[Any]:
    return ["step", episode, turns, state, b"", pack_tokens(act(name, 1)), "stop"]


def test_each_open_episode_has_one_instance(tmp_path: Path) -> None:
    instances = Instances(tmp_path)
    served = instances.served()
    for episode in range(3):
        served.answer_at_once(["reset", episode, 1, 0])
    assert instances.made == 3
    assert served.answer_at_once(step(0, 0, None, "end"))[:2] == ["end", 1.0]
    assert served.answer_at_once(["drop", 1]) == []
    for episode in (3, 4):
        served.answer_at_once(["reset", episode, 1, 0])
    assert instances.made == 3
    # After an error nobody knows what an instance is in the middle of.
    with pytest.raises(ValueError, match="no"):
        served.answer_at_once(step(2, 0, None, "raise"))
    served.answer_at_once(["reset", 5, 1, 0])
    assert instances.made == 4


def test_an_episode_beyond_the_limit_of_a_process_is_refused(tmp_path: Path) -> None:
    served = Instances(tmp_path).served()
    for episode in range(OPEN_EPISODES_MAX):
        served.answer_at_once(["reset", episode, 1, 0])
    with pytest.raises(ValueError, match="1024 episodes are open in this process; no more fit"):
        served.answer_at_once(["reset", OPEN_EPISODES_MAX, 1, 0])
    served.answer_at_once(["reset", 0, 2, 0])  # in the place of itself


def test_an_episode_at_another_turn_is_restored(tmp_path: Path) -> None:
    """A step that was executed and not acknowledged is taken back."""
    served = Instances(tmp_path).served()
    first = served.answer_at_once(["reset", 0, 1, 0])
    done = served.answer_at_once(step(0, 0, first[2]))
    assert served.answer_at_once(step(0, 0, first[2]))[1] == done[1] == pack_tokens([1])
    assert served.answer_at_once(step(0, 1, done[2]))[1] == pack_tokens([2])
    with pytest.raises(EpisodeLost):
        served.answer_at_once(step(0, 1, None))
    with pytest.raises(EpisodeLost):
        served.answer_at_once(step(7, 0, None))


@pytest.mark.may_block
async def test_a_second_step_is_refused_at_once(tmp_path: Path) -> None:
    served = Instances(tmp_path).served(NastyAsync)
    assert served.concurrent
    await served.answer(["reset", 0, 1, 0])
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(served.answer(step(0, 0, None, "wait")))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="episode 0: a step is under way"):
            await served.answer(step(0, 0, None))
    assert first.result()[1] == pack_tokens([1])


class Waiting:
    def __await__(self) -> Iterator[None]:
        yield


class Silent(Nasty):
    """It does not say that it waits."""

    def step(self, answer: EnvironmentAnswer) -> Any:
        return Waiting()


def test_an_environment_that_awaits_must_declare_it(tmp_path: Path) -> None:
    served = Instances(tmp_path).served(Silent)
    served.answer_at_once(["reset", 0, 1, 0])
    with pytest.raises(TypeError, match="is declared `async def`"):
        served.answer_at_once(step(0, 0, None))


# A conversation that cannot go on as tokens

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
THOUGHT = "<think>\nso\n</think>\n\n"
TEXTS = chat_texts(DROPS)


class Guide(Environment):
    """It answers calls by "seen", and all else by its question, or by an answer of its own."""

    name = "guide"

    def __init__(self, noise: int = 0) -> None:
        self.noise = bytes(noise)

    def reset(self, row: int, seed: int) -> Turn:
        return Turn([{"role": "user", "content": "Where?"}], tools=[LOOK])

    def step(self, answer: EnvironmentAnswer) -> Turn | End:
        if answer.tool_calls:
            return Turn([{"role": "tool", "content": "seen"}])
        role = "assistant" if answer.text == "you?" else "user"
        return Turn([{"role": role, "content": "And then?"}])


def guided(noise: int = 0, template: str = DROPS) -> ServedEnvironment:
    files = {"tokenizer.json": chat_tokenizer().to_str().encode()}

    def make() -> Guide:
        return Guide(noise)

    return ServedEnvironment(make(), make, ModelFiles("model", files, template, "be kind", {}))


class Talk:
    """One episode, as its caller keeps it."""

    def __init__(self, served: ServedEnvironment) -> None:
        self.turns = 0
        _, given, self.state, *_ = served.answer_at_once(["reset", 1, 0, 0])
        self.prompt = self.branch = unpack_tokens(given).tolist()

    def say(self, served: ServedEnvironment, text: str) -> list[Any]:
        """The environment's reply to this answer."""
        answer = [*TEXTS.encode(f"{text}<|im_end|>", special=False)]
        transcript = pack_tokens(self.branch), pack_tokens(answer)
        told = served.answer_at_once(["step", 1, self.turns, self.state, *transcript, "stop"])
        _, given, self.state, _, branch = told
        new = unpack_tokens(given).tolist()
        self.branch = new if branch else [*self.branch, *answer, *new]
        self.turns += 1
        return told


def rendered(*messages: dict[str, Any]) -> str:
    rule, question = (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "Where?"},
    )
    return TEXTS.render([rule, question, *messages], {"tools": [LOOK]})


def asked(text: str, *, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


CALL = '<tool_call>{"name": "look", "arguments": {"at": 11}}</tool_call>'
CALLED = {"function": {"name": "look", "arguments": {"at": 11}}}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_conversation_whose_template_drops_reasoning_goes_on_in_branches(restarts: bool) -> None:
    served = guided()
    talk = Talk(served)
    history: list[dict[str, Any]] = []
    for text, reply, begins in (
        ("There.", asked("And then?"), False),
        (f"{THOUGHT}On.{CALL}", asked("seen", role="tool"), True),
        ("On.", asked("And then?"), False),
        (f"{THOUGHT}On.", asked("And then?"), True),
    ):
        # Then all that is left is what the caller keeps.
        served = guided() if restarts else served
        *_, branch = talk.say(served, text)
        assert branch.startswith("append_only: the chat template drops") == begins
        said = asked(text.removeprefix(THOUGHT).removesuffix(CALL), role="assistant")
        history += [{**said, "tool_calls": [CALLED]} if CALL in text else said, reply]
        assert TEXTS.decode(talk.branch) == rendered(*history)
        assert talk.branch[: len(talk.prompt)] == talk.prompt


def test_a_branch_needs_the_same_process_if_messages_are_too_large_to_keep() -> None:
    noise = STATE_BYTES_MAX - 100
    served = guided(noise)
    talk = Talk(served)
    assert talk.state is not None
    talk.say(served, "There.")
    assert noise < len(talk.state) <= KEPT_BYTES_MAX
    talk.say(served, f"{THOUGHT}On.")
    talk.say(guided(noise), "On.")
    with pytest.raises(
        NoContinuation, match="drops an answer's reasoning; its messages so far were lost"
    ):
        talk.say(guided(noise), f"{THOUGHT}On.")


def test_an_environment_that_speaks_for_the_policy_begins_no_branch() -> None:
    served = guided()
    with pytest.raises(NoContinuation, match="expected messages of a user"):
        Talk(served).say(served, "you?")


def test_a_template_without_a_second_turn_allows_no_branches() -> None:
    one = "{% if messages | length > 2 %}{{ raise_exception('one only') }}{% endif %}"
    served = guided(template=one + DROPS)
    with pytest.raises(NoContinuation, match=r"rendered again: .*one only"):
        Talk(served).say(served, "There.")


def test_a_state_of_another_build_is_lost() -> None:
    served = guided()
    talk = Talk(served)
    talk.state = b"\x80\x04\x95\x08"
    with pytest.raises(EpisodeLost, match="another build"):
        talk.say(guided(), "There.")
