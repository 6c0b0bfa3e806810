"""The same as `counting_taskset`, for verifiers before 0.4: a package with `load_environment`."""

from typing import Any

import verifiers as vf
from datasets import Dataset

TURNS = 4
ROWS = 12


def even(completion: Any, answer: str, **_: Any) -> float:
    """The share of answers whose number of characters is even."""
    if answer == "fails to score":
        raise RuntimeError("this row has a bug")
    answers = [m.content or "" for m in completion if m.role == "assistant"]
    return sum(len(each) % 2 == 0 for each in answers) / len(answers)


class Counting(vf.MultiTurnEnv):  # type: ignore[misc]
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        turn = len(state["trajectory"])
        if state["answer"] == "fails" and turn == 2:
            raise RuntimeError("this row has a bug")
        if turn % 2:
            return [{"role": "user", "content": f"and {turn}?"}]
        return [vf.ToolMessage(role="tool", tool_call_id="c", content="</tool_response>11")]


def answer_of(row: int, fails_every: int) -> str:
    if not fails_every or row % fails_every != fails_every - 1:
        return ""
    return "fails" if row % 2 else "fails to score"


def load_environment(fails_every: int = 0) -> vf.Environment:
    rows = Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"{row}: What is {row} + 1?"}],
                "answer": answer_of(row, fails_every),
            }
            for row in range(ROWS)
        ]
    )
    return Counting(dataset=rows, rubric=vf.Rubric(funcs=[even]), max_turns=TURNS)
