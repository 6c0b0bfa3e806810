"""Simulates the auditor: it knows which tokens each version writes (`engine.mark`), and so finds every lie.

It loads versions and scores slowly, sometimes fails, and dies and restarts like any process.
"""

import random
from collections.abc import Sequence

from echo2d.core.base.ids import RunId
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    AnswersScored,
    AnswerToScore,
    Hello,
    LeaseGranted,
    ScoreAnswers,
    ScoringFailed,
    ToPeer,
)
from echo2d.core.protocol.evidence import TOLERANCES, Evidence
from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.plan.kernel.virtual_clock import Clock
from echo2d_lab.faults.control_links import Control, SimPeer
from echo2d_lab.faults.engine import STOP, mark

NUMBER = 1 << 16  # no worker has this number
LOAD_S = (0.05, 3.0)
FAILS = 0.05  # share of orders that fail


class SimAuditor(SimPeer):
    """granted: all leases of the run, which have the seeds of the samples."""

    def __init__(
        self,
        clock: Clock,
        chance: random.Random,
        control: Control,
        run_id: RunId,
        granted: Sequence[LeaseGranted],
    ) -> None:
        super().__init__(clock, chance, control, NUMBER, 0.001)
        self._run_id, self._granted = run_id, granted

    def start(self) -> None:
        self.begin(skew_s=self.chance.uniform(0.0, 1e5))
        self.dial()

    def hello(self) -> Hello:
        boot_id = f"auditor-{self.boots}"
        return Hello(
            OURS, self._run_id, "auditor", "auditor", boot_id, 0, None, None, (), (), ()
        )  # fmt: skip

    def heard(self, message: ToPeer) -> None:
        if isinstance(message, ScoreAnswers):
            self.later(self.chance.uniform(*LOAD_S), self._score, message)

    def _score(self, order: ScoreAnswers) -> None:
        if self.chance.random() < FAILS:
            self.say(ScoringFailed(order.order, "out of memory"))
            return
        samples = {
            seed: (lease.group, sample)
            for lease in self._granted
            for sample, seed in zip(lease.samples, lease.rng_seeds, strict=True)
        }
        found = []
        for answer in order.answers:
            assert answer.seed is not None
            group, sample = samples[answer.seed]
            first = len(answer.prompt) // 4
            right = [
                mark(order.key, group, sample, first + at) for at in range(len(answer.tokens) // 4)
            ]
            found.append(evidence_of(answer, right))
        self.say(AnswersScored(order.order, tuple(found), 0.1, 0.1))


def evidence_of(answer: AnswerToScore, right: Sequence[int]) -> Evidence:
    """The evidence of a replay: tokens that the version would not have written. An end token is right anywhere."""
    wrote = unpack_tokens(answer.tokens).tolist()
    wrong = sum(token not in (sign, STOP) for token, sign in zip(wrote, right, strict=True))
    return Evidence(
        len(wrote), 9.0 * wrong / len(wrote), 0.0, 1.0, 0.0, 0.0, (wrong,) * len(TOLERANCES)
    )
