"""The result of a trial as text: `echo2d try` and `echo2d init` print it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_TRACE_LINES = 12


def trial_lines(trial: Mapping[str, Any]) -> Iterator[str]:
    """trial: the object that `echo2d try --json` prints."""
    for task in trial["tasks"]:
        yield from _of_task(task)
    if trial["held_out"]:
        parts = [
            f"{name} {'any number' if count is None else f'{count:,}'}"
            for name, count in trial["held_out"].items()
        ]
        yield f"Questions that are held out: {', '.join(parts)}"
        yield ""
    for word, texts in (
        ("PROBLEM", trial["problems"]),
        ("CAUTION", trial["cautions"]),
        ("NOTE", trial["notes"]),
    ):
        yield from (f"{word}: {text}" for text in texts)
    if not trial["problems"]:
        yield "The run can start: no problem was found."
    yield ""


def _of_task(task: Mapping[str, Any]) -> Iterator[str]:
    questions = "unlimited" if task["questions"] is None else f"{task['questions']:,} in an epoch"
    network = "with the network" if task["network"] else "without the network"
    yield f"Task {task['name']} ({task['kind']}): prompts {questions}; it runs {network}."
    yield f"The longest of the first prompts has {task['longest']:,} tokens."
    if task["judged"]:
        right = task["judged"] - task["worthless"]
        yield f"The scorer gives {right} of the first {task['judged']} expected answers a reward."
    if task["varied"] is not None:
        yield f"In {task['varied']} of {task['groups']} groups of answers the rewards differ."
    yield ""
    for prompt in task["prompts"]:
        place = f" ({prompt['where']})" if prompt["where"] else ""
        tokens = ", ".join(map(str, prompt["tokens"][:8]))
        yield f"A prompt{place}, of {len(prompt['tokens'])} tokens ({tokens}, ...), as the model reads it:"
        yield ""
        yield from _indented(_short(prompt["text"], 600).splitlines())
        yield ""
        if prompt["expected"] is not None:
            yield f"The expected answer: {prompt['expected']}"
            yield ""
        for answer in prompt["answers"]:
            yield from _of_answer(answer)
    if task["printed"]:
        yield "The first lines that the task's code printed:"
        yield ""
        yield from _indented(task["printed"].splitlines()[:_TRACE_LINES])
        yield ""


def _of_answer(answer: Mapping[str, Any]) -> Iterator[str]:
    reward = "no reward" if answer["reward"] is None else f"reward {answer['reward']:g}"
    parts = ", ".join(f"{name} {value:g}" for name, value in answer["parts"].items())
    size = f", {answer['tokens']} tokens" if answer["tokens"] else ""
    turns = f", {answer['turns']} turns" if answer["turns"] > 1 else ""
    ends = "" if answer["finish"] in ("stop", "stop_string") else f", cut off ({answer['finish']})"
    known = f" ({parts})" if parts else ""
    yield f"{reward}{known}{size}{turns}{ends}, scored in {answer['seconds']:.3f} s:"
    yield from _indented(_short(answer["text"], 300).splitlines())
    if answer["failed"]:
        yield f"  ! {answer['failed']}"
        yield from _indented(answer["trace"].splitlines()[-_TRACE_LINES:])
    yield ""


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
