"""The environment "poker": one hand of heads-up no-limit hold'em is an episode.

    row  --> position and hole cards; what the opponent does before the first decision
    seed --> the opponent's cards, the board, and what it does from then on

The samples of a group so have one prompt and many continuations. Where the opponent acts first, its
cards are drawn again until it does what the prompt says: they are then distributed as if the cards
had come first. There it never folds.
"""

import importlib.util
import json
import random
from collections.abc import Sequence
from dataclasses import replace

from echo2d.errors import OperatorFault
from echo2d.extras import install_command
from echo2d.tasks.base import Reward, Split
from echo2d.tasks.environment import End, Environment, EnvironmentAnswer, Turn
from echo2d.tasks.rows.split import GeneratedSide, row_key
from examples.environments.poker.notation import (
    ACTION_TOKENS,
    CardsDealt,
    OpponentMove,
    PokerAlphabet,
    PokerNews,
    PokerNotation,
    PokerWords,
)
from examples.environments.poker.opponents import OPPONENTS
from examples.environments.poker.table import (
    BIG_BLIND,
    CALL,
    DECK,
    FOLD,
    PokerDecision,
    PokerSpot,
    PokerTable,
)

# In big blinds. With one, the big blind would have no decision.
STACK_MIN, STACK_MAX = 2, 1000
NOTATIONS: dict[str, type[PokerNotation]] = {"text": PokerWords, "tokens": PokerAlphabet}

Hole = tuple[str, str]


