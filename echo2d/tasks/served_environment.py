"""An environment as its process serves it: packed tokens and saved states in and out.

    reset(row, seed) ------> Turn --in text--> template and tokenizer --> given tokens
    answer tokens --in text--> text, tool calls --> step --> Turn or End

The process keeps the instance of every open episode. An episode that it does not have, or has at
another turn, is restored from the state that comes with the call. After an error the state of an
instance is unknown, so the instance is thrown away.

If new messages cannot be appended to the tokens so far, as with a chat template that drops earlier
reasoning, all messages so far are rendered again: the turn begins a branch.
"""

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Protocol

from echo2d.errors import Fault, OperatorFault
from echo2d.registry import load
from echo2d.tasks.environment import (
    STATE_BYTES_MAX,
    End,
    Environment,
    EnvironmentAnswer,
    EpisodeLost,
    ToolCall,
    Turn,
)
from echo2d.tasks.kept_episode import Said, kept, read_kept
from echo2d.tasks.served_task import (
    NEEDS_MODEL,
    ModelFiles,
    checked_reward,
    checked_tags,
    packed_tokens,
    short_name,
)
from echo2d.texts.continuation import NoContinuation
from echo2d.texts.tool_calls import END_THINK, THINK

if TYPE_CHECKING:
    from echo2d.core.protocol.control_messages import Finish

OPEN_EPISODES_MAX = 1024  # episodes of one process, each with an instance of the environment
IDLE_INSTANCES_MAX = 64  # kept for the next episodes
GIVEN_TOKENS_MAX = 1 << 17  # tokens of one turn: 512 KiB in a message
# The longest content of a message after the first turn. Longer tool output is cut here, before it fills the context.
CONTENT_CHARS_MAX = 1 << 15
CAUSE_CHARS_MAX = 200  # text that says why a state cannot be saved, or why a branch begins


class ReadCall(Protocol):
    """A tool call in the text of an answer."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...


class ReadAnswer(Protocol):
    """The text of an answer."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def tool_calls(self) -> Sequence[ReadCall]: ...


