"""A task process that answers what it likes: the pool gives a value that is one, or a failure in one short line."""

import asyncio
import math
import random
import socket
from typing import Any

import pytest

from echo2d.errors import OperatorFault
from echo2d.tasks.base import Prompt
from echo2d.tasks.pool import Score, TaskPool
from echo2d.tasks.pool_child import HEADER, MESSAGE_BYTES_MAX, REASON_CHARS_MAX, pack
from echo2d.tasks.process import Child, TaskFailed, TaskProcess
from tests.support.fuzz import (
    INTERESTING_FLOATS,
    INTERESTING_INTS,
    INTERESTING_TEXTS,
    Fuzz,
    damaged,
)

TIMEOUT_S = 5.0
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
    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        theirs.sendall(data)
    try:
        return await Child(reader, writer).reply(0, TIMEOUT_S)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_any_bytes_for_an_answer(fuzz: Fuzz) -> None:
    sound = 0
    for _ in fuzz.share(0.02):
        value, usable = await heard(a_reply(fuzz.rng))
        sound += usable
        assert isinstance(value, KINDS)
        if isinstance(value, TaskFailed):
            assert len(value.reason) <= REASON_CHARS_MAX
    assert 0 < sound < len(fuzz.share(0.02))


@pytest.mark.parametrize("length", [MESSAGE_BYTES_MAX + 1, (1 << 32) - 1])
async def test_a_long_answer_is_not_read(length: int) -> None:
    value, usable = await heard(HEADER.pack(length, 0) + b"x" * 1000)
    assert (type(value), usable) == (TaskFailed, False)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 1, True, None, "1.0", [1.0], {}, b"1"],
    ids=lambda value: repr(value),
)
async def test_only_a_finite_number_is_a_reward(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(_: TaskProcess, requests: list[bytes]) -> list[Any]:
        return [value for _ in requests]

    monkeypatch.setattr(TaskProcess, "ask", ask)
    pool = TaskPool("sort_digits")
    assert isinstance(await pool.reward(Prompt((1,)), [1]), TaskFailed)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [1],
        [[1], None],
        [["1"], None, {}],
        [[1.0], None, {}],
        [[True], 0, {}],
        [[1], 0, []],
        "abc",
    ],
)
async def test_only_tokens_are_a_prompt(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(_: TaskProcess, requests: list[bytes]) -> list[Any]:
        return [value for _ in requests]

    monkeypatch.setattr(TaskProcess, "ask", ask)
    assert isinstance(await TaskPool("sort_digits").prompt(0), TaskFailed)


@pytest.mark.parametrize(
    "value", [None, 7, [], ["n"], ["n", 7], ["n", ["x"]], [7, []], ["n", [True]], "ab"]
)
async def test_a_task_that_introduces_itself_badly_cannot_start(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(_: TaskProcess) -> Any:
        return value

    monkeypatch.setattr(TaskProcess, "start", start)
    with pytest.raises(OperatorFault, match="introduces itself"):
        await TaskPool("sort_digits").start()


async def test_a_forged_answer_is_not_that_of_the_next_call() -> None:
    """It answers twice, with the right number: the second answer is not taken for that of another request."""
    async with TaskPool(NASTY, timeout_s=TIMEOUT_S) as pool:
        forged, failed, after = await pool.rewards(
            [(Prompt((1,), secret), [1]) for secret in ("twice", "fine", "fine")]
        )
    assert (forged, after) == (Score(99.0), Score(1.0))
    assert isinstance(failed, TaskFailed)
    assert "to request 1 instead of 2" in failed.reason
