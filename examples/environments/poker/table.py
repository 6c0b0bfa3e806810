"""One hand of heads-up no-limit hold'em, whose cards are all known. The rules are pokerkit's.

The small blind is the button: it acts first before the flop, and last after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pokerkit import State

SMALL_BLIND, BIG_BLIND = 1, 2  # chips
RANKS, SUITS = "23456789TJQKA", "cdhs"
DECK = tuple(rank + suit for rank in RANKS for suit in SUITS)


@dataclass(frozen=True, slots=True)
class PokerDecision:
    """What a player does. A call of nothing is a check. to: chips that a raise puts in, in all."""

    kind: Literal["fold", "call", "raise"]
    to: int = 0


FOLD, CALL = PokerDecision("fold"), PokerDecision("call")


@dataclass(frozen=True, slots=True)
class PokerSpot:
    """What a player sees. raise_to: the least and the most of a raise; None: there is none.

    pot: all chips that were put in. bet: those of this player on this street.
    """

    hole: tuple[str, str]
    board: tuple[str, ...]
    pot: int
    bet: int
    to_call: int
    raise_to: tuple[int, int] | None

    def raised(self, pots: float) -> PokerDecision:
        """A raise by so many pots, as far as the rules and the stacks allow; else a call."""
        if self.raise_to is None:
            return CALL
        least, most = self.raise_to
        wanted = self.bet + self.to_call + round(pots * (self.pot + self.to_call))
        return PokerDecision("raise", min(max(wanted, least), most))


class PokerTable:
    """holes: the cards of the big blind (player 0) and of the button (1). stack: chips of each."""

    def __init__(self, stack: int, holes: Sequence[tuple[str, str]], board: Sequence[str]) -> None:
        self._holes, self._board = holes, tuple(board)
        self._state = _begin(stack)
        for number in range(4):
            self._state.deal_hole(holes[number % 2][number // 2])

    @property
    def player(self) -> int | None:
        """Whose turn it is; None: the hand is over."""
        return self._state.actor_index

    @property
    def stacks(self) -> tuple[int, int]:
        big_blind, button = self._state.stacks
        return int(big_blind), int(button)

    @property
    def board(self) -> tuple[str, ...]:
        """The cards that lie open."""
        return self._board[: len(self._state.board_cards)]

    def spot(self) -> PokerSpot:
        """What the player sees whose turn it is."""
        state, player = self._state, self._state.actor_index
        assert player is not None
        least = state.min_completion_betting_or_raising_to_amount
        most = state.max_completion_betting_or_raising_to_amount
        return PokerSpot(
            hole=self._holes[player],
            board=self.board,
            pot=int(state.total_pot_amount),
            bet=int(state.bets[player]),
            to_call=int(state.checking_or_calling_amount or 0),
            raise_to=None if least is None or most is None else (int(least), int(most)),
        )

    def is_legal(self, decision: PokerDecision) -> bool:
        spot = self.spot()
        if decision.kind != "raise":
            return True
        return spot.raise_to is not None and spot.raise_to[0] <= decision.to <= spot.raise_to[1]

    def act(self, decision: PokerDecision) -> None:
        """Carry out a legal decision, and deal what follows. A fold of nothing is a check."""
        state = self._state
        if decision.kind == "raise":
            state.complete_bet_or_raise_to(decision.to)
        elif decision.kind == "fold" and state.checking_or_calling_amount:
            state.fold()
        else:
            state.check_or_call()
        while state.status and state.actor_index is None:
            # Which cards are burnt does not matter.
            state.burn_card("??")
            count = state.board_dealing_count
            assert count is not None
            first = len(state.board_cards)
            state.deal_board("".join(self._board[first : first + count]))


def _begin(stack: int) -> "State":
    # Imported here because the registry's names are listed without it, too.
    from pokerkit import Automation, NoLimitTexasHoldem

    automations = (
        Automation.ANTE_POSTING,
        Automation.BET_COLLECTION,
        Automation.BLIND_OR_STRADDLE_POSTING,
        Automation.RUNOUT_COUNT_SELECTION,
        Automation.HOLE_CARDS_SHOWING_OR_MUCKING,
        Automation.HAND_KILLING,
        Automation.CHIPS_PUSHING,
        Automation.CHIPS_PULLING,
    )
    blinds, stacks = (SMALL_BLIND, BIG_BLIND), (stack, stack)
    return NoLimitTexasHoldem.create_state(automations, True, 0, blinds, BIG_BLIND, stacks, 2)
