"""A task whose prompts have attachments: all prompts share one, and each prompt has one of its own."""

from collections.abc import Sequence

from echo2d.tasks.base import Prompt

SHARED = b"the same bytes" * 1000


class AttachedTask:
    name = "attached"
    stop_token_ids: Sequence[int] = ()

    def prompt(self, index: int) -> Prompt:
        return Prompt(
            tokens=[index + 1, 2, 3],
            row=f"row {index}",
            attachments={"picture": f"bytes of {index}".encode(), "legend": SHARED},
        )

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        return float(output[0] % 2)


class LadenTask:
    """Prompts of this many tokens, with this many attachments, each of this many bytes."""

    name = "laden"
    stop_token_ids: Sequence[int] = ()

    def __init__(self, count: int, size: int, tokens: int = 1) -> None:
        self._count, self._size, self._tokens = count, size, tokens

    def prompt(self, index: int) -> Prompt:
        attachments = {f"{number:064}": bytes(self._size) for number in range(self._count)}
        return Prompt([1] * self._tokens, attachments=attachments)

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        return 0.0
