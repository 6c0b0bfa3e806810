"""The interface of an environment: a task of several turns.

    reset(row, seed) --> Turn --the policy answers--> step(answer) --> Turn --> ... --> End

An environment runs in the processes of its task (`tasks/pool.py`), which may be killed between any
two turns. What it saves after each turn is kept outside; a new process goes on from there.
"""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from echo2d.tasks.base import Reward

if TYPE_CHECKING:
    # The start of a task process takes longer with it.
    from echo2d.core.protocol.control_messages import Finish

STATE_BYTES_MAX = 64 << 10  # it is stored after every turn of every episode


class EpisodeLost(Exception):  # noqa: N818 - an outcome
    """A process does not have the episode that it shall play on, and there is no state of it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy answers next: `messages` of an environment in text, else `tokens`.

    messages: the new ones only, each with "role" and "content". tokens: the new ones only. tools:
    JSON schemas of functions that may be called.
    tags: facts that reach the metrics. row: a name of the row that stays the same over runs, if it
    has one. Tools, tags and row are those of the first turn.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    tokens: Sequence[int] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    row: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """The episode is over. messages: a last word for those who read samples; nobody answers it."""

    reward: float | Reward
    messages: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote. id: names it in the "tool_call_id" of the result's message."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class EnvironmentAnswer:
    """One answer of the policy.

    text: without the end token and without tool calls; empty where the environment is in tokens.
    finish: how it ended; all but "stop" and "stop_string" mean that it was cut off. tokens: all of
    them, the end token included.
    """

    text: str
    tool_calls: Sequence[ToolCall]
    finish: "Finish"
    tokens: Sequence[int]


class Environment(ABC):
    """Many episodes, one after the other. Subclass it.

    It is constructed with the options of its `[[task]]` table, once for each episode that a process
    has open; large data belong to the class or the module. `reset` and `step` may be `async def`:
    then the episodes of a process wait beside each other.

    name: its default name. in_text: its turns are messages; else tokens, and an answer ends with
    one of `stop_token_ids` or of the model's own end tokens.

    `reset` and `step` may raise anything: that ends this episode without a reward. Unjudged: nobody
    can say what it is worth.
    """

    name: str
    in_text: bool = True
    stop_token_ids: Sequence[int] = ()

    @property
    def concurrent(self) -> bool:
        """Whether many episodes may wait beside each other in one process."""
        return iscoroutinefunction(self.reset) or iscoroutinefunction(self.step)

    @abstractmethod
    def reset(self, row: int, seed: int) -> Turn | Awaitable[Turn]:
        """Begin a new episode, whatever became of the last one.

        The turn must depend on `row` alone, because the samples of a group share their prompt. All
        else that is left to chance depends on `seed`. NoMorePrompts: the rows end here.
        """

    @abstractmethod
    def step(self, answer: EnvironmentAnswer) -> Turn | End | Awaitable[Turn | End]:
        """Take the policy's answer to the last turn."""

    def save(self) -> bytes | None:
        """The episode between two turns, in at most STATE_BYTES_MAX bytes.

        None: it cannot be saved, and is lost with its process.
        """
        return pickle.dumps(self.__dict__)

    def restore(self, state: bytes) -> None:
        """Go on with the episode that `save` returned, in another instance with the same options."""
        # Only a task's process reads this, and only a process of the same task wrote it.
        self.__dict__.update(pickle.loads(state))  # noqa: S301