class EpisodeTexts(Protocol):
    """Turns messages into tokens that follow those so far, and answers into text."""

    def first(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """The prompt of these messages, up to the beginning of the next answer. Fault: it cannot be made."""

    def caution(self) -> str:
        """A warning if the prompts lack what an environment with tools needs; empty: none."""

    @property
    def turn_end(self) -> int | None:
        """The special token that ends a turn; None: there is none."""

    def following(self, so_far: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens to append to `so_far`, which holds all given and written tokens and end tokens.

        NoContinuation: the messages cannot be appended.
        """

    def answer(self, tokens: Sequence[int], finish: "Finish") -> ReadAnswer: ...


@dataclass(slots=True)
class OpenEpisode:
    """An open episode."""

    environment: Environment
    turn: int = 0  # answers that it has taken
    said: Said | None = None  # all messages so far, if in text; None: they were not kept
    busy: bool = False  # a call is under way
    running: asyncio.Task[Any] | None = None  # this call, in a concurrent process


class ServedEnvironment:
    """See the module docstring. first: an instance of the environment. make: makes another one.

    OperatorFault: it needs a model.
    """

    def __init__(
        self, first: Environment, make: Callable[[], Environment], model: ModelFiles | None
    ) -> None:
        self._make = make
        self._about = first
        self._idle = [first]
        self._open: dict[int, OpenEpisode] = {}
        self._texts: EpisodeTexts | None = None
        self._system = ""
        self.concurrent = first.concurrent
        if first.in_text:
            if model is None:
                raise OperatorFault(f"there is no run.base_model; {NEEDS_MODEL}")
            self._texts = load(model.turns)(model)
            self._system = model.system

    def introduction(self) -> list[Any]:
        """See `ServedTask.introduction`."""
        about = self._about
        return [
            str(about.name),
            [int(token) for token in about.stop_token_ids],
            bytes(getattr(about, "digest", b"")),
            len(about) if hasattr(about, "__len__") else None,
            self.concurrent,
            self._texts is not None,
            True,
            None if self._texts is None else self._texts.turn_end,
        ]

    async def answer(self, request: list[Any]) -> list[Any]:
        """See the head of `pool_child`. EpisodeLost, NoContinuation, and what the environment raises."""
        match request:
            case ["reset", episode, row, seed]:
                self.drop(episode)
                with self._call(episode, self._take()) as played:
                    return await self._begin(played, row, seed)
            case ["step", episode, turn, state, transcript, answer, finish]:
                with self._call(episode, self._at(episode, turn, state)) as played:
                    return await self._go_on(
                        episode, played, _tokens(transcript), _tokens(answer), finish
                    )
            case ["drop", episode]:
                self.drop(episode)
                return []
        raise ValueError("this is an environment: it takes reset, step and drop")

    def answer_at_once(self, request: list[Any]) -> list[Any]:
        """`answer` of an environment that is not concurrent."""
        return _at_once(self.answer(request))

    def drop(self, episode: int) -> None:
        """Forget an episode, if it is open; its pending call is cancelled."""
        played = self._open.pop(episode, None)
        if played is None:
            return
        if played.running is not None:
            played.running.cancel()
        if not played.busy:
            self._release(played.environment)

    # --- inside

    def _take(self) -> OpenEpisode:
        if len(self._open) >= OPEN_EPISODES_MAX:
            raise ValueError(f"{OPEN_EPISODES_MAX} episodes are open in this process; no more fit")
        return OpenEpisode(self._idle.pop() if self._idle else self._make())

    def _release(self, environment: Environment) -> None:
        if len(self._idle) < IDLE_INSTANCES_MAX:
            self._idle.append(environment)

    def _at(self, episode: int, turn: int, state: bytes | None) -> OpenEpisode:
        """The episode after `turn` answers."""
        found = self._open.get(episode)
        if found is not None and found.busy:
            raise ValueError(f"episode {episode}: a step is under way; wait for its end")
        if found is not None and found.turn == turn:
            return found
        if state is None:
            raise EpisodeLost("the process that played it has ended, and it has no saved state")
        self.drop(episode)
        restored = self._take()
        if self._texts is not None:
            state, restored.said = read_kept(state)
        restored.environment.restore(state)
        restored.turn = turn
        return restored

    @contextmanager
    def _call(self, episode: int, played: OpenEpisode) -> Iterator[OpenEpisode]:
        """Run the block as the only call of this episode; an exception ends the episode."""
        self._open[episode] = played
        played.busy = True
        played.running = asyncio.current_task() if self.concurrent else None
        try:
            yield played
        except BaseException:
            if self._open.get(episode) is played:
                del self._open[episode]
            raise
        finally:
            played.busy, played.running = False, None

    async def _begin(self, played: OpenEpisode, row: int, seed: int) -> list[Any]:
        turn: Any = played.environment.reset(row, seed)
        if isawaitable(turn):
            turn = await turn
        if not isinstance(turn, Turn):
            raise TypeError(f"reset returned {type(turn).__name__}; expected a Turn")
        self._require_one_kind(turn)
        if self._texts is None:
            given = turn.tokens
        else:
            messages = list(turn.messages)
            if self._system and messages[0].get("role") != "system":
                messages.insert(0, {"role": "system", "content": self._system})
            given = self._texts.first(messages, turn.tools)
            played.said = Said(messages, turn.tools)
        reply = self._reply(played, given)
        caution = self._texts.caution() if self._texts is not None and turn.tools else ""
        return [*reply, checked_tags(turn.tags), short_name(turn.row), caution]

    async def _go_on(
        self,
        episode: int,
        played: OpenEpisode,
        transcript: Sequence[int],
        answer: Sequence[int],
        finish: "Finish",
    ) -> list[Any]:
        read = self._read(played.turn, answer, finish)
        found: Any = played.environment.step(read.answer)
        if isawaitable(found):
            found = await found
        played.turn += 1
        if isinstance(found, End):
            reply = ["end", *checked_reward(found.reward), _closing(found.messages)]
            # The episode may have been dropped while the step waited.
            if self._open.get(episode) is played:
                del self._open[episode]
                self._release(played.environment)
            return reply
        if not isinstance(found, Turn):
            raise TypeError(f"step returned {type(found).__name__}; expected a Turn or an End")
        self._require_one_kind(found)
        if found.tools:
            raise ValueError("only the first turn may have tools; a later one has some too")
        if self._texts is None:
            return self._reply(played, found.tokens)
        messages = [_cut(message) for message in found.messages]
        if played.said is not None:
            played.said = played.said.plus(read.message, *messages)
        try:
            return self._reply(played, self._texts.following([*transcript, *answer], messages))
        except NoContinuation as fault:
            # A branch would not remove a fault in the environment's messages.
            if fault.reason == "messages":
                raise
            return self._reply(played, _whole_again(self._texts, played.said, fault), fault)

    def _read(self, turn: int, tokens: Sequence[int], finish: "Finish") -> "_Read":
        if self._texts is None:
            return _Read(EnvironmentAnswer("", (), finish, tokens), {})
        read = self._texts.answer(tokens, finish)
        calls = tuple(
            # The text of a call has no id. A turn that is repeated must give the same ids.
            ToolCall(each.name, each.arguments, f"call-{turn}-{place}")
            for place, each in enumerate(read.tool_calls)
        )
        return _Read(EnvironmentAnswer(read.text, calls, finish, tokens), _message(read, calls))

    def _require_one_kind(self, turn: Turn) -> None:
        wanted, other = ("messages", "tokens") if self._about.in_text else ("tokens", "messages")
        if not getattr(turn, wanted) or getattr(turn, other):
            raise ValueError(f"a turn of this environment has {wanted}, and no {other}")

    def _reply(
        self, played: OpenEpisode, given: Sequence[int], branch: NoContinuation | None = None
    ) -> list[Any]:
        """["turn", given tokens, state, why there is no state, why the tokens begin a branch]."""
        if len(given) > GIVEN_TOKENS_MAX:
            raise ValueError(
                f"a turn of {len(given)} tokens; at most {GIVEN_TOKENS_MAX} are allowed"
            )
        state, unsaved = _saved(played.environment)
        if state is not None and self._texts is not None:
            state = kept(state, played.said)
        why = "" if branch is None else f"{branch.reason}: {branch.detail}"[:CAUSE_CHARS_MAX]
        return ["turn", packed_tokens(given), state, unsaved, why]


@dataclass(frozen=True, slots=True)
class _Read:
    """An answer that was read from tokens."""

    answer: EnvironmentAnswer
    message: Mapping[str, Any]  # the answer in the form that a chat template takes


def _message(read: ReadAnswer, calls: Sequence[ToolCall]) -> dict[str, Any]:
    # Templates that drop the reasoning look for it in the content.
    thought = f"{THINK}\n{read.reasoning}\n{END_THINK}\n\n" if read.reasoning else ""
    said: dict[str, Any] = {"role": "assistant", "content": thought + read.text}
    if calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in calls
        ]
    return said


def _whole_again(texts: EpisodeTexts, said: Said | None, fault: NoContinuation) -> list[int]:
    """The tokens of all messages so far. NoContinuation: they were lost, or cannot be rendered."""
    if said is None:
        lost = "its messages so far were lost with a process: they did not fit beside the state"
        raise NoContinuation(fault.reason, f"{fault.detail}; {lost}") from fault
    try:
        return texts.first(said.messages, said.tools)
    except Fault as error:
        raise NoContinuation(fault.reason, f"{fault.detail}; rendered again: {error}") from error


def _at_once(work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Run a coroutine that never waits. TypeError: it waits."""
    try:
        work.send(None)
    except StopIteration as ended:
        found: list[Any] = ended.value
        return found
    work.close()
    raise TypeError("it waits, but neither `reset` nor `step` is declared `async def`")


def _saved(environment: Environment) -> tuple[bytes | None, str]:
    """The state, or None and the reason."""
    try:
        state: object = environment.save()
    # pickle and environments may raise any exception.
    except Exception as error:  # noqa: BLE001
        cause = f"{type(error).__name__}: {error}"[:CAUSE_CHARS_MAX]
        return None, f"its state cannot be saved: {cause}; override save and restore"
    if state is None:
        return None, "it saves no state"
    if not isinstance(state, bytes):
        return None, f"save returned {type(state).__name__}; expected bytes or None"
    if len(state) > STATE_BYTES_MAX:
        return None, (
            f"its state has {len(state)} bytes, over the limit of {STATE_BYTES_MAX}; override save "
            "and restore, and keep large data in the class or the module"
        )
    return state, ""


def _tokens(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def _cut(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or len(content) <= CONTENT_CHARS_MAX:
        return message
    left_out = len(content) - CONTENT_CHARS_MAX
    cut = f"{content[:CONTENT_CHARS_MAX]}\n[{left_out} characters are left out]"
    return {**message, "content": cut}


def _closing(messages: Sequence[Mapping[str, Any]]) -> str:
    # The last message of an episode is cut after 4,096 characters.
    return "\n".join(str(message.get("content", "")) for message in messages)[:4096]
