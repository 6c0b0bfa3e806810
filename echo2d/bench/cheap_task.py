"""The task of `echo2d bench coordinator`: prompts of any tokens, a reward that costs nothing and yet has variance."""

from collections.abc import Sequence

from echo2d.tasks.base import Prompt


class CheapTask:
    """Prompt number `index` is `prompt_tokens` tokens below `vocab_size`; the reward is the first token's parity."""

    name = "cheap"
    stop_token_ids: Sequence[int] = ()

    def __init__(self, prompt_tokens: int, vocab_size: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._vocab_size = vocab_size

    def prompt(self, index: int) -> Prompt:
        return Prompt(tokens=[(index + place) % self._vocab_size for place in range(self._prompt_tokens)])

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:  # noqa: ARG002 - a task's signature
        return float(output[0] % 2)
