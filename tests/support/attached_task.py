"""A task whose prompts have attachments: one that all prompts share, and one of its own for each."""

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
