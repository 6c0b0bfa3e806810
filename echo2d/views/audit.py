"""Draws what the audit of a run found about its workers."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from echo2d.core.audit.report import WorkerReport
from echo2d.views.status import plain_console


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
