"""The digit game of two turns: its prompts, its rewards, and its play in a process."""

from collections.abc import Sequence

import pytest

from echo2d.core.protocol.trajectory import pack_tokens, unpack_tokens
from echo2d.demo.two_turns import RIGHT, WRONG, TwoTurnDigits
from echo2d.tasks.base import Reward
from echo2d.tasks.environment import End, EnvironmentAnswer, Turn
from echo2d.tasks.episodes import EpisodeEnd, Episodes, EpisodeTurn, StepCall
from echo2d.tasks.pool import Score, TaskPool
from echo2d.tasks.sort_digits import EOS, SortDigits, answer


def answered(tokens: Sequence[int]) -> EnvironmentAnswer:
    return EnvironmentAnswer("", (), "stop", list(tokens))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_the_first_answer_decides_the_hint_and_both_decide_the_reward(
    first: bool, second: bool
) -> None:
    game = TwoTurnDigits()
    asked = game.reset(3, 0).tokens
    assert asked == SortDigits().prompt(3).tokens
    right, wrong = answer(asked), (EOS,)
    turn = game.step(answered(right if first else wrong))
    assert turn == Turn(tokens=(RIGHT if first else WRONG, *asked))
    restored = TwoTurnDigits()
    restored.restore(game.save())
    end = restored.step(answered(right if second else wrong))
    assert end == End(
        Reward((first + second) / 2, {"first": float(first), "second": float(second)})
    )


async def test_a_game_is_played_in_a_process() -> None:
    async with TaskPool("echo2d.demo.two_turns:TwoTurnDigits", {"split": "heldout"}) as pool:
        episodes = Episodes(pool)
        first = await episodes.reset(1, 0, 0)
        assert isinstance(first, EpisodeTurn)
        right = pack_tokens(answer(unpack_tokens(first.given).tolist()))
        second = await episodes.step(StepCall(1, 0, first.state, b"", right))
        assert isinstance(second, EpisodeTurn)
        assert second.given == pack_tokens([RIGHT]) + first.given
        end = await episodes.step(StepCall(1, 1, second.state, b"", right))
    assert end == EpisodeEnd(Score(1.0, {"first": 1.0, "second": 1.0}))
