"""An environment for measurements: a `StubTask` with several turns, which answers at once."""

from echo2d.tasks.environment import End, Environment, EnvironmentAnswer, Turn
from echo2d_lab.bench.lab.stub_task import StubTask

# The tokens that it gives between two turns.
GIVEN = (1, 2, 3, 4)


class StubEnvironment(Environment):
    """Every episode has `turns` turns; its reward is the parity of the first token that was written."""

    name = "cheap_turns"
    in_text = False

    def __init__(self, prompt_tokens: int, vocab_size: int, turns: int) -> None:
        self._prompts = StubTask(prompt_tokens, vocab_size)
        self._turns = turns

    def reset(self, row: int, seed: int) -> Turn:  # noqa: ARG002 - nothing is left to chance
        self._left, self._reward = self._turns, 0.0
        return Turn(tokens=self._prompts.prompt(row).tokens)

    def step(self, answer: EnvironmentAnswer) -> Turn | End:
        if self._left == self._turns:
            self._reward = float(answer.tokens[0] % 2)
        self._left -= 1
        return Turn(tokens=GIVEN) if self._left else End(self._reward)

    def save(self) -> bytes:
        return b"%d %d" % (self._left, self._reward)

    def restore(self, state: bytes) -> None:
        left, reward = state.split()
        self._left, self._reward = int(left), float(reward)
