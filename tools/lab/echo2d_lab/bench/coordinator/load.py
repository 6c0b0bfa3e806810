"""The load of `echo2d bench coordinator`, and a configuration that does not limit it."""

import math
from dataclasses import dataclass
from pathlib import Path

from echo2d.errors import OperatorFault
from echo2d_lab.bench.lab.stub_task import config

GROUP_SIZE = 8
STEP_S = 10.0  # a batch has the trajectories of this many seconds
VOCAB_SIZE = 32_000
PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Load:
    """The options of `echo2d bench coordinator`.

    rate: trajectories/s of all workers together. tokens: written in each trajectory. turns: of an
    environment; 1: there is no environment. slots: of each worker. bombers: further workers, which
    attack with messages that are expensive to refuse.
    """

    workers: int = 1000
    rate: float = 200.0
    tokens: int = 1000
    turns: int = 1
    slots: int = 4
    seconds: float = 60.0
    shape: str = "auto"
    bombers: int = 0

    def __post_init__(self) -> None:
        if self.workers * self.slots < GROUP_SIZE:
            raise OperatorFault(
                f"--workers x --slots: expected at least {GROUP_SIZE}, a group; "
                f"found {self.workers * self.slots}"
            )

        if self.tokens < self.turns:
            raise OperatorFault(
                f"--turns: expected at most one for each of {self.tokens} tokens; "
                f"found {self.turns}"
            )

    @property
    def groups(self) -> int:
        """The number of groups in flight when every slot is leased."""
        return math.ceil(self.workers * self.slots / GROUP_SIZE)

    @property
    def generate_s(self) -> float:
        """Seconds of one turn with which all slots together make `rate`."""
        return self.workers * self.slots / self.rate / self.turns

    @property
    def turn_tokens(self) -> int:
        return self.tokens // self.turns

    @property
    def groups_per_step(self) -> int:
        return max(1, round(self.rate * STEP_S / GROUP_SIZE))

    @property
    def staleness_max(self) -> int:
        """Large enough that groups in flight and a buffered batch close no staleness gate."""
        return math.ceil(self.groups / self.groups_per_step) + 2

    def config(self, run: Path) -> str:
        policy = {
            "staleness_max": self.staleness_max,
            "publish_every": 1,
            "trajectories_per_step": self.groups_per_step * GROUP_SIZE,
            "group_size": GROUP_SIZE,
        }
        task = {"prompt_tokens": PROMPT_TOKENS, "vocab_size": VOCAB_SIZE}
        shape = {"shape": self.shape}
        return config(run, task, self.turn_tokens, policy, shape, turns=self.turns)
