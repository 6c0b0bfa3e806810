"""The table of the delta page: measured bytes on the wire and CPU time of versions. `make bench-delta`.

It runs `echo2d bench delta` on the last two versions of each run of `tools/lab/echo2d_lab/research/rl_updates.py` and,
on machines that can have a laboratory, `echo2d bench broadcast` on the versions of the first run. It keeps the output
in docs/measurements/delta.json, and writes the tables into delta.md beside it. Exit code 1: a figure misses its target.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from echo2d_lab.bench.lab.netlab import why_not
from echo2d_lab.bench.lab.real_versions import versions_of

DOCS = Path(__file__).parents[4] / "docs" / "measurements"
RESULTS, PAGE = DOCS / "delta.json", DOCS / "delta.md"
BEGIN, END = (
    "<!-- table: tools/lab/echo2d_lab/research/delta_table.py -->\n",
    "<!-- end of the table -->\n",
)
WIRE_PER_CHANGED_MAX = {"1e-6": 0.73, "3e-6": 0.59, "1e-5": 0.48, "1e-4": 0.35}  # by learning rate
WIRE_MAX = {"1e-6": 0.005}
PER_MEMCPY_MIN = {"encode": 0.24, "decode": 0.30, "receive": 0.21}  # at the first learning rate
AGAINST = "xor,index-value,zstd"
LAB = "--peers 4 --uplink 100mbit --rtt 50ms --bytes 512MiB --warm-up 2"  # 8 versions: a cold one and 5 that count
LAB_VERSIONS = 8


def last_two(run: Path) -> tuple[Path, Path] | None:
    """The directories of the last two versions; None: there are fewer."""
    versions = versions_of(run)
    return (versions[-2], versions[-1]) if len(versions) >= 2 else None


def measure(*words: str) -> dict[str, Any]:
    print(f"echo2d bench {' '.join(words)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "echo2d", "bench", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def misses(lr: str, result: dict[str, Any]) -> list[str]:
    """The targets that the result misses."""
    wire, most = result["wire_fraction"] / result["changed_fraction"], WIRE_PER_CHANGED_MAX[lr]
    found = [] if result["roundtrip_ok"] else ["not built again byte for byte"]
    found += [f"wire {wire:.3f} of what changed, not {most}"] if wire > most else []
    most = WIRE_MAX.get(lr, 1.0)
    found += (
        [f"wire {result['wire_fraction']:.3%}, not {most:.2%}"]
        if result["wire_fraction"] > most
        else []
    )
    if lr == next(iter(WIRE_PER_CHANGED_MAX)):
        for name, least in PER_MEMCPY_MIN.items():
            speed = result[f"{name}_per_memcpy"]
            found += [f"{name} {speed:.3f} of memcpy, not {least}"] if speed < least else []
    return found


def line(lr: str, result: dict[str, Any]) -> str:
    def speed(name: str) -> str:
        low, high = result["least_most"][f"{name}_per_memcpy"]
        of_memcpy = f"{result[f'{name}_per_memcpy']:.3f} ({low:.3f}-{high:.3f})"
        return f"{result[f'{name}_mb_s']:,.0f}; {of_memcpy}"

    changed, wire = result["changed_fraction"], result["wire_fraction"]
    cells = (
        lr, f"{changed:.2%}", f"**{wire:.3%}**", f"**{result['ratio']:.1f}**",
        f"{wire / changed:.3f} (<= {WIRE_PER_CHANGED_MAX[lr]})",
        *(f"{result['against'][name]['wire_fraction'] / wire:.2f}" for name in AGAINST.split(",")),
        speed("encode"), speed("decode"), speed("receive"),
        f"{result['memcpy_mb_s']:,.0f}", f"{result['peak_scratch_mb']:.0f}",
        f"{result['load'][0]:.1f}", "; ".join(misses(lr, result)) or "-",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def table(results: dict[str, Any]) -> str:
    head = (
        "| lr | words changed | on the wire | factor | wire / changed (must) | XOR + zstd takes | index + value takes "
        "| zstd takes | encode MB/s; / memcpy | decode MB/s; / memcpy | receive MB/s; / memcpy | memcpy MB/s "
        f"| scratch MB | load | misses |\n|{' --- |' * 15}\n"
    )
    rows = "".join(line(lr, results[lr]) for lr in WIRE_PER_CHANGED_MAX if lr in results)
    return head + rows + (lab_table(results["lab"]) if "lab" in results else "")


def lab_table(result: dict[str, Any]) -> str:
    head = (
        "\n| `echo2d bench broadcast` | words changed | wire bytes | encoding | decoding, CPU | T_verify (least-most) "
        f"| may take | reached | load |\n|{' --- |' * 9}\n"
    )
    delta, times = result["delta"], result["t_verify_s"]
    cells = (
        f"`{LAB} --versions RUN`", f"{delta['changed_fraction']:.2%}", f"{result['wire_bytes']:,}",
        f"{delta['encode_s']:.2f} s", f"{delta['decode_cpu_s']:.2f} s",
        f"**{times['median']:.2f} s** ({times['min']:.2f}-{times['max']:.2f})", f"{delta['target_s']:.2f} s",
        "yes" if delta["reached"] else "**no**", f"{result['load'][0]:.1f}",
    )  # fmt: skip
    return f"{head}| {' | '.join(cells)} |\n"


def broken(results: dict[str, Any]) -> bool:
    lab = results.get("lab")
    return any(misses(lr, results[lr]) for lr in WIRE_PER_CHANGED_MAX if lr in results) or not (
        lab is None or lab["delta"]["reached"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "versions", type=Path, help="what tools/lab/echo2d_lab/research/rl_updates.py has made"
    )
    folder = parser.parse_args().versions
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for lr in WIRE_PER_CHANGED_MAX:
        pair = last_two(folder / lr)
        if pair is not None:
            results[lr] = measure("delta", *map(str, pair), "--against", AGAINST)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    run = folder / next(iter(WIRE_PER_CHANGED_MAX))
    if why_not() is None and len(versions_of(run)) >= LAB_VERSIONS:
        results["lab"] = measure("broadcast", *LAB.split(), "--versions", str(run))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table(results)}{END}{rest.partition(END)[2]}")
    print(table(results))
    return 1 if broken(results) else 0


if __name__ == "__main__":
    sys.exit(main())
