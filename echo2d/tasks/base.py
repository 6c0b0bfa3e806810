"""The interfaces of a task: it makes prompts and computes the reward of an answer.

    TextTask   messages in, text out: echo2d tokenizes, with the model's own template
    Task       tokens in, tokens out: the task owns its alphabet

A task runs in a process of its own (`tasks/pool.py`), never in the coordinator. If it hangs, crashes
or prints gigabytes, its process is killed, and only the call under way fails.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    # Not imported at run time, because that would delay the start of a task process.
    from echo2d.core.protocol.control_messages import Finish

Split = Literal["train", "heldout"]

REWARD_PARTS_MAX = 32  # named numbers of one reward
TASK_NAME_CHARS_MAX = 64  # name of a reward's part, tag or attachment, or key of a row
ATTACHMENTS_MAX = 16  # attachments of one prompt
# Most bytes of one prompt's attachments. With 131,072 tokens they fit into one reply of a task's process, 1 MiB.
ATTACHMENTS_BYTES_MAX = 480 << 10


class NoMorePrompts(Exception):  # noqa: N818 - an outcome
    """`prompt` raises it after the task's last prompt. A task that never raises it is endless."""


class Unjudged(Exception):  # noqa: N818 - an outcome
    """`reward` raises it if the answer cannot be judged. Its reward is then 0, and it is counted."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    tokens: Sequence[int]
    # What the reward needs, such as the reference answer. It never leaves the task's processes: workers
    # see only the tokens.
    secret: Any = None
    tags: Mapping[str, str] = field(default_factory=dict)  # facts that reach the metrics
    row: str = ""  # a name of the prompt that stays the same in all runs, if it has one
    # Bytes by name, such as pictures; they reach the learner.
    attachments: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as messages, each with "role" and "content". Other fields are as in `Prompt`."""

    messages: Sequence[Mapping[str, Any]]
    secret: Any = None
    tags: Mapping[str, str] = field(default_factory=dict)
    row: str = ""
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    where: str = ""  # for people: where the prompt is from, such as a row of a file


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer."""

    text: str  # without the end token
    finish: "Finish"  # how it ended; all except "stop" and "stop_string" mean that it was cut off
    tokens: int  # how many it has


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of an answer."""

    value: float  # finite
    # The reward's components, by name: at most REWARD_PARTS_MAX. They reach the metrics.
    parts: Mapping[str, float] = field(default_factory=dict)


class TextTask(ABC):
    """A family of prompts with a reward, in text. Subclass it.

    Both methods must depend only on their arguments and on the options given to the constructor.
    Either may raise any exception, which is an error of this call only.
    """

    name: str  # the task's default name

    @property
    def concurrent(self) -> bool:
        """Whether one process may compute many rewards at the same time."""
        return iscoroutinefunction(self.reward)

    @abstractmethod
    def prompt(self, index: int) -> TextPrompt:
        """Prompt number `index`; an index always gives the same prompt. NoMorePrompts: the end."""

    @abstractmethod
    def reward(
        self, prompt: TextPrompt, answer: Answer
    ) -> float | Reward | Awaitable[float | Reward]:
        """The reward of the answer. It may be `async def`; then many run at once in one process.

        Unjudged: the answer cannot be judged.
        """


class Task(Protocol):
    """A family of prompts with a reward, in tokens. The rules of `TextTask` hold here too.

    An answer ends with one of `stop_token_ids` or of the model's own end tokens.
    """

    name: str
    stop_token_ids: Sequence[int]

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index`; an index always gives the same prompt. NoMorePrompts: the end."""

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float | Reward:
        """The reward of one finished trajectory. Unjudged: it cannot be judged."""
