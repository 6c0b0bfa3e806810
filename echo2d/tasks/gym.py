"""The task "gym": problems that reasoning-gym generates, scored by their own generator.

A generator makes problem i from (rng_seed, i), so nothing is stored. A held-out question never comes
up in training: problem i is the first of several candidates that is on the wanted side of the split.
"""

from collections.abc import Mapping
from typing import Any

from echo2d.errors import OperatorFault
from echo2d.extras import install_command
from echo2d.tasks.base import Answer, Split, TextPrompt, TextTask
from echo2d.tasks.rows.split import GeneratedSide, row_key


class GymTask(TextTask):
    """Problems that reasoning-gym generates.

    dataset: a generator of reasoning-gym, such as "chain_sum". settings: of the generator.

    prompt: a text with {question} in it. held_out, split: as for the task "rows".
    """

    name = "gym"

    def __init__(
        self,
        dataset: str,
        settings: Mapping[str, Any] | None = None,
        prompt: str = "{question}",
        held_out: float = 0.2,
        split: Split = "train",
        rng_seed: int = 0,
    ) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise OperatorFault(f"gym: it needs reasoning-gym: {install_command('gym')}") from error
        self._side = GeneratedSide("gym", split, held_out)
        try:
            # reasoning-gym asks how many problems there will be.
            self._problems = reasoning_gym.create_dataset(
                dataset, seed=rng_seed, size=1 << 40, **(settings or {})
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise OperatorFault(f"gym: {dataset}: {error}") from error
        self._prompt = prompt
        self.name = dataset

    def prompt(self, index: int) -> TextPrompt:
        key, (number, question) = self._side.row(index, self._problem)
        content = self._prompt.format(question=question)
        return TextPrompt([{"role": "user", "content": content}], secret=number, row=key)

    def reward(self, prompt: TextPrompt, answer: Answer) -> float:
        return float(
            self._problems.score_answer(answer.text.strip(), self._problems[prompt.secret])
        )

    def _problem(self, number: int) -> tuple[str, tuple[int, str]]:
        question = str(self._problems[number]["question"])
        return row_key(question), (number, question)
