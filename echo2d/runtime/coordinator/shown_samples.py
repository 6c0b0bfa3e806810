"""The samples that the page and the boards show: the worst and the best groups of each of the newest steps.

Only these are kept in memory; `echo2d samples` reads all samples from the sample log.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from echo2d.core.base.bounded_dict import keep_newest

STEPS_KEPT = 32
# Of each step, this many groups with the lowest rewards are shown, and as many with the highest. The same holds
# for the samples of each group.
ENDS_SHOWN = 4
CHARS_MAX = 2000  # of a prompt or an answer
SHOWN_TOKENS_MAX = 400  # where there is no tokenizer

Line = Mapping[str, Any]


class ShownSamples:
    """See the module docstring. A line is one of the sample log."""

    def __init__(self) -> None:
        self._steps: dict[int, list[Line]] = {}

    def add(self, lines: Iterable[Line]) -> None:
        """Take groups that were logged; groups on which no step trained are left out."""
        for line in lines:
            if line["step"] is not None:
                groups = [*self._steps.get(line["step"], ()), _shortened(line)]
                self._steps[line["step"]] = _ends(groups, _mean)
        keep_newest(self._steps, STEPS_KEPT)

    def of(self, step: int | None) -> dict[str, Any]:
        """The groups of a step, the worst first; None: of the newest step."""
        if step is None and self._steps:
            step = max(self._steps)
        groups = [] if step is None else self._steps.get(step, [])
        return {"step": step, "groups": groups}


def mean_reward(line: Line) -> float:
    rewards = [each["reward"] for each in line["samples"]]
    return float(sum([reward / len(rewards) for reward in rewards]))


def _shortened(line: Line) -> Line:
    samples = _ends(line["samples"], _reward)
    return {
        **line,
        "prompt": _cut(line["prompt"]),
        "mean": mean_reward(line),
        "samples": [{**sample, "answer": _cut(sample["answer"])} for sample in samples],
    }


def _mean(line: Line) -> float:
    return float(line["mean"])


def _reward(sample: Line) -> float:
    return float(sample["reward"])


def _ends(found: Sequence[Line], reward: Callable[[Line], float]) -> list[Line]:
    """The lines with the lowest and those with the highest rewards, in order."""
    ordered = sorted(found, key=reward)
    return (
        ordered if len(ordered) <= 2 * ENDS_SHOWN else ordered[:ENDS_SHOWN] + ordered[-ENDS_SHOWN:]
    )


def _cut(words: str | list[int]) -> str | list[int]:
    if isinstance(words, str):
        return words if len(words) <= CHARS_MAX else words[:CHARS_MAX] + "..."
    return words[:SHOWN_TOKENS_MAX]
