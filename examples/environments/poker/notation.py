"""How a hand is told to the policy, and its answer read: in words, or in a small alphabet."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2d.tasks.environment import EnvironmentAnswer, Turn
from examples.environments.poker.table import (
    BIG_BLIND,
    CALL,
    FOLD,
    RANKS,
    SUITS,
    PokerDecision,
    PokerSpot,
)

ACTIONS = ("fold", "call", "half", "pot", "all_in")
# The words of the compact alphabet. An answer is one of ACTIONS; raises are by half a pot, by a pot, or all in.
POKER_VOCABULARY = (
    *("<pad>", "<eos>", "?", "button", "blind", "board"),
    *RANKS,
    *SUITS,
    *ACTIONS,
)
TOKEN_OF = {word: token for token, word in enumerate(POKER_VOCABULARY)}
ACTION_TOKENS = tuple(TOKEN_OF[word] for word in ACTIONS)


@dataclass(frozen=True, slots=True)
class OpponentMove:
    """What the opponent did, and what it saw."""

    spot: PokerSpot
    decision: PokerDecision


@dataclass(frozen=True, slots=True)
class CardsDealt:
    """New cards on the board."""

    cards: Sequence[str]


@dataclass(frozen=True, slots=True)
class PokerNews:
    """What a player learns before a decision. events: since the last one. spot: what it sees now."""

    events: Sequence[OpponentMove | CardsDealt]
    spot: PokerSpot


class PokerNotation(Protocol):
    def first(self, news: PokerNews, *, button: bool, stack: int) -> Turn: ...

    def following(self, news: PokerNews) -> Turn: ...

    def decision(self, answer: EnvironmentAnswer, spot: PokerSpot) -> PokerDecision | None:
        """None: the answer names none."""


class PokerWords:
    """In text. The last decision that an answer names counts."""

    def first(self, news: PokerNews, *, button: bool, stack: int) -> Turn:
        place = "the button, with the small blind" if button else "the big blind"
        content = (
            f"You play one hand of heads-up no-limit hold'em. The blinds are 1 and {BIG_BLIND}, and "
            f"each of you began with {stack} chips. You are {place}. Your cards: "
            f"{' '.join(news.spot.hole)}.\n{self._told(news)}\n"
            'End each answer with one of: "fold", "check", "call", "raise to N", "all in".'
        )
        return Turn([{"role": "user", "content": content}])

    def following(self, news: PokerNews) -> Turn:
        return Turn([{"role": "user", "content": self._told(news)}])

    def decision(self, answer: EnvironmentAnswer, spot: PokerSpot) -> PokerDecision | None:
        found = re.findall(
            r"\b(fold|check|call|all[ -]in|raise(?: to)? (\d{1,9}))\b", answer.text.lower()
        )
        if not found:
            return None
        word, amount = found[-1]
        if word.startswith("raise"):
            return PokerDecision("raise", int(amount))
        if word.startswith("all"):
            return CALL if spot.raise_to is None else PokerDecision("raise", spot.raise_to[1])
        if word == "check" and spot.to_call:
            return None
        return FOLD if word == "fold" else CALL

    def _told(self, news: PokerNews) -> str:
        spot = news.spot
        said = [_said(event) for event in news.events]
        said.append(f"The pot has {spot.pot} chips.")
        said.append(f"It costs {spot.to_call} to call." if spot.to_call else "You may check.")
        if spot.raise_to is not None:
            said.append("You may raise to {} up to {}.".format(*spot.raise_to))
        return " ".join(said)


class PokerAlphabet:
    """In tokens of POKER_VOCABULARY."""

    def first(self, news: PokerNews, *, button: bool, stack: int) -> Turn:  # noqa: ARG002 - no word for it
        words = ["button" if button else "blind", *_spelled(news.spot.hole)]
        return Turn(tokens=_tokens([*words, *self._told(news)]))

    def following(self, news: PokerNews) -> Turn:
        return Turn(tokens=_tokens(self._told(news)))

    def decision(self, answer: EnvironmentAnswer, spot: PokerSpot) -> PokerDecision | None:
        token = answer.tokens[0] if answer.tokens else -1
        if token not in ACTION_TOKENS:
            return None
        match POKER_VOCABULARY[token]:
            case "fold":
                return FOLD
            case "call":
                return CALL
            case _ if spot.raise_to is None:
                return None
            case "all_in":
                return PokerDecision("raise", spot.raise_to[1])
            case "half":
                return spot.raised(0.5)
        return spot.raised(1.0)

    def _told(self, news: PokerNews) -> list[str]:
        return [*(word for event in news.events for word in _named(event)), "?"]


def _said(event: OpponentMove | CardsDealt) -> str:
    match event:
        case CardsDealt(cards):
            return f"On the board comes {' '.join(cards)}."
        case OpponentMove(_, PokerDecision("fold")):
            return "The opponent folds."
        case OpponentMove(_, PokerDecision("raise", to)):
            return f"The opponent raises to {to}."
        case OpponentMove(spot):
            return "The opponent calls." if spot.to_call else "The opponent checks."


def _named(event: OpponentMove | CardsDealt) -> list[str]:
    if isinstance(event, CardsDealt):
        return ["board", *_spelled(event.cards)]
    return [_action(event.spot, event.decision)]


def _action(spot: PokerSpot, decision: PokerDecision) -> str:
    """The word of ACTIONS that comes closest."""
    if decision.kind != "raise":
        return decision.kind
    if spot.raise_to is not None and decision.to == spot.raise_to[1]:
        return "all_in"
    return "pot" if decision.to >= spot.raised(1.0).to else "half"


def _spelled(cards: Sequence[str]) -> list[str]:
    return [character for card in cards for character in card]


def _tokens(words: Sequence[str]) -> list[int]:
    return [TOKEN_OF[word] for word in words]
