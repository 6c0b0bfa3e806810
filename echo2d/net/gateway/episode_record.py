"""An episode as the run has it, for the agent that plays it, and how the agent's own picture differs.

The run's record is what is trained on. An agent that saw another episode must not say what this one is worth.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from echo2d.core.protocol.trajectory import unpack_tokens
from echo2d.core.work.events import StepEnvironment


def branches_of(order: StepEnvironment) -> list[dict[str, Any]]:
    """The branches of an episode: whole token ids, and which of them were written, by which version."""
    output, prompt = order.output, unpack_tokens(order.prompt).tolist()
    tokens = unpack_tokens(output.tokens).tolist()
    found = []
    for start, end in pairwise((0, *output.branches, output.length)):
        shift = len(prompt) - start
        spans = [span for span in output.spans if start <= span.start < end]
        written: list[list[int]] = []
        for span in spans:
            if written and written[-1][1] == span.start + shift:
                written[-1][1] = span.end + shift
            else:
                written.append([span.start + shift, span.end + shift])
        versions = [[span.start + shift, span.end + shift, span.version] for span in spans]
        ids = prompt + tokens[start:end]
        found.append({"token_ids": ids, "written": written, "versions": versions})
    return found


def difference(order: StepEnvironment, trace: Sequence[tuple[list[int], list[list[int]]]]) -> str:
    """What an agent saw otherwise than the run has it; empty: nothing."""
    branches = branches_of(order)
    if len(trace) != len(branches):
        return f"{len(trace)} branches, where the run has {len(branches)}"
    for number, ((ids, written), branch) in enumerate(zip(trace, branches, strict=True)):
        if ids != branch["token_ids"]:
            return f"branch {number} has other tokens"
        if written != branch["written"]:
            return f"branch {number}: other tokens were written"
    return ""
