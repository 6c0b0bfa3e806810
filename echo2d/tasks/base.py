"""The interfaces of a task: it makes prompts and computes the reward of an answer.

    TextTask   messages in, text out: echo2d tokenizes, with the model's own template
    Task       tokens in, tokens out: the task owns its alphabet

A task runs in a process of its own (`tasks/pool.py`), never in the coordinator. It may hang, crash
or print gigabytes: its process is killed, and only the call at hand fails.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    # The start of a task process takes longer with it.
    from echo2d.core.protocol.control_messages import Finish

Split = Literal["train", "heldout"]

REWARD_PARTS_MAX = 32  # named numbers of one reward
TASK_NAME_CHARS_MAX = 64  # of a reward's part, a tag, an attachment or a row's key
ATTACHMENTS_MAX = 16  # of one prompt
# Of one prompt, together: with 131,072 tokens they fit into one answer of a task's process, 1 MiB.
ATTACHMENTS_BYTES_MAX = 480 << 10


class NoMorePrompts(Exception):  # noqa: N818 - an outcome
    """`prompt` raises it where the task's prompts end. A task that never does is endless."""


class Unjudged(Exception):  # noqa: N818 - an outcome
    """`reward` raises it if nobody can say what the answer is worth. It is worth 0, and counted."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    secret: what the reward needs, such as the reference answer. It never leaves the task's
    processes: workers see only the tokens. tags: facts that reach the metrics. row: a name of the
    prompt that stays the same over runs, if it has one. attachments: bytes by name, such as pictures;
    they reach the learner.
    """

    tokens: Sequence[int]
    secret: Any = None
    tags: Mapping[str, str] = field(default_factory=dict)
    row: str = ""
    attachments: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as messages, each with "role" and "content". where: for people, the place where it stands, such as a row
    of a file. The other fields are as in `Prompt`.
    """

    messages: Sequence[Mapping[str, Any]]
    secret: Any = None
    tags: Mapping[str, str] = field(default_factory=dict)
    row: str = ""
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer.

    text: without the end token. finish: how it ended; all but "stop" and "stop_string" mean that it
    was cut off. tokens: how many it has.
    """

    text: str
    finish: "Finish"
    tokens: int


@dataclass(frozen=True, slots=True)
class Reward:
    """What an answer is worth: a finite number, and named numbers that it is made of.

    At most REWARD_PARTS_MAX parts; they reach the metrics.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class TextTask(ABC):
    """A family of prompts with a reward, in text. Subclass it.

    Both methods must depend only on their arguments and on the options given to the constructor.
    name: its default name. Either of `prompt` and `reward` may raise anything: that is an error of
    this call.
    """

    name: str

    @property
    def concurrent(self) -> bool:
        """Whether many rewards may wait beside each other in one process."""
        return iscoroutinefunction(self.reward)

    @abstractmethod
    def prompt(self, index: int) -> TextPrompt:
        """Prompt number `index`; an index always gives the same prompt. NoMorePrompts: the end."""

    @abstractmethod
    def reward(
        self, prompt: TextPrompt, answer: Answer
    ) -> float | Reward | Awaitable[float | Reward]:
        """What the answer is worth. It may be `async def`; then many run at once in one process.

        Unjudged: nobody can say.
        """


class Task(Protocol):
    """A family of prompts with a reward, in tokens. What `TextTask` says holds here, too.

    An answer ends with one of `stop_token_ids` or of the model's own end tokens.
    """

    name: str
    stop_token_ids: Sequence[int]

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index`; an index always gives the same prompt. NoMorePrompts: the end."""

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float | Reward:
        """The reward of one finished trajectory. Unjudged: nobody can say."""
