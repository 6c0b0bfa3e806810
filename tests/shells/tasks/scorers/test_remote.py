"""The scorer `remote`, with a real server as judge: its verdicts count, and a busy judge is asked again."""

import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.errors import OperatorFault
from echo2d.tasks.base import Answer, Reward
from echo2d.tasks.pool import Limits, Score, ScoreCall, TaskPool, TextSettings
from echo2d.tasks.process import TaskFailed
from echo2d.tasks.scorers import remote as scorer
from echo2d.tasks.scorers.base import Expected, load_scorer
from echo2d.tasks.scorers.remote import REPLY_BYTES_MAX, JudgeError
from tests.support.texts import bytes_tokenizer, write_text_model

ANSWER, EXPECTED = Answer("41", "stop", 3), Expected("42", {"question": "?", "level": 3})


class JudgeServer:
    """Answers with what stands in `replies`, the last one again and again."""

    def __init__(self) -> None:
        self.replies: list[tuple[int, str]] = [(200, '{"reward": 0.25}')]
        self.asked: list[tuple[dict[str, Any], str]] = []
        self.headers: dict[str, str] = {}
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((await request.json(), request.headers.get("Authorization", "")))
        status, text = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return web.Response(status=status, text=text, headers=self.headers)


@pytest.fixture
async def judge(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JudgeServer]:
    monkeypatch.setattr(scorer, "_WAIT_S_MIN", 0.001)
    monkeypatch.setattr(scorer, "_WAIT_S_MAX", 0.01)
    server, app = JudgeServer(), web.Application()
    app.router.add_post("/judge", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/judge"
    yield server
    await runner.cleanup()


async def ask(judge: JudgeServer, **options: Any) -> Reward:
    found = load_scorer("remote", {"url": judge.url, **options})(ANSWER, EXPECTED)
    reward = await found
    assert isinstance(reward, Reward)
    return reward


async def test_the_judge_gets_answer_expectation_and_row(
    judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge.replies = [(200, '{"reward": 0.5, "parts": {"form": 1}}')]
    assert await ask(judge, key_variable="JUDGE_KEY") == Reward(0.5, {"form": 1.0})
    ((question, key),) = judge.asked
    assert question == {
        "answer": "41",
        "finish": "stop",
        "tokens": 3,
        "expected": "42",
        "row": {"question": "?", "level": 3},
    }
    assert key == "Bearer secret"


async def test_a_busy_judge_is_asked_again(judge: JudgeServer) -> None:
    judge.headers = {"Retry-After": "3600"}  # waits are bounded
    judge.replies = [(503, "later"), (529, "later"), (429, "later"), (200, '{"reward": 1}')]
    assert await ask(judge) == Reward(1.0)
    assert len(judge.asked) == 4


async def test_a_judge_that_stays_away_gives_an_error(judge: JudgeServer) -> None:
    judge.replies = [(503, "still busy")]
    with pytest.raises(JudgeError, match=r"the judge at 127\.0\.0\.1:\d+ said 503$"):
        await ask(judge, tries=3)
    assert len(judge.asked) == 3
    judge.url = "http://127.0.0.1:9/judge"
    with pytest.raises(JudgeError, match="said nothing"):
        await ask(judge, tries=2)


@pytest.mark.parametrize(
    ("status", "text", "complaint"),
    [
        (400, "no such row", "said 400$"),
        (302, "elsewhere", "said 302"),
        (501, "no", "said 501$"),
        (200, "yes", "something else"),
        (200, "[1]", "something else"),
        (200, '{"reward": null}', "something else"),
        (200, '{"reward": 1, "parts": [1]}', "something else"),
        (200, "x" * (REPLY_BYTES_MAX + 1), "more than 65536 bytes"),
    ],
)
async def test_an_answer_that_the_judge_refuses_or_garbles_gives_an_error_at_once(
    judge: JudgeServer, status: int, text: str, complaint: str
) -> None:
    judge.replies = [(status, text)]
    with pytest.raises(JudgeError, match=complaint):
        await ask(judge)
    assert len(judge.asked) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"url": "judge.example.org"}, "expected http:// or https://"),
        ({"url": "http://me:secret@x"}, "no password"),
        ({"url": "http://x", "tries": 0}, "tries: expected at least 1; found 0"),
        ({"url": "http://x", "key_variable": "NOT_SET"}, "the variable NOT_SET is not set"),
        ({}, "url"),
    ],
)
def test_wrong_options_of_the_judge_are_reported(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OperatorFault, match=complaint):
        load_scorer("remote", options)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """Where a task process of another user may read, which `tmp_path` is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        row = json.dumps({"prompt": "?", "answer": "42"})
        (Path(name) / "rows.jsonl").write_text(f"{row}\n")
        write_text_model(Path(name) / "model")
        yield Path(name)


async def test_rows_are_judged_from_a_confined_process(
    judge: JudgeServer, open_place: Path
) -> None:
    judge.replies = [(200, '{"reward": 0.5}'), (400, "no")]
    rows, model = str(open_place / "rows.jsonl"), TextSettings(str(open_place / "model"))
    options = {"files": rows, "scorer": "remote", "scorer_options": {"url": judge.url}}
    call = ScoreCall(0, pack_tokens([*bytes_tokenizer().encode("41").ids, 0]), "stop")
    limits = Limits(network=True)
    async with TaskPool("rows", options, processes=1, limits=limits, texts=model) as pool:
        first, second = [[score async for score in pool.rewards([call])] for _ in range(2)]
    assert first == [Score(0.5, {})]
    (failed,) = second
    assert isinstance(failed, TaskFailed)
    assert failed.kind == "error"
    assert "said 400" in failed.reason
