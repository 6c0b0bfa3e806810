"""Poker: chips are conserved, a hand is replayed from its row and seed, and groups share prompts."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.errors import OperatorFault
from echo2d.tasks.base import Reward
from echo2d.tasks.environment import End, EnvironmentAnswer, Turn
from echo2d.tasks.episodes import EpisodeEnd, Episodes, EpisodeTurn, StepCall
from echo2d.tasks.pool import TaskPool
from examples.environments.poker.environment import Poker
from examples.environments.poker.notation import ACTIONS, POKER_VOCABULARY, TOKEN_OF
from examples.environments.poker.opponents import OPPONENTS
from examples.environments.poker.table import CALL, DECK, FOLD, PokerDecision, PokerTable

HANDS = 250
TURNS_MAX = 40  # of one hand; a raise at least doubles the last one or ends the stacks


def token(word: str) -> EnvironmentAnswer:
    return EnvironmentAnswer("", (), "stop", [TOKEN_OF[word]])


def text(words: str) -> EnvironmentAnswer:
    return EnvironmentAnswer(words, (), "stop", [1])


def said(turn: Turn | End) -> str:
    return str(turn.messages[-1]["content"])


def spelled(turn: Turn | End) -> str:
    assert isinstance(turn, Turn)
    return " ".join(POKER_VOCABULARY[each] for each in turn.tokens)


def hand(
    poker: Poker, row: int, seed: int, answers: Iterator[EnvironmentAnswer]
) -> list[Turn | End]:
    """All that the environment says in one hand."""
    told: list[Turn | End] = [poker.reset(row, seed)]
    while not isinstance(told[-1], End):
        told.append(poker.step(next(answers)))
        assert len(told) < TURNS_MAX
    return told


def drawn(rng: random.Random) -> Iterator[EnvironmentAnswer]:
    """Decisions by chance, a few of them no decisions."""
    while True:
        yield token(rng.choices((*ACTIONS, "?"), (2, 8, 3, 2, 1, 1))[0])


def spoken(rng: random.Random) -> Iterator[EnvironmentAnswer]:
    while True:
        words = ("fold", "Check.", "I call", "raise to 4", "raise 12", "all in", "hm", "raise 9999")
        yield text(rng.choices(words, (1, 6, 8, 3, 3, 1, 1, 1))[0])


def play(opponent: str, hands: int) -> None:
    """Chips are conserved, and the reward is what the stacks say, after every one of these hands."""
    rng = random.Random(f"{opponent} {hands}")
    for alphabet, answers in (("tokens", drawn(rng)), ("text", spoken(rng))):
        poker = Poker(opponent, stack=50, alphabet=alphabet, rng_seed=3)
        for row in range(hands // 2):
            end = hand(poker, row, seed=row, answers=answers)[-1]
            stacks = poker._table.stacks
            assert sum(stacks) == 200
            assert isinstance(end, End)
            assert isinstance(end.reward, Reward)
            won = (stacks[poker._player] - 100) / 2
            assert end.reward.parts["won"] == won
            assert end.reward.value == won - poker._illegal
            assert abs(won) <= 50


@pytest.mark.parametrize("opponent", list(OPPONENTS))
def test_chips_are_conserved(opponent: str) -> None:
    play(opponent, HANDS)


@pytest.mark.soak
@pytest.mark.parametrize("opponent", list(OPPONENTS))
def test_chips_are_conserved_over_many_hands(opponent: str) -> None:
    play(opponent, 40 * HANDS)


@pytest.mark.parametrize("opponent", list(OPPONENTS))
def test_a_hand_is_repeatable_and_continues_from_any_state(opponent: str) -> None:
    one, other = (Poker(opponent, alphabet="tokens") for _ in range(2))
    for row in range(30):
        answers = drawn(random.Random(row))
        given = [next(answers) for _ in range(TURNS_MAX)]
        told = hand(one, row, 7, iter(given))
        assert told == hand(other, row, 7, iter(given))
        one.reset(row, 7)
        for answer, expected in zip(given, told[1:], strict=False):
            # Each step by another instance, which has played something else before.
            other.reset(row + 1, 0)
            other.restore(one.save())
            assert other.step(answer) == expected
            one, other = other, one


@pytest.mark.parametrize("alphabet", ["text", "tokens"])
@pytest.mark.parametrize("opponent", list(OPPONENTS))
def test_samples_of_a_group_share_their_prompt_and_nothing_else(
    opponent: str, alphabet: str
) -> None:
    poker = Poker(opponent, alphabet=alphabet)
    boards = set()
    for row in range(20):
        prompts = [poker.reset(row, seed) for seed in range(8)]
        assert all(prompt == prompts[0] for prompt in prompts)
        for seed in range(8):
            poker.reset(row, seed)
            boards.add(poker._table._board)
    assert len(boards) == 160


def test_no_card_is_dealt_twice() -> None:
    poker = Poker("tight")
    for row in range(200):
        poker.reset(row, row)
        cards = [*poker._table._holes[0], *poker._table._holes[1], *poker._table._board]
        assert len({*cards} & {*DECK}) == 9


def test_the_opponents_cards_are_as_if_they_had_come_before_its_first_move() -> None:
    """A tight one that raised has good cards; where it only called, it has none of these."""
    poker = Poker("tight")
    ranks: dict[str, Counter[bool]] = {"raise": Counter(), "call": Counter()}
    for row in range(400):
        turn = poker.reset(row, row)
        if turn.tags["position"] == "big blind":
            kind = "raise" if "raises" in said(turn) else "call"
            ranks[kind][all(card[0] in "TJQKA89" for card in poker._table._holes[1])] += 1
    assert set(ranks["raise"]) == {True}
    assert ranks["call"][False] > ranks["call"][True]


def test_a_hand_is_described_in_words() -> None:
    poker = Poker("call", stack=10, rng_seed=1)
    row = next(n for n in range(9) if poker.reset(n, 0).tags["position"] == "button")
    first = poker.reset(row, 0)
    hole = " ".join(poker._table._holes[1])
    assert said(first) == (
        "You play one hand of heads-up no-limit hold'em. The blinds are 1 and 2, and each of you "
        "began with 20 chips. You are the button, with the small blind. Your cards: "
        f"{hole}.\nThe pot has 3 chips. It costs 1 to call. You may raise to 4 up to 20.\n"
        'End each answer with one of: "fold", "check", "call", "raise to N", "all in".'
    )
    board = poker._table._board
    flop = poker.step(text("Let me see: fold or raise? I raise to 6"))
    assert said(flop) == (
        f"The opponent calls. On the board comes {' '.join(board[:3])}. The opponent checks. "
        "The pot has 12 chips. You may check. You may raise to 2 up to 14."
    )
    assert said(poker.step(text("check"))).startswith(
        f"On the board comes {board[3]}. The opponent checks."
    )
    end = poker.step(text("ALL IN"))
    assert isinstance(end, End)
    assert isinstance(end.reward, Reward)
    assert end.reward.value in (10.0, 0.0, -10.0)


def test_a_hand_is_described_in_tokens() -> None:
    poker = Poker("call", stack=10, alphabet="tokens", rng_seed=1)
    row = next(n for n in range(9) if poker.reset(n, 0).tags["position"] == "big blind")
    first = poker.reset(row, 0)
    hole = " ".join("".join(poker._table._holes[0]))
    assert spelled(first) == f"blind {hole} call ?"
    flop = poker.step(token("pot"))
    assert spelled(flop) == f"call board {' '.join(''.join(poker._table._board[:3]))} ?"
    assert set(poker.stop_token_ids) == {TOKEN_OF[word] for word in ACTIONS}


@pytest.mark.parametrize("words", ["", "check", "raise to 3", "raise to 201", "bet", "1" * 5000])
def test_an_illegal_decision_costs_a_penalty_and_folds(words: str) -> None:
    """On the button there is something to call."""
    poker = Poker("call", illegal_penalty=2.5)
    row = next(n for n in range(9) if poker.reset(n, 0).tags["position"] == "button")
    poker.reset(row, 0)
    end = poker.step(text(words))
    assert isinstance(end, End)
    assert end.reward == Reward(-3.0, {"won": -0.5, "illegal": -2.5})


def test_an_illegal_decision_checks_if_there_is_no_bet_to_call() -> None:
    poker = Poker("call")
    row = next(n for n in range(9) if poker.reset(n, 0).tags["position"] == "big blind")
    end = hand(poker, row, 0, iter([text("hm")] * 4))[-1]
    assert isinstance(end, End)
    assert isinstance(end.reward, Reward)
    assert end.reward.parts["illegal"] == -4.0
    assert end.reward.parts["won"] in (-1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("holes", "board", "stacks"),
    [
        ([("Ah", "As"), ("2c", "7d")], ["Ad", "Kc", "9h", "5s", "3d"], (40, 0)),
        ([("2c", "7d"), ("Ah", "As")], ["Ad", "Kc", "9h", "5s", "3d"], (0, 40)),
        ([("2c", "3d"), ("2h", "3s")], ["Ad", "Kc", "9h", "8s", "Td"], (20, 20)),
    ],
)
def test_the_better_hand_takes_the_stacks(
    holes: Sequence[tuple[str, str]], board: list[str], stacks: tuple[int, int]
) -> None:
    table = PokerTable(20, holes, board)
    table.act(PokerDecision("raise", 20))
    table.act(CALL)
    assert (table.player, table.stacks) == (None, stacks)


def test_a_fold_without_a_bet_to_call_counts_as_a_check() -> None:
    table = PokerTable(20, [("2c", "7d"), ("Ah", "As")], ["Ad", "Kc", "9h", "5s", "3d"])
    table.act(CALL)
    table.act(FOLD)
    assert (table.player, table.board) == (0, ("Ad", "Kc", "9h"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"opponent": "nobody"}, "opponent: expected one of call, raise, random, tight"),
        ({"alphabet": "morse"}, "alphabet: expected one of text, tokens"),
        ({"stack": 1}, "stack: expected 2 to 1000; found 1"),
    ],
)
def test_wrong_options_are_the_operators_fault(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(OperatorFault, match=reason):
        Poker(**options)


async def test_a_hand_is_played_in_a_process() -> None:
    options = {"opponent": "call", "alphabet": "tokens", "stack": 10}
    async with TaskPool("examples.environments.poker.environment:Poker", options) as pool:
        assert pool.about.stop_token_ids == tuple(TOKEN_OF[word] for word in ACTIONS)
        episodes = Episodes(pool)
        first = await episodes.reset(1, 0, 5)
        assert isinstance(first, EpisodeTurn)
        all_in = StepCall(1, 0, first.state, b"", pack_tokens([TOKEN_OF["all_in"]]))
        end = await episodes.step(all_in)
    assert isinstance(end, EpisodeEnd)
    assert end.score.reward in (10.0, 0.0, -10.0)
