"""The queue of one task's prompts: drawn a little ahead, and taken in the order of their cursor.

    DrawPrompt --> asked --PromptDrawn--> ready --> taken by a group
                                            ^------ given back: the group was dropped without its
                                                    prompt's fault

Prompts that were given back before a restart are drawn again first, by their cursor.

A prompt whose row is retired (`sampler`) is passed over. When the task has no more prompts, none is
asked for any more.
Not here: groups, and what a prompt means.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from echo2d.core.base.ids import Version
from echo2d.core.protocol.trajectory import NO_SOURCE, PromptTag, Source, StoredGroup, unpack_tokens
from echo2d.core.work.events import DrawPrompt
from echo2d.core.work.training.sampler import Sampler
from echo2d.errors import PeerFault

# At most this many prompts are asked for or ready; drawing one takes a task process milliseconds.
PROMPTS_AHEAD_MAX = 64
# If this many prompts in a row are too long for the model, the task does not fit it.
SKIPPED_MAX = 1000


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """Prompt number `cursor` of its task; its tokens are little-endian int32."""

    cursor: int
    tokens: bytes
    source: Source = NO_SOURCE
    tags: tuple[PromptTag, ...] = ()


def prompt_fault(tokens: bytes, vocab_size: int) -> str:
    """Why no engine can take this prompt; empty: engines can."""
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
    """See the module docstring. task: the task's name. again: the cursors that were given back before a restart."""

    def __init__(
        self, next_cursor: int, sampler: Sampler, task: str = "", again: Iterable[int] = ()
    ) -> None:
        self.sampler = sampler
        self._task = task
        self._next_cursor = next_cursor
        self._redraw = deque(again)
        self._end: int | None = None
        self._asked: set[int] = set()
        self._skipped = 0
        self._ready: dict[int, DrawnPrompt] = {}
        # Prompts that were given back. The limit is never reached, because S + 2 steps have fewer groups than this.
        self._again: deque[DrawnPrompt] = deque(maxlen=4096)

    @property
    def over(self) -> bool:
        """Whether the task can make no more prompts, and all that it made have been taken."""
        waiting = self._redraw or self._asked or self._ready or self._again
        return self._end is not None and not waiting

    def ask(self, count: int) -> list[DrawPrompt]:
        """Ask for prompts until `count` of them are asked for, ready or given back."""
        actions = []
        while len(self._asked) + len(self._ready) + len(self._again) < min(
            count, PROMPTS_AHEAD_MAX
        ):
            if self._redraw:
                cursor = self._redraw.popleft()
            elif self._end is None:
                cursor = self._next_cursor
                self._next_cursor += 1
            else:
                break
            self._asked.add(cursor)
            actions.append(DrawPrompt(cursor, self._task))
        return actions

    def drawn(self, prompt: DrawnPrompt) -> None:
        """Take in a drawn prompt. A prompt that was not asked for is ignored."""
        if prompt.cursor in self._asked:
            self._asked.remove(prompt.cursor)
            self._ready[prompt.cursor] = prompt
            self._skipped = 0

    def skip(self, cursor: int) -> bool:
        """Leave this prompt out. False: SKIPPED_MAX in a row were left out."""
        self._asked.discard(cursor)
        self._skipped += 1
        return self._skipped < SKIPPED_MAX

    def ended(self, cursor: int) -> None:
        """Record that the task has no prompt from this cursor on."""
        self._end = cursor if self._end is None else min(self._end, cursor)
        self._asked = {asked for asked in self._asked if asked < self._end}

    def give_back(self, prompt: DrawnPrompt) -> None:
        """Use a prompt again whose group was dropped. Beyond 4,096 of them the oldest is forgotten."""
        self._again.append(prompt)

    def next(self, newest: Version | None) -> DrawnPrompt | None:
        """The prompt that `take` would return: those given back first, then by cursor.

        newest: the newest version that is published. Prompts of retired rows are thrown away.
        """
        if self._again:
            return self._again[0]
        while self._ready:
            prompt = self._ready[min(self._ready)]
            # A prompt with a lower cursor may still come, but is not waited for.
            if not self.sampler.filters or self.sampler.wants(prompt.source.row, newest):
                return prompt
            del self._ready[prompt.cursor]
        return None

    def take(self, prompt: DrawnPrompt) -> None:
        """Remove this prompt, which `next` returned."""
        if self._again and self._again[0] is prompt:
            self._again.popleft()
        else:
            del self._ready[prompt.cursor]
            self.sampler.asked()

    def check(self) -> None:
        assert not self._asked & self._ready.keys()
        assert len(self._asked) + len(self._ready) <= PROMPTS_AHEAD_MAX
        assert all(cursor < self._next_cursor for cursor in (*self._asked, *self._ready))


def prompt_of(stored: StoredGroup) -> DrawnPrompt:
    """The prompt of a stored group."""
    record = stored.record
    return DrawnPrompt(stored.cursor, record.prompt, stored.source, record.tags)
