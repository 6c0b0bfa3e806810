"""Draws the results of a run: samples, scores of versions, what the audit found, and the last lines of `echo2d run`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from echo2d.client import AsyncCoordinator, Evaluation
from echo2d.core.audit.report import WorkerReport
from echo2d.views.status import bar, plain_console, scored_words

# --- the sample log


def print_groups(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print groups: each prompt, and its answers with their rewards."""
    console = plain_console()
    if not lines:
        console.print("no group is logged yet")
    for line in lines:
        fate = f"step {line['step']}" if line["step"] is not None else f"{line['dropped']}"
        named = " ".join(filter(None, (line["task"], line["row"])))
        console.print(Text.assemble((f"group {line['group']}", "bold"), f"  {fate}  {named}"))
        console.print(Text(_words(line["prompt"]), style="cyan"))
        for each in line["samples"]:
            style = "green" if each["reward"] > 0 else "red"
            parts = " ".join(f"{name}={value:g}" for name, value in each["parts"].items())
            cut = "" if each["finish"] == "stop" else f" [{each['finish']}]"
            console.print(
                Text.assemble(
                    (f"{each['reward']:>8.3g}  ", style),
                    f"v{each['versions'][0]}  {parts}{'  ' if parts else ''}",
                    f"{_words(each['answer'])}{cut}",
                )
            )
        console.print()


def _words(text: str | Sequence[int]) -> str:
    return text if isinstance(text, str) else " ".join(map(str, text))


# --- scores on held-out questions


async def ask_evaluations(find: Callable[[], tuple[str, Path]]) -> list[Evaluation]:
    """All evaluations of a run. OperatorFault: no coordinator answers, or it refuses the token."""
    url, token_file = find()
    async with AsyncCoordinator(url, token_file=token_file, timeout_s=10.0) as client:
        return await client.evaluations()


def print_evaluations(found: Sequence[Evaluation]) -> None:
    """A table for each evaluation, with a bar for each score."""
    console = plain_console()
    if not found:
        console.print("no version is evaluated yet")
    for name in dict.fromkeys(each.name for each in found):
        console.print(_score_table(name, [each for each in found if each.name == name]))


def _score_table(name: str, found: Sequence[Evaluation]) -> Table:
    best = max((each.mean for each in found if each.mean is not None), default=0.0)
    most = max(found, key=lambda each: each.samples)
    # The table shows up to 6 parts of the reward; --json has all of them.
    ks, parts = [k for k in most.pass_at if k != "1"], list(most.parts)[:6]
    table = Table(title=name, title_justify="left", title_style="bold", box=None, pad_edge=False)
    of_both = [*(f"pass@{k}" for k in ks), *parts]
    for head in ("version", "score", "", *of_both, "cut off", "tokens", "questions"):
        table.add_column(head, justify="left" if not head else "right")
    for each in found:
        mean = each.mean or 0.0
        table.add_row(
            str(each.version),
            scored_words(each.mean, each.se),
            bar(max(0.0, mean), max(best, 1.0), 20),
            *(_number(each.pass_at.get(k), ".3f") for k in ks),
            *(_number(each.parts.get(name), ".3f") for name in parts),
            _number(each.truncated, ".1%"),
            _number(each.tokens, ".0f"),
            str(each.rows) if each.rows == each.of else f"{each.rows} of {each.of}",
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# --- what the audit found about workers


def print_reports(reports: Sequence[WorkerReport]) -> None:
    """One line for each worker."""
    console = plain_console()
    if not reports:
        console.print("nothing was audited yet")
        return
    table = Table(box=SIMPLE_HEAD)
    for name in ("worker", "id", "audited", "flagged", "K", "Z", "missed seeds", "verdict"):
        table.add_column(name, justify="left" if name in ("worker", "id", "verdict") else "right")
    for each in reports:
        table.add_row(
            Text(each.name), Text(each.worker), str(each.audited), str(each.flagged),
            f"{each.k:.2g}", f"{each.z:+.2f}", _share(each.misses, each.tokens), Text(each.convicted, style="red"),
        )  # fmt: skip
    console.print(table)


def print_report(report: WorkerReport) -> None:
    """Everything about one worker."""
    console = plain_console()
    console.print(Text.assemble((report.name or "-", "bold"), f"  {report.worker}"))
    if report.convicted:
        at = (
            "" if report.at_s is None else f"{datetime.fromtimestamp(report.at_s, UTC):%F %T} UTC: "
        )
        console.print(Text(f"convicted  {at}{report.convicted}", style="red"))
    flags = ", ".join(f"{name} {count}" for name, count in sorted(report.flags.items()))
    console.print(
        f"audited    {report.audited} answers, {report.flagged} flagged{f' ({flags})' if flags else ''}"
    )
    console.print(
        f"means      K {report.k:.3g}, Z {report.z:+.2f}, missed seeds {_share(report.misses, report.tokens)} of tokens"
    )
    if not report.evidence:
        return
    table = Table(box=SIMPLE_HEAD, title="last flagged answers", title_justify="left")
    for name in ("group", "sample", "versions", "tokens", "K", "Z", "missed", "flags"):
        table.add_column(name, justify="left" if name == "flags" else "right")
    for line in report.evidence:
        table.add_row(
            str(line["group"]), str(line["sample"]), ", ".join(map(str, line["versions"])), str(line["tokens"]),
            f"{line['k']:.3g}", f"{line['z']:+.2f}", "-" if line["misses"] is None else str(line["misses"][0]),
            ", ".join(line["flags"]),
        )  # fmt: skip
    console.print(table)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


# --- the last lines of `echo2d run`


def closing_lines(metrics: Path, run_dir: Path, steps: int) -> Iterator[str]:
    """The closing lines: steps, scores, and where the model is.

    metrics: the learner's metrics.jsonl, which may be missing. steps: the run ends after this many steps.
    """
    step, first, last = 0, dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    with suppress(OSError), metrics.open() as lines:
        for line in lines:
            with suppress(ValueError):
                row = json.loads(line)
                step = max(step, row["step"]) if "loss" in row else step
                for name, score in row.get("eval", {}).items():
                    if score["mean"] is not None:
                        first.setdefault(name, score)
                        last[name] = score
    if not step:
        return
    goes_on = "" if step >= steps else "; the same command continues the run"
    yield f"{step} of {steps} train steps are made{goes_on}"
    for name, score in last.items():
        yield (
            f"held-out {name}: mean reward {first[name]['mean']:.3f} at version {first[name]['version']}, "
            f"{score['mean']:.3f} at version {score['version']} (standard error {score['se']:.3f}, "
            f"{score['rows']} questions)"
        )
    yield f"the model: echo2d keep export --run-dir {run_dir} --last trained"
