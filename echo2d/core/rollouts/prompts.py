"""The queue of prompts: drawn from the task a little ahead, and taken in the order of its cursor.

    DrawPrompt --> asked --PromptDrawn--> ready --> taken by a group
                                            ^------ given back: the group was dropped for no
                                                    fault of its prompt

Not here: groups, and what a prompt means.
"""

from collections import deque
from dataclasses import dataclass

from echo2d.core.protocol.trajectory import NO_SOURCE, Source, unpack_tokens
from echo2d.core.rollouts.events import DrawPrompt
from echo2d.errors import PeerFault

# Prompts that are asked for or ready; drawing one takes a task process milliseconds.
AHEAD_MAX = 64
# Prompts given back; more than S + 2 steps ever hold.
AGAIN_MAX = 4096
# Prompts in a row that are too long for the model: then the task does not fit it.
SKIPPED_MAX = 1000


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """Prompt number `cursor` of the task: its tokens as little-endian int32, and its name."""

    cursor: int
    tokens: bytes
    source: Source = NO_SOURCE


def prompt_fault(tokens: bytes, vocab_size: int) -> str:
    """Why no engine can take this prompt; empty if engines can."""
    try:
        ids = unpack_tokens(tokens)
    except PeerFault as fault:
        return f"is malformed: {fault}"
    if not len(ids):
        return "has no tokens"
    return (
        ""
        if 0 <= int(ids.min()) <= int(ids.max()) < vocab_size
        else f"has token ids beyond {vocab_size}"
    )


class Prompts:
    """See the module docstring."""

    def __init__(self, next_cursor: int) -> None:
        self._next_cursor = next_cursor
        self._asked: set[int] = set()
        self._skipped = 0
        self._ready: dict[int, DrawnPrompt] = {}
        self._again: deque[DrawnPrompt] = deque(maxlen=AGAIN_MAX)

    def ask(self, count: int) -> list[DrawPrompt]:
        """Ask for prompts until `count` of them are asked for, ready or given back."""
        actions = []
        while len(self._asked) + len(self._ready) + len(self._again) < min(count, AHEAD_MAX):
            self._asked.add(self._next_cursor)
            actions.append(DrawPrompt(self._next_cursor))
            self._next_cursor += 1
        return actions

    def drawn(self, prompt: DrawnPrompt) -> None:
        """A prompt has come. One that was not asked for is ignored."""
        if prompt.cursor in self._asked:
            self._asked.remove(prompt.cursor)
            self._ready[prompt.cursor] = prompt
            self._skipped = 0

    def skip(self, cursor: int) -> bool:
        """Leave this prompt out. False: SKIPPED_MAX in a row were left out."""
        self._asked.discard(cursor)
        self._skipped += 1
        return self._skipped < SKIPPED_MAX

    def give_back(self, prompt: DrawnPrompt) -> None:
        """A prompt whose group was dropped is used again.

        Beyond AGAIN_MAX the oldest is forgotten.
        """
        self._again.append(prompt)

    def next(self) -> DrawnPrompt | None:
        """The prompt that `take` would return."""
        if self._again:
            return self._again[0]
        return self._ready[min(self._ready)] if self._ready else None

    def take(self) -> DrawnPrompt | None:
        """Remove and return the next prompt: those given back first, then by cursor."""
        prompt = self.next()
        if self._again:
            self._again.popleft()
        elif prompt is not None:
            del self._ready[prompt.cursor]
        return prompt

    def check(self) -> None:
        assert not self._asked & self._ready.keys()
        assert len(self._asked) + len(self._ready) <= AHEAD_MAX
        assert all(cursor < self._next_cursor for cursor in (*self._asked, *self._ready))
