"""Measures how many hands of poker one core plays: `python -m echo2d_lab.research.poker_speed`.

Both players decide at once, so the time is that of the environment alone. It prints the median and the
extremes of several rounds for each opponent.
"""

import argparse
import random
import statistics
import time

from echo2d.tasks.environment import End, EnvironmentAnswer
from examples.environments.poker.environment import Poker
from examples.environments.poker.notation import ACTIONS, TOKEN_OF
from examples.environments.poker.opponents import OPPONENTS

WEIGHTS = (2, 8, 3, 2, 1)  # how often the policy takes each of its ACTIONS


def hands_per_s(opponent: str, hands: int, rng: random.Random) -> float:
    """Hands per CPU second."""
    poker = Poker(opponent, alphabet="tokens")
    began = time.process_time()
    for row in range(hands):
        found: object = poker.reset(row, row)
        while not isinstance(found, End):
            word = rng.choices(ACTIONS, WEIGHTS)[0]
            found = poker.step(EnvironmentAnswer("", (), "stop", [TOKEN_OF[word]]))
    return hands / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hands", type=int, default=500, help="of one round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for opponent in OPPONENTS:
        rng = random.Random(0)
        rates = [hands_per_s(opponent, options.hands, rng) for _ in range(options.rounds)]
        median, least, most = statistics.median(rates), min(rates), max(rates)
        print(f"{opponent:8} {median:6.0f} hands/s ({least:.0f} to {most:.0f})")


if __name__ == "__main__":
    main()
