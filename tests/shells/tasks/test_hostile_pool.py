"""A task process with hostile answers: the pool gives a valid value, or a failure in one short line."""

import asyncio
import math
import random
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from echo2d.core.protocol.trajectory import pack_tokens
from echo2d.errors import OperatorFault
from echo2d.tasks.pool import Score, ScoreCall, TaskPool
from echo2d.tasks.pool_child import HEADER, TASK_MESSAGE_BYTES_MAX, TASK_REASON_CHARS_MAX, pack
from echo2d.tasks.process import Child, TaskFailed, TaskLink, TaskProcess
from tests.support.fuzz import (
    INTERESTING_FLOATS,
    INTERESTING_INTS,
    INTERESTING_TEXTS,
    Fuzz,
    damaged,
)
from tests.support.nasty_task import index_of

TIMEOUT_S = 5.0
FINE = ScoreCall(index_of("fine"), pack_tokens([1]))
NASTY = "tests.support.nasty_task:NastyTask"
KINDS: tuple[type, ...] = (list, str, bytes, int, float, dict, bool, type(None), TaskFailed)


def a_value(rng: random.Random, depth: int = 0) -> Any:
    scalars = (
        None,
        True,
        rng.choice(INTERESTING_INTS),
        rng.choice(INTERESTING_FLOATS),
        rng.choice(INTERESTING_TEXTS),
    )
    if depth > 3 or rng.random() < 0.5:
        return rng.choice((*scalars, rng.randbytes(5)))
    if rng.random() < 0.3:
        return {str(key): a_value(rng, depth + 1) for key in range(rng.randrange(3))}
    return [a_value(rng, depth + 1) for _ in range(rng.randrange(4))]


def a_reply(rng: random.Random) -> bytes:
    status = rng.choice(("ok", "ok", "error", "broken", a_value(rng)))
    reply = pack([status, a_value(rng)] if rng.random() < 0.9 else a_value(rng))
    framed = HEADER.pack(len(reply), 0) + reply
    return damaged(rng, framed) if rng.random() < 0.6 else framed


async def heard(data: bytes) -> tuple[Any, bool]:
    """What the parent makes of a child that says this and goes."""
    ours, theirs = socket.socketpair()
    link = TaskLink()
    with theirs:
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        (waiting,) = link.ask({0: b""})
        theirs.sendall(data)
    try:
        return await Child(link, bytearray()).reply(waiting, TIMEOUT_S)
    finally:
        link.close()


async def test_any_bytes_as_an_answer_give_a_value_or_a_failure(fuzz: Fuzz) -> None:
    sound = 0
    for _ in fuzz.share(0.02):
        value, usable = await heard(a_reply(fuzz.rng))
        sound += usable
        assert isinstance(value, KINDS)
        if isinstance(value, TaskFailed):
            assert len(value.reason) <= TASK_REASON_CHARS_MAX
    assert 0 < sound < len(fuzz.share(0.02))


@pytest.mark.parametrize("length", [TASK_MESSAGE_BYTES_MAX + 1, (1 << 32) - 1])
async def test_a_long_answer_is_not_read(length: int) -> None:
    value, usable = await heard(HEADER.pack(length, 0) + b"x" * 1000)
    assert (type(value), usable) == (TaskFailed, False)


@pytest.mark.parametrize(
    "value",
    [
        *([each, {}] for each in (math.nan, math.inf, -math.inf, 1, True, None, "1.0", b"1")),
        [1.0, []],
        [1.0, None],
        [1.0, {"a": 1}],
        [1.0, {"a": math.nan}],
        [1.0, {1: 1.0}],
        1.0,
        [1.0],
    ],
    ids=lambda value: repr(value),
)
async def test_only_a_finite_number_is_a_reward(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(_: TaskProcess, requests: list[bytes]) -> AsyncGenerator[Any, None]:
        for _each in requests:
            yield value

    monkeypatch.setattr(TaskProcess, "ask", ask)
    pool = TaskPool("sort_digits")
    assert isinstance(await pool.reward(FINE), TaskFailed)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [b""],
        [b"", {}, None],
        [b"123", {}, ""],
        [[1], {}, ""],
        [b"", [], ""],
        [b"", {"a": 1}, ""],
        [b"", {1: "a"}, ""],
        "abc",
    ],
)
async def test_only_a_list_of_tokens_is_a_prompt(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(_: TaskProcess, requests: list[bytes]) -> AsyncGenerator[Any, None]:
        for _each in requests:
            yield value

    monkeypatch.setattr(TaskProcess, "ask", ask)
    assert isinstance(await TaskPool("sort_digits").prompt(0), TaskFailed)


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [],
        ["n"],
        ["n", [], b"", None],
        ["n", ["x"], b"", None, False],
        [7, [], b"", None, False],
        ["n", [True], b"", None, False],
        ["n", [], "", None, False],
        ["n", [], b"", True, False],
        ["n", [], b"", None, 0],
    ],
)
async def test_a_task_with_a_malformed_first_message_cannot_start(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(_: TaskProcess) -> Any:
        return value

    monkeypatch.setattr(TaskProcess, "start", start)
    with pytest.raises(OperatorFault, match="introduces itself"):
        await TaskPool("sort_digits").start()


async def test_a_forged_answer_is_not_taken_for_that_of_the_next_call() -> None:
    """It answers twice, with the right number: the second answer is not taken for that of another request."""
    async with TaskPool(NASTY, timeout_s=TIMEOUT_S) as pool:
        calls = [ScoreCall(index_of(act), pack_tokens([1])) for act in ("twice", "fine", "fine")]
        forged, failed, after = [score async for score in pool.rewards(calls)]
    assert (forged, after) == (Score(99.0), Score(1.0))
    assert isinstance(failed, TaskFailed)
    assert "bytes to request 1" in failed.reason