class Poker(Environment):
    """Heads-up no-limit hold'em; the reward is what a hand wins, in big blinds.

    opponent: call, raise, random or tight. stack: of each player, in big blinds. illegal_penalty:
    big blinds that an answer costs which is no legal decision; it counts as a check or a fold.
    alphabet: "text", or "tokens" for a model of the POKER_VOCABULARY.

    held_out, split: as of the task "rows", over positions and hole cards.
    """

    name = "poker"

    def __init__(
        self,
        opponent: str = "tight",
        stack: int = 100,
        illegal_penalty: float = 1.0,
        alphabet: str = "text",
        held_out: float = 0.1,
        split: Split = "train",
        rng_seed: int = 0,
    ) -> None:
        if importlib.util.find_spec("pokerkit") is None:
            raise OperatorFault(f"poker: it needs pokerkit: {install_command('poker')}")
        for option, value, known in (
            ("opponent", opponent, OPPONENTS),
            ("alphabet", alphabet, NOTATIONS),
        ):
            if value not in known:
                raise OperatorFault(
                    f"poker: {option}: expected one of {', '.join(known)}; found {value!r}"
                )
        if not STACK_MIN <= stack <= STACK_MAX:
            raise OperatorFault(f"poker: stack: expected {STACK_MIN} to {STACK_MAX}; found {stack}")
        self._side = GeneratedSide("poker", split, held_out)
        self._opponent, self._notation = OPPONENTS[opponent], NOTATIONS[alphabet]()
        self._penalty, self._rng_seed = illegal_penalty, rng_seed
        self._stack = stack * BIG_BLIND
        self.in_text = alphabet == "text"
        self.stop_token_ids = () if self.in_text else ACTION_TOKENS
        self._begin(0, 0)

    def reset(self, row: int, seed: int) -> Turn:
        return self._begin(row, seed)

    def step(self, answer: EnvironmentAnswer) -> Turn | End:
        spot = self._table.spot()
        decision = self._notation.decision(answer, spot)
        if decision is None or not self._table.is_legal(decision):
            self._illegal += 1
            decision = FOLD if spot.to_call else CALL
        self._act(decision)
        events = self._play_on()
        if self._table.player is None:
            return self._end()
        return self._notation.following(PokerNews(events, self._table.spot()))

    def save(self) -> bytes:
        """What was done so far; all else follows from the row and the seed."""
        done = [[decision.kind, decision.to] for decision in self._done]
        return json.dumps([self._row, self._seed, self._illegal, done]).encode()

    def restore(self, state: bytes) -> None:
        row, seed, illegal, done = json.loads(state)
        self._begin(row, seed)
        for kind, to in done:
            self._act(PokerDecision(kind, to))
            self._play_on()
        self._illegal = illegal

    # --- inside

    def _begin(self, row: int, seed: int) -> Turn:
        self._row, self._seed, self._illegal, self._shown = row, seed, 0, 0
        self._done: list[PokerDecision] = []
        self._rng = random.Random(f"poker play {self._rng_seed} {row} {seed}")
        key, (hole, button, number) = self._side.row(row, self._deal)
        rest = [card for card in DECK if card not in hole]
        self._player = int(button)
        holes, events = self._opening(hole, rest, number)
        left = [card for card in rest if card not in holes[1 - self._player]]
        self._table = PokerTable(self._stack, holes, self._rng.sample(left, 5))
        for move in events:
            self._table.act(move.decision)
        news = PokerNews(events, self._table.spot())
        turn = self._notation.first(news, button=button, stack=self._stack)
        return replace(turn, row=key, tags={"position": "button" if button else "big blind"})

    def _deal(self, number: int) -> tuple[str, tuple[Hole, bool, int]]:
        """Candidate n for a row."""
        rng = random.Random(f"poker deal {self._rng_seed} {number}")
        first, second = sorted(rng.sample(DECK, 2), key=DECK.index, reverse=True)
        button = rng.random() < 0.5
        place = "button" if button else "big blind"
        return row_key(f"{first}{second} {place}"), ((first, second), button, number)

    def _opening(
        self, hole: Hole, rest: Sequence[str], number: int
    ) -> tuple[tuple[Hole, Hole], list[OpponentMove]]:
        """The hole cards of both players, and what the opponent does before the first decision."""
        if self._player == 1:
            return (self._two(self._rng, rest), hole), []
        # Drawn by the row: what it does with cards that nobody will see.
        by_row = random.Random(f"poker open {self._rng_seed} {number}")
        seen = PokerTable(self._stack, (hole, self._two(by_row, rest)), ()).spot()
        while (opening := self._decide(seen, by_row)).kind == "fold":
            seen = replace(seen, hole=self._two(by_row, rest))
        spot = replace(seen, hole=self._two(self._rng, rest))
        while self._decide(spot, self._rng) != opening:
            spot = replace(spot, hole=self._two(self._rng, rest))
        return (hole, spot.hole), [OpponentMove(spot, opening)]

    def _two(self, rng: random.Random, cards: Sequence[str]) -> Hole:
        first, second = rng.sample(cards, 2)
        return first, second

    def _decide(self, spot: PokerSpot, rng: random.Random) -> PokerDecision:
        decision = self._opponent(spot, rng)
        return CALL if decision.kind == "fold" and not spot.to_call else decision

    def _act(self, decision: PokerDecision) -> None:
        self._done.append(decision)
        self._table.act(decision)

    def _play_on(self) -> list[OpponentMove | CardsDealt]:
        """Let the opponent act until it is not its turn; return all that happened."""
        events: list[OpponentMove | CardsDealt] = []
        while True:
            if cards := self._table.board[self._shown :]:
                events.append(CardsDealt(cards))
                self._shown += len(cards)
            if self._table.player != 1 - self._player:
                return events
            spot = self._table.spot()
            decision = self._decide(spot, self._rng)
            self._table.act(decision)
            events.append(OpponentMove(spot, decision))

    def _end(self) -> End:
        won = (self._table.stacks[self._player] - self._stack) / BIG_BLIND
        parts = {"won": won, "illegal": -self._penalty * self._illegal}
        said = f"You won {won:g} big blinds." if won >= 0 else f"You lost {-won:g} big blinds."
        return End(Reward(sum(parts.values()), parts), [{"role": "user", "content": said}])
