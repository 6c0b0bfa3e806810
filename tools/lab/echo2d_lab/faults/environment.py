"""A modelled environment: short episodes whose answers are known, and which detect a turn that is asked twice.

An episode of prompt `cursor` and sample `sample` has `turns_of` turns, unless it is cut off. Its state is the
number of turns that it has answered, so it detects an answered turn that is asked again. An episode that an
outside agent plays begins with its first call, and some of its later calls begin a branch. Episodes of
evaluations are not durable: they begin again with another coordinator process.
"""

from collections import Counter
from dataclasses import dataclass, field

from echo2d.core.base.ids import GroupId
from echo2d.core.coordinator.events import CoordinatorRecord
from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.core.work.events import (
    EnvironmentStepped,
    EpisodeEnded,
    EpisodeForgotten,
    ForgetEpisode,
    SampleReturned,
    StepEnvironment,
    TurnAnswered,
)
from echo2d.core.work.leases import TRAINING, kind_of

TURNS = 4  # most turns of an episode
GIVEN = (2, 3)  # tokens of an environment's answer; one more token names the turn


def turns_of(cursor: int, sample: int) -> int:
    return 1 + (7 * cursor + 3 * sample) % TURNS


def given_after(turn: int) -> bytes:
    """The tokens that the environment gives after this turn; for turn 0, an agent's first call."""
    return pack_tokens([*GIVEN, 4 + turn % 8])


def branches_after(turn: int, sample: int) -> bool:
    """Whether an outside agent's call after this turn begins a branch."""
    return turn > 0 and (turn + sample) % 3 == 0


@dataclass
class ModelEnvironment:
    """See the module docstring.

    acknowledged: for each group and sample, the number of turns whose answers are durable. scored: for each running
    episode of an evaluation, the number of answered turns, as long as the coordinator process lives. begun_anew: how
    often this coordinator process forgot an episode.
    """

    acknowledged: dict[tuple[GroupId, int], int] = field(default_factory=dict)
    scored: dict[tuple[GroupId, int], int] = field(default_factory=dict)
    begun_anew: Counter[tuple[GroupId, int]] = field(default_factory=Counter)

    def heard(self, record: CoordinatorRecord) -> None:
        """Record that this record is durable now."""
        match record:
            case TurnAnswered(group, sample, turn):
                self.acknowledged[group, sample] = turn
            case EpisodeForgotten(group, sample) | SampleReturned(group, sample):
                self.acknowledged.pop((group, sample), None)
                self.begun_anew[group, sample] += 1
            case _:
                pass

    def restarted(self) -> None:
        """Record that another coordinator process begins."""
        self.scored.clear()
        self.begun_anew.clear()

    def forget(self, order: ForgetEpisode) -> None:
        self.scored.pop((order.group, order.sample), None)

    def step(
        self, order: StepEnvironment, reward: float | None
    ) -> EnvironmentStepped | EpisodeEnded:
        """Answer a turn. reward: of an episode that ends here; None: the environment fails."""
        at = order.group, order.sample
        of_evaluation = kind_of(order.group) != TRAINING
        if not of_evaluation and order.begun < self.begun_anew[at]:
            # The coordinator forgot this episode in the same turn in which it asked, and ignores the answer.
            return EpisodeEnded(*at, order.begun, order.turn, reward, "forgotten")
        given = order.output.given
        outside = not order.turn or bool(given and given[0].start == 0)
        before_first = -1 if outside else 0
        answered = (self.scored if of_evaluation else self.acknowledged).get(at, before_first)
        assert order.turn == answered + 1, "an answered turn is asked again, or one is lost"
        state = None if answered == before_first else b"%d" % answered
        assert order.state == state, "the environment got another episode's state"
        assert order.output.turn_start < order.output.length or not order.turn
        if outside and order.turn and reward is None:
            return EpisodeEnded(*at, order.begun, order.turn, None, "gone", again=True)
        if order.turn >= turns_of(order.cursor, order.sample):
            self.scored.pop(at, None)
            reason = "" if reward is not None else "crashed"
            return EpisodeEnded(*at, order.begun, order.turn, reward, reason)
        if of_evaluation:
            self.scored[at] = order.turn
        anew = outside and branches_after(order.turn, order.sample)
        return EnvironmentStepped(
            *at, order.begun, order.turn, given_after(order.turn), b"%d" % order.turn, anew
        )
