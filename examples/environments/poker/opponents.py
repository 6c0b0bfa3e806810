"""Opponents by name: each decides by what it sees, and by chance.

To add one, write its function and put it into OPPONENTS.
"""

import random
from collections.abc import Callable, Mapping

from examples.environments.poker.table import CALL, FOLD, RANKS, PokerDecision, PokerSpot

Opponent = Callable[[PokerSpot, random.Random], PokerDecision]

TEN = RANKS.index("T")


def call(_: PokerSpot, __: random.Random) -> PokerDecision:
    """Never folds, never raises."""
    return CALL


def pot(spot: PokerSpot, _: random.Random) -> PokerDecision:
    """Raises by the pot whenever it can."""
    return spot.raised(1.0)


def chance(spot: PokerSpot, rng: random.Random) -> PokerDecision:
    """Calls half of the time, raises by half a pot or a pot, or folds."""
    return rng.choices((CALL, spot.raised(0.5), spot.raised(1.0), FOLD), (5, 2, 1, 2))[0]


def tight(spot: PokerSpot, _: random.Random) -> PokerDecision:
    """Raises with good cards, calls with fair ones, and else folds."""
    worth = _before_the_flop(spot.hole) if not spot.board else _with_a_board(spot.hole, spot.board)
    return spot.raised(0.75) if worth == 2 else CALL if worth == 1 else FOLD


OPPONENTS: Mapping[str, Opponent] = {"call": call, "raise": pot, "random": chance, "tight": tight}


def _before_the_flop(hole: tuple[str, str]) -> int:
    low, high = sorted(RANKS.index(card[0]) for card in hole)
    pair, suited = low == high, hole[0][1] == hole[1][1]
    if low >= TEN or (pair and high >= RANKS.index("8")):
        return 2
    return int(pair or high == RANKS.index("A") or (suited and high >= TEN) or low >= TEN - 2)


def _with_a_board(hole: tuple[str, str], board: tuple[str, ...]) -> int:
    """2 for two pairs, or a pair of its own above the board; 1 for another pair of its own."""
    ranks = [card[0] for card in board]
    held = {card[0] for card in hole}
    hits = held & set(ranks)
    highest = max(map(RANKS.index, ranks))
    if len(held) == 1:
        return 2 if hits or RANKS.index(hole[0][0]) > highest else 1
    best = max((RANKS.index(rank) for rank in hits), default=-1)
    return 2 if len(hits) == 2 or best == highest else int(bool(hits))
