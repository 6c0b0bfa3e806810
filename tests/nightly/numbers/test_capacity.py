"""The numbers of the capacity page that `echo2d plan` and `simulate` give, and one price of each kind of answer.

Not here: the numbers of `cost_table` and `pool_table`, which take longer; `make nightly-pools` checks some of the
latter.
"""

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest

from echo2d.plan.fleet.spec import load_fleet
from echo2d_lab.research import usd_to_accuracy
from echo2d_lab.research.artefacts import read
from tests.support.page_numbers import NUMBER, PageNumbers, missing, moved, page_text, run

PAGE = "measurements/capacity.md"
NOTHING: Mapping[str, str] = {}


def by_seed(
    command: str,
    text: str,
    reads: tuple[str, ...],
    more: str = "",
    changed: Mapping[str, str] = NOTHING,
) -> Iterator[PageNumbers]:
    """A row for rng_seed 0 and one for 1: each cell has both numbers, as in "{9.44}, {9.39}"."""
    for seed in (0, 1):
        numbers = count()
        quoted = NUMBER.sub(
            lambda found: found[0] if next(numbers) % 2 == seed else found[1],  # noqa: B023
            text,
        )
        yield PageNumbers(
            PAGE, command, quoted, reads, f"{more} --set simulate.rng_seed={seed}", changed
        )


# --- a day of 500 workers

DAY = "echo2d simulate scenarios/fleet-500.toml --json"
PLANNED = "(`echo2d plan scenarios/fleet-500.toml`, which has no churn, and no spot box whose price has fallen)"
FLEET = [
    PageNumbers(
        PAGE,
        DAY,
        "| train steps, trajectories trained on | {473}, {180,730} | | trajectories dropped | {1,275}: 0.7 % | "
        "| bubble, without the first 10 steps; as planned | {17.5} %; 12.2 % | | largest staleness, S = 4 | {4} | "
        f"| usd a step; as planned | {{3.03}}; 3.11 {PLANNED} | | T_bcast; as planned | {{314}} s; 176 s | "
        "| voluntary changes of the active set | {30} |",
        ("steps", "trajectories/trained", "trajectories/dropped", "bubble * 100", "max_staleness",
         "usd_per_step", "t_bcast_s", "activation_changes"),
    ),
    PageNumbers(
        PAGE,
        "echo2d plan scenarios/fleet-500.toml",
        "as planned | 17.5 %; {12.2} % | | largest staleness, S = 4 | 4 | "
        f"| usd a step; as planned | 3.03; {{3.11}} {PLANNED} | | T_bcast; as planned | 314 s; {{176}} s |",
        ("bubble * 100", "usd_per_step", "t_bcast_s"),
    ),
]  # fmt: skip

# --- when the prediction is wrong

WRONG = "echo2d simulate scenarios/mix-rented.toml --set simulate.hours=48"
RENTED = "echo2d plan scenarios/mix-rented.toml"
PRICE = ("usd_per_step", "bubble * 100")
WRONGS = (
    ("simulate.rng_seed=0", "", "9.37", "0.2", "9.53", "1.3", "19"),
    ("simulate.group_size=1", "", "9.36", "0.0", "9.53", "0.1", "19"),
    ("simulate.group_size=16", "", "9.39", "0.3", "9.53", "0.1", "19"),
    ("policy.t_gen_s=1200", ": answers of 20 minutes", "9.64", "3.0", "9.91", "2.4", "19"),
    (
        "policy.no_variance=0.4",
        ": of 40 % of the groups all rewards are the same",
        "11.44",
        "0.0",
        "12.29",
        "8.9",
        "30",
    ),
)


def wrong() -> Iterator[PageNumbers]:
    for change, said, usd, bubble, played, waited, active in WRONGS:
        more = f"--set {change}"
        yield PageNumbers(
            PAGE, RENTED, f"| `{change}`{said} | {{{usd}}} | {{{bubble}}} % |", PRICE, more
        )
        yield PageNumbers(
            PAGE,
            WRONG,
            f"| `{change}`{said} | {usd} | {bubble} % | {{{played}}} | {{{waited}}} % | {{{active}}} |",
            (*PRICE, "workers/0/count"),
            more,
        )


# --- answers of very different lengths

LENGTHS = "echo2d simulate scenarios/mix-lengths.toml"
WAITED = ("group_s/p95", "group_or_drop_s/p95", "bubble * 100", "usd_per_step")
MOVED = "--set policy.group_patience=0"
STAYS = f"{MOVED} --set policy.move_stragglers=false"
SHARES = {
    "0": (
        (
            "| 0 | samples, where they began | {1,288}, {1,413} | {1,562}, {1,700} | 11.4 %, 9.5 % | {4.1} %, {11.2} % "
            "| {3.47}, {3.53} |"
        ),
        "| | moved | {957}, {1,009} | {1,102}, {1,146} | 8.2 %, 7.4 % | {0.2} %, {0.2} % | {3.35}, {3.33} |",
        (
            "| | moved, with patience | {1,096}, {1,096} | {1,102}, {1,102} | 1.9 %, 1.8 % | {0.2} %, {0.2} % "
            "| {3.28}, {3.32} |"
        ),
    ),
    "0.5": (
        (
            "| 0.5 | samples, where they began | {1,104}, {1,274} | {1,381}, {1,586} | 10.4 %, 8.0 % "
            "| {1.6} %, {9.6} % | {3.36}, {3.45} |"
        ),
        "| | moved | {864}, {1,069} | {1,046}, {1,285} | 5.5 %, 2.8 % | {0.2} %, {6.4} % | {3.33}, {3.35} |",
        (
            "| | moved, with patience | {998}, {1,027} | {1,053}, {1,097} | 2.2 %, 2.3 % | {0.2} %, {0.2} % "
            "| {3.31}, {3.29} |"
        ),
    ),
}


