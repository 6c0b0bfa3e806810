"""Turns of an episode, for any kind of work: room for another turn, and the tokens that an answer adds."""

from dataclasses import replace

import pytest

from echo2d.core.base.ids import GroupId, LeaseId, PeerId
from echo2d.core.protocol.trajectory import AuthoredSpan, Partial, pack_logprobs, pack_tokens
from echo2d.core.rules.tasks import EpisodeRules, TaskRules
from echo2d.core.work.episodes import Parked, has_room
from echo2d.core.work.events import TurnKept
from tests.support.coordinator_world import RULES, version_key

TASK = TaskRules(max_new_tokens=8, episode=EpisodeRules(turns_max=3, tokens_max=12))
PROMPT = pack_tokens([5] * 4)


def written(tokens: int) -> Partial:
    span = AuthoredSpan(0, tokens, *version_key(0), PeerId("w"))
    return Partial(pack_tokens([3] * tokens), pack_logprobs([-0.5] * tokens), (span,))


@pytest.mark.parametrize(
    ("turn", "tokens", "given", "room"),
    [(1, 6, 5, True), (1, 6, 6, False), (2, 4, 2, True), (3, 4, 2, False)],
    ids=["room", "no token is left", "a last turn", "too many turns"],
)
def test_another_turn_needs_a_remaining_turn_and_a_remaining_token(
    turn: int, tokens: int, given: int, *, room: bool
) -> None:
    answer = pack_tokens([2] * given)
    assert has_room(RULES, TASK, PROMPT, turn, written(tokens), answer) is room


def test_a_branch_has_the_whole_context_for_itself() -> None:
    """A branch follows the prompt anew: the turns before it are not in the model's context."""
    rules = replace(RULES, context_max=11)
    turns = rules, TASK, PROMPT, 1, written(6), pack_tokens([2])
    assert not has_room(*turns)
    assert has_room(*turns, anew=True)


def test_an_answer_of_the_environment_ends_the_turn_and_has_no_span() -> None:
    turn = TurnKept(GroupId(4), 1, 2, LeaseId(7), 0, written(3), "stop")
    parked = Parked(turn, 10.0, PeerId("w"), version_key(0), 30.0)
    episode = parked.answered(pack_tokens([2, 2]), b"state")
    assert (episode.turns, episode.state, episode.since) == (2, b"state", 10.0)
    assert (episode.partial.length, episode.partial.written) == (5, 3)
    assert episode.partial.spans == turn.partial.spans
