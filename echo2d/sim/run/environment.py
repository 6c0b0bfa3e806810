"""A modelled environment: short episodes whose answers are known, and which find out what is asked twice.

An episode of prompt `cursor` and sample `sample` has `turns_of` turns, unless it is cut off. Its state is the
number of turns that it answered, so an answered turn that comes again is found. Those of evaluations are not
durable: they begin anew with another coordinator process.
"""

from dataclasses import dataclass, field

from echo2d.core.base.ids import GroupId
from echo2d.core.coordinator.events import CoordinatorRecord
from echo2d.core.evaluation.open_evaluation import GROUP_FIRST
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.rollouts.events import (
    EnvironmentStepped,
    EpisodeEnded,
    EpisodeForgotten,
    ForgetEpisode,
    SampleReturned,
    StepEnvironment,
    TurnAnswered,
)

TURNS = 4  # at most
GIVEN = (2, 3)  # tokens of an answer, but for one that names the turn


def turns_of(cursor: int, sample: int) -> int:
    return 1 + (7 * cursor + 3 * sample) % TURNS


def given_after(turn: int) -> bytes:
    """The tokens that the environment gives behind this turn."""
    return pack_tokens([*GIVEN, 4 + turn % 8])


@dataclass
class ModelEnvironment:
    """See the module docstring.

    acknowledged: by group and sample, the turns whose answers are durable. scored: the same of evaluations, as long as
    the coordinator process lives: the turns that were answered in episodes that go on.
    """

    acknowledged: dict[tuple[GroupId, int], int] = field(default_factory=dict)
    scored: dict[tuple[GroupId, int], int] = field(default_factory=dict)

    def heard(self, record: CoordinatorRecord) -> None:
        """This is durable now."""
        match record:
            case TurnAnswered(group, sample, turn):
                self.acknowledged[group, sample] = turn
            case EpisodeForgotten(group, sample) | SampleReturned(group, sample):
                self.acknowledged.pop((group, sample), None)
            case _:
                pass

    def restarted(self) -> None:
        """Another coordinator process begins."""
        self.scored.clear()

    def forget(self, order: ForgetEpisode) -> None:
        self.scored.pop((order.group, order.sample), None)

    def step(
        self, order: StepEnvironment, reward: float | None
    ) -> EnvironmentStepped | EpisodeEnded:
        """reward: of an episode that ends here; None: the environment fails."""
        at = order.group, order.sample
        of_evaluation = order.group >= GROUP_FIRST
        answered = (self.scored if of_evaluation else self.acknowledged).get(at, 0)
        assert order.turn == answered + 1, "an answered turn is asked again, or one is lost"
        state = None if order.turn == 1 else b"%d" % answered
        assert order.state == state, "the environment got another episode's state"
        assert 0 <= order.start < len(order.output) // 4
        if order.turn >= turns_of(order.cursor, order.sample):
            self.scored.pop(at, None)
            reason = "" if reward is not None else "crashed"
            return EpisodeEnded(*at, order.begun, order.turn, reward, reason)
        if of_evaluation:
            self.scored[at] = order.turn
        return EnvironmentStepped(
            *at, order.begun, order.turn, given_after(order.turn), b"%d" % order.turn
        )
