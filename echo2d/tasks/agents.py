"""Episodes that outside agents play: programs that ask for a ticket, and call the gateway with it.

    POST /v1/episodes --> ticket: row, seed --> calls of the gateway --> POST /v1/episodes/T/end: reward

Only the agent knows what happens in its episode; this module has the rows, and the tokens with which
all calls begin.
Not here: tickets and calls (`runtime/coordinator/agent_episodes.py`).
"""

from collections.abc import Sequence
from typing import NoReturn

from echo2d.tasks.environment import Environment, EnvironmentAnswer, Turn

# An agent's episode ends if the agent makes no call for this long.
AGENT_SILENCE_S = 600.0


class Agents(Environment):
    """Episodes of outside agents (docs/guide/environments.md).

    rows: how many rows the agents have; a ticket names one of them. 0: agents choose by the ticket's
    seed. opening: the tokens that every call begins with; empty: the first token of the model's chat
    template. stop_token_ids: end an answer, besides the model's own end tokens. silence_s: an episode ends if
    its agent makes no call for this long.
    """

    name = "agents"

    def __init__(
        self,
        rows: int = 0,
        opening: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
        silence_s: float = AGENT_SILENCE_S,
    ) -> None:
        if rows < 0 or not 0 < silence_s <= 86400:
            raise ValueError("expected rows from 0 on, and silence_s above 0 and at most a day")
        self.in_text = not opening
        self.stop_token_ids = tuple(stop_token_ids)
        self._rows, self._opening = rows, tuple(opening)

    def reset(self, row: int, seed: int) -> Turn:  # noqa: ARG002 - the agent gets it
        name = str(row % self._rows) if self._rows else str(row)
        if self._opening:
            return Turn(tokens=self._opening, row=name)
        return Turn(messages=({"role": "user", "content": ""},), row=name)

    def step(self, answer: EnvironmentAnswer) -> NoReturn:  # noqa: ARG002
        raise AssertionError("an outside agent answers, not this process")
