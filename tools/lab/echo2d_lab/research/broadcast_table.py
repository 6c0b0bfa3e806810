"""Measures the table of the broadcast page: every scenario for which echo2d promises something. `make bench`.

Runs `echo2d bench broadcast` with the arguments of each row (root, a quiet machine, half an hour), keeps what it prints
in docs/measurements/broadcast.json, and writes the table into broadcast.md beside it. With `--half-rates`, a row that
used nearly all of the cores is measured a second time, at half the rates. A row that is in the JSON file already is
measured again only if it is named. Exit code 1: a requested row misses its target.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from echo2d_lab.bench.lab.cpu import BOUND

DOCS = Path(__file__).parents[4] / "docs" / "measurements"
RESULTS, PAGE = DOCS / "broadcast.json", DOCS / "broadcast.md"
BEGIN, END = (
    "<!-- table: tools/lab/echo2d_lab/research/broadcast_table.py -->\n",
    "<!-- end of the table -->\n",
)
LATE_S = 4.0  # a partition may cost this much more than the survivors' bound
COLUMNS = (
    "row", "scenario", "must", "T_verify / bound, warm (least-most)", "cold", "at half the rates",
    "libtorrent warm (over ours warm)", "libtorrent cold (over ours cold)", "predicted", "simulated", "seed copies",
    "cores (emulator + daemons)", "load before", "reached", "`echo2d bench broadcast`",
)  # fmt: skip


class Row(NamedTuple):
    """One scenario and its targets. must: the largest ratio of the median T_verify to the bound. must_ahead: libtorrent
    takes at least this many times as long in the same run, warm over warm and cold over cold."""

    number: str
    what: str
    arguments: str
    must: float | None = None
    must_cold: float | None = None
    must_copies: float | None = None
    must_ahead: float | None = None


def mixed(number: str, what: str, uplinks: str, size: str = "100MiB") -> Row:
    arguments = f"--tls --uplinks {uplinks} --bytes {size} --rtt 20ms --against libtorrent"
    return Row(number, what, arguments, 1.20, 1.5, must_ahead=1.4)


ROWS = (
    Row(
        "1, 9", "8 peers, all 100 Mbit/s", "--tls --against star,libtorrent,aria2", 1.12, 1.40, 1.1
    ),
    Row("9", "row 1 beside HTTP", "--tls --against relay-tree,object-store", 1.12, 1.40, 1.1),
    Row("2", "the same, 0.1 % loss", "--tls --loss 0.001", 1.22),
    Row("3", "the same, 256 MiB", "--tls --bytes 256MiB", 1.10),
    mixed("4", "mixed uplinks", "320,320,160,160,80,80,40,40"),
    mixed("4", "uplinks of volunteers", "200,250,120,90,60,60,25,10", "96MiB"),
    # Drawn once at random (`tests/shells/sim/test_rates.py` plays the same ones).
    mixed("4", "uplinks drawn at random", "320,57,33,163,25,112,65,24"),
    mixed("4", "uplinks drawn at random", "320,102,23,81,25,27,78,286"),
    mixed("4", "uplinks drawn at random", "320,30,41,151,423,128,72,463"),
    Row("5", "one uplink of 5 Mbit/s", "--tls --uplinks 100,5,100,100,100,100,100,100,100", 1.18),
    Row("6", "fastest relay killed", "--tls --kill 0.5", 1.25),
    Row("6", "fastest relay silent", "--tls --partition 0.5"),
    Row("7", "a relay spoils every 20th frame", "--tls --corrupt 0.05", 1.26),
    Row("8", "half of the peers not dialable", "--tls --undialable 0.5", 1.19),
    Row("11", "uplinks swing by 30 % every 2 s", "--tls --swing 0.3", 1.3),
    Row(
        "12",
        "all troubles: loss, NAT, a relay killed, one that spoils frames",
        "--tls --loss 0.001 --kill 0.5 --corrupt 0.05 --undialable 0.5 --rounds 10",
        1.8,
    ),
)


def measure(rows: list[Row], *, slower: bool) -> dict[str, dict[str, Any]]:
    """slower: measure rows again at half the rates if the cores were the limit."""
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for row in rows:
        result = measured(row, row.arguments, results)
        if slower and is_bound(result):
            measured(row, half(row), results)
    return results


def measured(row: Row, arguments: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if arguments not in results:
        command = [
            sys.executable,
            "-m",
            "echo2d",
            "bench",
            "broadcast",
            "--json",
            *arguments.split(),
        ]
        print(f"row {row.number}: echo2d bench broadcast {arguments}", file=sys.stderr, flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[arguments] = json.loads(done.stdout)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return results[arguments]


def half(row: Row) -> str:
    """The row's arguments at half the rates, without rivals."""
    words = row.arguments.split()
    if "--against" in words:
        at = words.index("--against")
        del words[at : at + 2]
    return " ".join([*words, "--rates 0.5"])


