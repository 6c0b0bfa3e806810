"""The environment of the demo's tiny model: sort the digits of the prompt, and try again.

    prompt "31415926>"  ->  answer "11324569<eos>"
    hint  "<31415926>"  ->  answer "11234569<eos>"       "+" where the first answer was right

Its prompts and its alphabet are those of `sort_digits`. The reward is the share of the two answers
that are right.
"""

import json
from collections.abc import Sequence

from echo2d.tasks.base import Reward, Split
from echo2d.tasks.environment import End, Environment, EnvironmentAnswer, Turn
from echo2d.tasks.sort_digits import EOS, VOCABULARY, SortDigits, answer

RIGHT, WRONG = VOCABULARY.index("+"), VOCABULARY.index("<")


class TwoTurnDigits(Environment):
    """Sort digits, hear whether it was right, and sort the same digits again.

    digits_min, digits_max: of a prompt; the length is drawn per prompt.
    """

    name = "two_turn_digits"
    in_text = False
    stop_token_ids = (EOS,)

    def __init__(
        self, rng_seed: int = 0, digits_min: int = 8, digits_max: int = 8, split: Split = "train"
    ) -> None:
        self._task = SortDigits(rng_seed, digits_min, digits_max, split)
        self._asked: Sequence[int] = ()
        self._first: bool | None = None

    def reset(self, row: int, seed: int) -> Turn:  # noqa: ARG002 - nothing is left to chance
        prompt = self._task.prompt(row)
        self._asked, self._first = prompt.tokens, None
        return Turn(tokens=self._asked, tags=prompt.tags)

    def step(self, given: EnvironmentAnswer) -> Turn | End:
        right = tuple(given.tokens) == answer(self._asked)
        if self._first is None:
            self._first = right
            hint = (RIGHT if right else WRONG, *self._asked)
            return Turn(tokens=hint)
        parts = {"first": float(self._first), "second": float(right)}
        return End(Reward(sum(parts.values()) / 2, parts))

    def save(self) -> bytes:
        return json.dumps([list(self._asked), self._first]).encode()

    def restore(self, state: bytes) -> None:
        self._asked, self._first = json.loads(state)
