"""A task for measurements: prompts of random tokens, and a reward that costs no time but has variance.

`config` makes the config of a run with this task.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo2d.tasks.base import Prompt

# More tokens than a `StubEnvironment` gives between two turns.
GIVEN_MAX = 64


class StubTask:
    """Prompts have `prompt_tokens` tokens below `vocab_size`; the reward is the parity of an answer's first token."""

    name = "cheap"
    stop_token_ids: Sequence[int] = ()

    def __init__(self, prompt_tokens: int, vocab_size: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._vocab_size = vocab_size

    def prompt(self, index: int) -> Prompt:
        return Prompt(
            tokens=[(index + place) % self._vocab_size for place in range(self._prompt_tokens)]
        )

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:  # noqa: ARG002 - a task's signature
        return float(output[0] % 2)


def config(
    folder: Path,
    task: Mapping[str, int],
    tokens: int,
    policy: Mapping[str, Any],
    dissemination: Mapping[str, Any],
    *,
    turns: int = 1,
) -> str:
    """The config of a run in `folder`, on any port, as TOML. task: the arguments of `StubTask`. tokens: most of an
    answer. policy, dissemination: these tables.

    turns: with more than one, the task is a `StubEnvironment`.
    """
    kind: dict[str, Any] = {"kind": f"{__name__}:{StubTask.__name__}"}
    if turns > 1:
        kind["kind"] = "echo2d_lab.bench.lab.stub_environment:StubEnvironment"
        kind |= {"turns_max": turns, "episode_tokens": turns * (tokens + GIVEN_MAX)}
        task = {**task, "turns": turns}
    tables: dict[str, Mapping[str, Any]] = {
        "run": {"run_dir": str(folder / "coordinator"), "snapshot_root": str(folder / "snapshots")},
        "coordinator": {"port": 0},
        "policy": policy,
        "sampling": {"max_new_tokens": tokens, "vocab_size": task["vocab_size"]},
        "task": {**kind, "processes": 1},
        "task.options": task,
        "dissemination": dissemination,
    }
    return "".join(_written(name, keys) for name, keys in tables.items())


def _written(table: str, keys: Mapping[str, Any]) -> str:
    """A table in TOML; for text, numbers and truth values JSON is valid TOML."""
    return "".join(
        [f"[{table}]\n", *(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())]
    )