def lengths() -> Iterator[PageNumbers]:
    for share, texts in SHARES.items():
        for text, keys in zip(texts, (STAYS, MOVED, ""), strict=True):
            more = f"--set simulate.prompt_share={share} {keys}"
            yield from by_seed(LENGTHS, text, WAITED, more)


# --- a learner on a spot machine, and faster rollouts

SPOT = "echo2d plan scenarios/mix-spot-learner.toml"
PLAYED, TEN_DAYS = "echo2d simulate scenarios/mix-rented.toml", "--set simulate.hours=240"
SPOT_PLAYED = f"echo2d simulate scenarios/mix-spot-learner.toml {TEN_DAYS}"
RATE = "trajectories_per_h = "
# From the fastest: what is written must not be found again.
FASTER = {f"{RATE}{rate:g}": f"{RATE}{1.5 * rate:g}" for rate in (150, 75, 45, 30)}
BARE = str.maketrans("", "", "{}")
SAVED = ("usd_per_step", "break_even/saving * -100")
FASTER_LEVER = "1.5 times as many trajectories from each box (quantized or speculative rollouts)"
LEVERS: tuple[tuple[str, str, str, Mapping[str, str], str, str], ...] = (
    (RENTED, PLAYED, "none (`mix-rented.toml`)", NOTHING, "{9.37} | {-23.8} %", "{9.44}, {9.39}"),
    (RENTED, PLAYED, FASTER_LEVER, FASTER, "{8.40} | {-31.7} %", "{8.42}, {8.43}"),
    (SPOT, SPOT_PLAYED, "the learner on spot", NOTHING, "{6.71} | {-45.5} %", "{6.71}, {6.69}"),
    (SPOT, SPOT_PLAYED, "both", FASTER, "{5.70} | {-53.7} %", "{5.72}, {5.78}"),
)


def levers() -> Iterator[PageNumbers]:
    for plan, play, lever, changed, planned, played in LEVERS:
        yield PageNumbers(PAGE, plan, f"| {lever} | {planned} |", SAVED, changed=changed)
        text = f"| {lever} | {planned.translate(BARE)} | {played} |"
        yield from by_seed(play, text, ("usd_per_step",), TEN_DAYS, changed)
    yield PageNumbers(
        PAGE,
        "echo2d plan scenarios/mix-rollout-heavy.toml",
        "says {15.22} usd against {24.61}: {-38.1} %.",
        ("usd_per_step", "break_even/centralized_usd_per_step", "break_even/saving * -100"),
    )


# --- what the learner's host sends

LINK = "echo2d simulate scenarios/mix-rented.toml --set learner.usd_per_gb_up=0.09 [--no-delta]"
SENT = ("seed_copies", "egress_gb", "egress_gb * 0.09", "t_bcast_s", "bubble * 100")
FREE = "--set learner.usd_per_gb_up=0"
SENDS = (
    ("deltas, without the price", FREE, "{12.5} | {212} GB | {19.08} usd | {9.3} s | {0.1} %"),
    ("deltas", "", "{1.0} | {17} GB | {1.53} usd | {9.6} s | {0.1} %"),
    ("whole versions, without the price", f"{FREE} --no-delta", "{12.5} | {10,600} GB | {954} usd | {218} s | {0.1} %"),
    ("whole versions", "--no-delta", "{1.0} | {848} GB | {76} usd | {231} s | {0.1} %"),
)  # fmt: skip


def sends() -> Iterator[PageNumbers]:
    # The page has the option in brackets.
    command = LINK.removesuffix(" [--no-delta]")
    for what, more, text in SENDS:
        yield PageNumbers(PAGE, command, f"| {what} | {text} |", SENT, more)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "row",
    [*FLEET, *wrong(), *lengths(), *levers(), *sends()],
    ids=lambda row: row.text[:60] + row.more,
)
def test_a_number_of_the_capacity_page_has_not_moved(row: PageNumbers, tmp_path: Path) -> None:
    assert missing(row, page_text(row.page)) == []
    assert moved(row, run(row, tmp_path)) == []


# --- dollars to an accuracy

ACCURACY = "python -m echo2d_lab.research.usd_to_accuracy"


@pytest.mark.parametrize(
    ("bound", "answer_s", "seed"), [(3, 300.0, 0), (1, 300.0, 1), (1, 1200.0, 2)]
)
def test_a_recorded_price_of_a_step_equals_that_of_a_run_today(
    bound: int, answer_s: float, seed: int
) -> None:
    """Remove docs/figures/usd_by_staleness.csv and play it again, or the change that moved it is wrong."""
    fleet = load_fleet(usd_to_accuracy.SCENARIO)
    (recorded,) = [
        row
        for row in read(usd_to_accuracy.PRICES)
        if (int(row["S"]), float(row["answer_s"]), int(row["seed"])) == (bound, answer_s, seed)
    ]
    played = usd_to_accuracy.play(fleet, bound, answer_s, seed)
    assert float(recorded["usd_per_step"]) == pytest.approx(played["usd_per_step"], rel=1e-4)
