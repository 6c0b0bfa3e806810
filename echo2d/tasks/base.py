"""The interface of a task: it makes prompts and computes the reward of an answer.

A task runs in a process of its own (`tasks/pool.py`), never in the coordinator. It may hang, crash
or print gigabytes: its process is killed, and the run loses at most the group of the prompt at
hand. So a task is plain synchronous Python. It receives and returns tokens: the task owns its
tokenizer, and nothing is ever tokenised again elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    secret: what the reward needs, such as the reference answer; msgpack must be able to encode it.
    It stays with the coordinator and the task's processes: workers see only `tokens`.
    """

    tokens: Sequence[int]
    secret: Any = None
    tags: dict[str, str] = field(default_factory=dict)


class Task(Protocol):
    """A family of prompts with a reward.

    Both methods must depend only on their arguments and on the options given to the constructor.
    """

    name: str
    stop_token_ids: Sequence[int]

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index` of an endless sequence; an index always gives the same prompt."""

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        """The reward of one finished trajectory, a finite number.

        An exception, or a reward that does not come in time, costs the trajectory's group: it is
        dropped and another prompt takes its place.
        """
