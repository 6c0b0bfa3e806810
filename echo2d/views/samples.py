"""Draws groups of the sample log: a prompt, and its answers with their rewards."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from echo2d.views.status import plain_console


def print_groups(lines: Sequence[Mapping[str, Any]]) -> None:
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
