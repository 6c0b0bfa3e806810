"""The interface of an environment: a task of several turns.

    reset(row, seed) --> Turn --the policy answers--> step(answer) --> Turn --> ... --> End

An environment runs in the processes of its task (`tasks/pool.py`), which may be killed between any
two turns. The state that it saves after each turn is kept outside them; a new process goes on from it.
"""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from echo2d.tasks.base import Reward

if TYPE_CHECKING:
    # Not imported at run time, because that would delay the start of a task process.
    from echo2d.core.protocol.control_messages import Finish

STATE_BYTES_MAX = 64 << 10  # it is stored after every turn of every episode


class EpisodeLost(Exception):  # noqa: N818 - an outcome
    """A process should continue an episode that it does not have, and there is no saved state."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy answers next: `messages` of an environment in text, else `tokens`."""

    messages: Sequence[Mapping[str, Any]] = ()  # the new ones only, each with "role" and "content"
    tokens: Sequence[int] = ()  # the new ones only
    # Only the first turn has these three fields.
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas of functions that may be called
    tags: Mapping[str, str] = field(default_factory=dict)  # facts that reach the metrics
    row: str = ""  # a name of the row that stays the same in all runs, if it has one


@dataclass(frozen=True, slots=True)
class End:
    """The episode is over."""

    reward: float | Reward
    # Shown to readers of samples; the policy does not answer.
    messages: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""  # the "tool_call_id" of the result's message


@dataclass(frozen=True, slots=True)
class EnvironmentAnswer:
    """One answer of the policy."""

    text: str  # without the end token and tool calls; empty if the environment is in tokens
    tool_calls: Sequence[ToolCall]
    finish: "Finish"  # how it ended; all except "stop" and "stop_string" mean that it was cut off
    tokens: Sequence[int]  # all of them, including the end token


class Environment(ABC):
    """Many episodes, one after the other. Subclass it.

    It is constructed with the options of its `[[task]]` table, once for each episode that a process
    has open; large data belong in the class or the module. `reset` and `step` may be `async def`:
    then the episodes of a process run at the same time.

    `reset` and `step` may raise any exception, which ends this episode without a reward. Unjudged: the
    episode cannot be judged.
    """

    name: str  # the environment's default name
    in_text: bool = True  # turns are messages; else tokens
    # End an answer, besides the model's own end tokens, if the environment is in tokens.
    stop_token_ids: Sequence[int] = ()

    @property
    def concurrent(self) -> bool:
        """Whether one process may play many episodes at the same time."""
        return iscoroutinefunction(self.reset) or iscoroutinefunction(self.step)

    @abstractmethod
    def reset(self, row: int, seed: int) -> Turn | Awaitable[Turn]:
        """Begin a new episode, whether or not the last one has ended.

        The turn must depend on `row` alone, because the samples of a group share their prompt. All
        later random choices depend on `seed`. NoMorePrompts: there is no such row.
        """

    @abstractmethod
    def step(self, answer: EnvironmentAnswer) -> Turn | End | Awaitable[Turn | End]:
        """Take the policy's answer to the last turn."""

    def save(self) -> bytes | None:
        """The state of the episode between two turns, in at most STATE_BYTES_MAX bytes.

        None: it cannot be saved, so the episode is lost if its process ends.
        """
        return pickle.dumps(self.__dict__)

    def restore(self, state: bytes) -> None:
        """Go on with the episode that `save` returned, in another instance with the same options."""
        # Only a task's process reads this, and only a process of the same task wrote it.
        self.__dict__.update(pickle.loads(state))  # noqa: S301