def is_bound(result: dict[str, Any]) -> bool:
    """Whether the cores were the limit."""
    return bool(result["cpu"]["everything"] > BOUND)


def reached(row: Row, result: dict[str, Any]) -> bool:
    must = row.must if row.must is not None else 1 + LATE_S / result["bound_s"]
    pairs = [
        (result["ratio"], must),
        (result["ratio_cold"], row.must_cold),
        (result["seed_copies"], row.must_copies),
    ]
    whole = all(each["verified"] == each["survivors"] for each in result["rounds"])
    far = row.must_ahead is None or all(each >= row.must_ahead for each in ahead(result))
    return whole and far and all(limit is None or found <= limit for found, limit in pairs)


def ahead(result: dict[str, Any]) -> list[float]:
    """How many times as long libtorrent takes: warm over warm, unless that was not measured, and cold over cold."""
    found = result["against"]["libtorrent"]
    return [found[name] for name in ("over_ours", "over_ours_cold") if found[name] is not None]


def line(row: Row, result: dict[str, Any], slower: dict[str, Any] | None) -> str:
    must = f"<= {row.must}" if row.must is not None else f"<= bound + {LATE_S:g} s"
    must += "" if row.must_cold is None else f", cold <= {row.must_cold}"
    must += "" if row.must_copies is None else f", copies <= {row.must_copies}"
    must += "" if row.must_ahead is None else f", libtorrent >= {row.must_ahead} x ours"
    bound_s = result["bound_s"]
    cells = (
        row.number, row.what, must, ratio(result, "**"), f"{result['ratio_cold']:.2f}",
        "" if slower is None else ratio(slower), *libtorrent(result), f"{result['predicted_s'] / bound_s:.2f}",
        "" if result["simulated_s"] is None else f"{result['simulated_s'] / bound_s:.2f}",
        f"{result['seed_copies']:.2f}", cores(result["cpu"]), f"{result['load'][0]:.1f}",
        "yes" if reached(row, result) else "**no**", f"`{row.arguments}`",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def ratio(result: dict[str, Any], strong: str = "") -> str:
    bound_s, times = result["bound_s"], result["t_verify_s"]
    return f"{strong}{result['ratio']:.2f}{strong} ({times['min'] / bound_s:.2f}-{times['max'] / bound_s:.2f})"


def libtorrent(result: dict[str, Any]) -> tuple[str, str]:
    """Its ratio to the bound in the same run, and to ours: warm, cold."""
    if "libtorrent" not in result["against"]:
        return "", ""
    found = result["against"]["libtorrent"]
    return (
        beside(found["ratio"], found["over_ours"]),
        beside(found["ratio_cold"], found["over_ours_cold"]),
    )


def beside(ratio_found: float | None, over_ours: float | None) -> str:
    return "not measured" if ratio_found is None else f"{ratio_found:.2f} ({over_ours:.2f} x)"


def rival_words(name: str, found: dict[str, Any]) -> str:
    warm, cold = (
        beside(found["ratio"], found["over_ours"]),
        beside(found["ratio_cold"], found["over_ours_cold"]),
    )
    return (
        f"{name} warm {warm}, cold {cold}, seed copies {found['seed_copies']:.2f}, "
        f"cores {cores(found['cpu'])}"
    )


def cores(cpu: dict[str, float]) -> str:
    text = f"{cpu['everything']:.0%} ({cpu['emulator']:.0%} + {cpu['programs']:.0%})"
    return f"**{text}**" if cpu["everything"] > BOUND else text


def table(results: dict[str, dict[str, Any]]) -> str:
    head = f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|\n"
    rows = "".join(
        line(row, results[row.arguments], results.get(half(row)))
        for row in ROWS
        if row.arguments in results
    )
    beside_row_1 = [results.get(row.arguments, {}).get("against", {}) for row in ROWS[:2]]
    words = [rival_words(name, each) for found in beside_row_1 for name, each in found.items()]
    return (
        f"{head}{rows}\nIn the laboratory of row 1, in the same rounds: {'; '.join(words)}.\n"
        if words
        else head + rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "rows",
        nargs="*",
        help="numbers of the rows to measure again; if left out, all missing rows are measured",
    )
    parser.add_argument(
        "--half-rates",
        action="store_true",
        help="also measure rows that used nearly all of the cores at half the rates",
    )
    options = parser.parse_args()
    wanted = set(options.rows)
    chosen = [row for row in ROWS if not wanted or wanted & set(row.number.split(", "))]
    if wanted and RESULTS.exists():
        again = {arguments for row in chosen for arguments in (row.arguments, half(row))}
        kept = {
            key: each for key, each in json.loads(RESULTS.read_text()).items() if key not in again
        }
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    results = measure(chosen, slower=options.half_rates)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table(results)}{END}{rest.partition(END)[2]}")
    print(table(results))
    return 0 if all(reached(row, results[row.arguments]) for row in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
