"""What a task is: where prompts come from and what an answer is worth.

A Task runs in a killable process of the data plane (`tasks/pool.py`), never in the coordinator: it may hang, crash or
print gigabytes, and costs one trajectory at most. So it is plain synchronous Python. Tokens in, tokens out: the
task owns its tokenizer, and nothing is ever re-tokenised elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `secret` (the reference answer, a grader's key ...; msgpack-able) never leaves the data plane and
    the coordinator: workers see tokens only."""

    tokens: Sequence[int]
    secret: Any = None
    tags: dict[str, str] = field(default_factory=dict)


class Task(Protocol):
    """A family of prompts with a reward. Must be a pure function of its arguments and construction options."""

    name: str
    stop_token_ids: Sequence[int]

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index` of an endless, seeded sequence; the same index always gives the same prompt."""

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        """What the output tokens of one finished trajectory are worth. Raising means: an error of this trajectory."""
