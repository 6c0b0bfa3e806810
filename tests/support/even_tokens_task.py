"""A task in which answers of a model with random weights get different rewards, so that there is a gradient."""

from collections.abc import Sequence

from echo2d.tasks.base import Prompt


class EvenTokens:
    name = "even_tokens"
    stop_token_ids: Sequence[int] = ()

    def __init__(self, vocab_size: int = 17) -> None:
        self._vocab_size = vocab_size

    def prompt(self, index: int) -> Prompt:
        return Prompt(
            [3 + (index * step) % (self._vocab_size - 3) for step in (1, 5, 11)], secret=index
        )

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        """The share of even tokens."""
        return sum(token % 2 == 0 for token in output) / max(1, len(output))
