"""The programs and figures of docs/guide/rewards.md, unchanged."""

import asyncio
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from echo2d.config.tables import read_table
from echo2d.config.tasks import TaskTable
from echo2d.learner.config import LearnerConfig, Recipe
from echo2d.learner.objective.hooks import advantages_of, loss_of
from echo2d.learner.objective.token_weights import WeightInputs
from echo2d.tasks.base import Answer, Reward, Unjudged
from echo2d.tasks.rows.task import RowsTask
from echo2d.tasks.scorers.base import Expected, load_scorer
from tests.support.paths import REPO

PAGE = (REPO / "docs" / "guide" / "rewards.md").read_text()
PROGRAMS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
ROW = {"question": "2 + 2", "result": "4", "level": 1, "tokens_max": 20}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, program in PROGRAMS.items():
        (tmp_path / name).write_text(program)
    monkeypatch.syspath_prepend(tmp_path)


def tables() -> Iterator[dict[str, Any]]:
    for text in re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        yield tomllib.loads(text)


def test_the_scorer_of_the_page_has_eight_lines_and_scores() -> None:
    lines = [line for line in PROGRAMS["judge.py"].splitlines() if line]
    assert len(lines) <= 8
    score = load_scorer("judge:score", {})
    assert score(Answer("It is 4 ", "stop", 5), Expected("4", ROW)) == Reward(
        1.1, {"right": 1.0, "short": 1.0}
    )
    assert score(Answer("five", "length", 50), Expected("4", ROW)).value == 0.0


async def test_the_judge_of_the_page_is_asked_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    async def judged(request: web.Request) -> web.Response:
        said = await request.json()
        if said["expected"] == "4":
            return web.json_response({"reward": float(said["answer"] == "4")})
        return web.Response(status=404)

    app = web.Application()
    app.router.add_post("/judge", judged)
    async with TestServer(app) as server:
        monkeypatch.setenv("JUDGE_URL", str(server.make_url("/judge")))
        score = load_scorer("far_judge:score", {})
        assert asyncio.iscoroutinefunction(score)
        assert await score(Answer("4", "stop", 1), Expected("4")) == 1.0
        with pytest.raises(Unjudged):
            await score(Answer("4", "stop", 1), Expected("5"))


def test_the_advantages_and_losses_of_the_page_are_right() -> None:
    own = advantages_of(Recipe(advantages="losses:ranks"))
    (found,) = own([np.array([0.1, 0.7, 0.4], np.float32)])
    assert found.tolist() == [-1.0, 1.0, 0.0]
    over_batch = advantages_of(Recipe(advantages="batches:whitened"))
    groups = [np.array(each, np.float32) for each in ([1.0, 0.0], [0.0, 0.0])]
    found = np.concatenate(over_batch(groups))
    assert found == pytest.approx([2**0.5, -(2**0.5), 0.0, 0.0], rel=1e-3)
    loss = loss_of(Recipe(loss="losses:clipped"))
    assert loss is not None
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    rollout = torch.tensor([-1.0, -1.0, -2.0])
    advantages, staleness = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0, 1, 0])
    each = loss(WeightInputs(logprobs, rollout, advantages, staleness, torch.zeros(3).long()))
    assert each.tolist() == pytest.approx([-1.0, 0.5, -1.2])
    (gradient,) = torch.autograd.grad(each.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-1.0, 0.5, 0.0]), "the third is clipped"


def test_the_tables_of_the_page_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_URL", "http://localhost")
    (tmp_path / "sums.jsonl").write_text('{"question": "2 + 2", "result": "4", "level": 1}\n')
    monkeypatch.chdir(tmp_path)
    read = list(tables())
    for task in (each["task"] for each in read if "task" in each):
        table = read_table(TaskTable, task, tmp_path)
        assert RowsTask(**table.options).prompt(0).secret is not None
    keys = {field.name for field in fields(LearnerConfig)}
    (learner,) = [each["learner"] for each in read if "learner" in each]
    assert learner.keys() <= keys


def test_the_fields_and_limits_of_the_page_are_those_of_the_code() -> None:
    inputs = re.findall(r"^\| `(\w+_n)` \|", PAGE, re.MULTILINE)
    assert inputs == [field.name for field in fields(WeightInputs)]
    told = re.findall(r"^\| (?:`Answer`|`Expected`)? ?\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert told == [field.name for each in (Answer, Expected) for field in fields(each)]
    limits = re.findall(r"^\| `task\.(\w+)` \| `(.+?)` \|", PAGE, re.MULTILINE)
    assert len(limits) == 6
    table = TaskTable(kind="rows")
    assert [(name, str(getattr(table, name))) for name, _ in limits] == limits
